"""LoRA experts: expert 0 with a low-rank update on its linear layers (`updates.py`).

MoLA (Gao et al., Findings of NAACL 2025) and LoRAMoE (Dou et al. 2024) make each linear layer a separate mixture,
`W x + sum_e w_e B_e A_e x`, with its own router, inside the FFN's non-linearity. Here an expert is a whole FFN as in
every expansion, `y = sum_e w_e FFN_{W + alpha / r * B_e A_e}(x)`, including expert 0 without an update, with one router
for all. Both agree for an FFN that is one linear layer, since the weights sum to 1.
"""

import copy
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .expanded_ffn import shared_config
from .updates import LoraUpdate, PartOfExperts


class LoraLinear(LoraUpdate):
    """A linear layer of another FFN with its own update.

    The layer is looked up by name at each call, so that a layer that replaced it (quantised, adapted, offloaded) is
    used. It is not a submodule: its weights are listed, saved and moved once, with the FFN that owns them.
    """

    def __init__(self, ffn: nn.Module, name: str, rank: int, scaling: float) -> None:
        super().__init__(ffn.get_submodule(name), name, rank, scaling)
        self.owner = (ffn,)  # in a tuple, so that it is not a submodule

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own weight, whose type T5's FFN reads."""
        return self.owner[0].get_submodule(self.name).weight  # type: ignore[return-value]

    def forward(self, x: torch.Tensor, only_T: torch.Tensor | None = None) -> torch.Tensor:
        return self.owner[0].get_submodule(self.name)(x) + super().forward(x, only_T)


class Part(PartOfExperts):
    """An expert's settings are `{"rank": r, "alpha": a}`."""

    name = kind = "lora"
    flat: ClassVar = {"lora_rank": "rank", "lora_alpha": "alpha"}
    splits = None  # an update is added to a layer's whole output
    not_served = (
        "{server} merges the linear layers of expert 0, which LoRA experts update: serve this model with transformers, "
        "or a dense model of one expert (`hf-moe-expand export --expert`)."
    )

    def check_expert(self, rank: Any = None, alpha: Any = None) -> None:  # type: ignore[override]
        if not (isinstance(rank, int) and rank >= 1 and isinstance(alpha, int | float) and alpha > 0):
            raise ValueError(
                f"lora_rank is {rank!r} and lora_alpha {alpha!r}: LoRA experts need a rank of at least 1 and an alpha "
                "above 0."
            )

    def make(self, ffn: nn.Module, rank: int, alpha: float) -> nn.Module:  # type: ignore[override]
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
        memo: dict[int, Any] = {id(layer): LoraLinear(ffn, name, rank, alpha / rank) for name, layer in linear.items()}
        return copy.deepcopy(ffn, memo | shared_config(ffn))
