"""LoRA experts: expert 0 with a low-rank update on its linear layers (`updates.py`).

MoLA (Gao et al., Findings of NAACL 2025) and LoRAMoE (Dou et al. 2024) make each linear layer a separate mixture,
`W x + sum_e w_e B_e A_e x`, with its own router, inside the FFN's non-linearity. Here an expert is a whole FFN as in
every expansion, `y = sum_e w_e FFN_{W + alpha / r * B_e A_e}(x)`, including expert 0 without an update, with one router
for all. Both agree for an FFN that is one linear layer, since the weights sum to 1.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .expanded_ffn import shared_config
from .part import BasePart
from .updates import LoraUpdate, entries, of_packs


class LoraLinear(LoraUpdate):
    """A linear layer of another FFN with its own update.

    The layer is looked up by name at each call, so that a layer that replaced it (quantised, adapted, offloaded) is
    used. It is not a submodule: its weights are listed, saved and moved once, with the FFN that owns them.

    Args:
        ffn: the FFN that owns the layer.
        name: name of the layer in the FFN.
        rank: r.
        alpha: the update is scaled by `alpha / r`.
    """

    def __init__(self, ffn: nn.Module, name: str, rank: int, alpha: float) -> None:
        super().__init__(ffn.get_submodule(name), name, rank, alpha / rank)
        self.owner = (ffn,)  # in a tuple, so that it is not a submodule

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own weight, whose type T5's FFN reads."""
        return self.owner[0].get_submodule(self.name).weight  # type: ignore[return-value]

    def forward(self, x: torch.Tensor, only_T: torch.Tensor | None = None) -> torch.Tensor:
        return self.owner[0].get_submodule(self.name)(x) + super().forward(x, only_T)

    def extra_repr(self) -> str:
        return f"of expert 0: {self.name}"


def lora_expert(ffn: nn.Module, rank: int, alpha: float) -> nn.Module:
    """A module of the FFN's own class, with a `LoraLinear` in place of each linear layer.

    Raises:
        ValueError: the FFN has weights outside linear layers, for which LoRA has no update.
    """
    linear = {name: module for name, module in ffn.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    for name, _ in ffn.named_parameters():
        if name.rpartition(".")[0] not in linear:
            raise ValueError(
                f"{type(ffn).__name__} has a weight outside linear layers, {name}: use expert_kind 'ffn' instead."
            )
    memo: dict[int, Any] = {id(layer): LoraLinear(ffn, name, rank, alpha) for name, layer in linear.items()}
    return copy.deepcopy(ffn, memo | shared_config(ffn))


class Part(BasePart):
    """`config.parts["lora"]` is `{"rank": r, "alpha": a}`; or `{"each": [...]}` with one such entry for each expansion,
    None for one whose experts are FFNs."""

    name, kind = "lora", "lora"
    flat = ("lora_rank", "lora_alpha")
    splits = None  # an update is added to a layer's whole output
    not_served = (
        "{server} merges the linear layers of expert 0, which LoRA experts update: serve this model with transformers, "
        "or a dense model of one expert (`hf-moe-expand export --expert`)."
    )

    @classmethod
    def read(cls, fields: dict[str, Any], config: Any) -> Any:
        if fields.get("updates_of_packs") is not None:
            return of_packs(fields, "rank", "alpha")
        settings = {"rank": fields.get("lora_rank"), "alpha": fields.get("lora_alpha")}
        return settings if fields.get("expert_kind") == "lora" else None

    @classmethod
    def flat_value(cls, settings: Any, name: str) -> Any:
        return (settings or {}).get(name.removeprefix("lora_"))

    def check(self) -> None:
        for one in entries("lora", self.settings, {"rank", "alpha"}, len(self.config.counts_of_expansions)):
            rank, alpha = (1, 1.0) if one is None else (one["rank"], one["alpha"])
            if not (isinstance(rank, int) and rank >= 1 and isinstance(alpha, int | float) and alpha > 0):
                raise ValueError(
                    f"lora_rank is {rank!r} and lora_alpha {alpha!r}: LoRA experts need a rank of at least 1 "
                    "and an alpha above 0."
                )

    def make_expert(self, layer: int, number: int) -> Callable[[nn.Module], nn.Module] | None:
        one = self.config.of_expansion(self.settings, layer, number)
        return None if one is None else partial(lora_expert, **one)
