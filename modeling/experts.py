"""New experts: copies of the backbone's FFN, or expert 0 with a low-rank update on its linear layers (LoRA). A third
kind is in `added_experts.py`.

LoRA (Hu et al. 2021): `W x + b + alpha / r * B A x`, with A `[r, in]` and B `[out, r]`, named, scaled and initialised
as in PEFT: A is Kaiming-uniform and B zero, so that a new expert gives the output of expert 0.

MoLA (Gao et al., Findings of NAACL 2025) and LoRAMoE (Dou et al. 2024) make each linear layer a separate mixture,
`W x + sum_e w_e B_e A_e x`, with its own router, inside the FFN's non-linearity. Here an expert is a whole FFN as in
every expansion, `y = sum_e w_e FFN_{W + alpha / r * B_e A_e}(x)`, including expert 0 without an update, with one router
for all. Both agree for an FFN that is one linear layer, since the weights sum to 1.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D


def shared_config(ffn: nn.Module) -> dict[int, Any]:
    """The second argument that makes `copy.deepcopy` of an FFN share its configuration: a later switch of the
    attention implementation must reach all copies."""
    return {id(value): value for value in vars(ffn).values() if isinstance(value, PreTrainedConfig)}


def copy_ffn(ffn: nn.Module) -> nn.Module:
    """A copy of a backbone's FFN that shares its configuration."""
    memo = shared_config(ffn)
    # While DeepSpeed's ZeRO-3 loads a model, a parameter is an empty shell (`ds_shape` is its shape), which
    # `copy.deepcopy` cannot copy. Copies are made whole, to be loaded later, and are then passed to ZeRO-3.
    shells: list[Any] = [parameter for parameter in ffn.parameters() if hasattr(parameter, "ds_shape")]
    for shell in shells:
        memo[id(shell)] = nn.Parameter(torch.empty(shell.ds_shape, dtype=shell.dtype, device=shell.device))
    copied = copy.deepcopy(ffn, memo)
    if shells:
        shells[0].convert_to_zero_parameters(param_list=[memo[id(shell)] for shell in shells])
    return copied


class LoraFactor(nn.Module):
    """A bias-free linear map, A or B of an update.

    Not an `nn.Linear`, so that quantisation and "all linear layers" adapters leave it alone.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class LoraA(LoraFactor):
    """`[..., in] -> [..., r]`."""


class LoraB(LoraFactor):
    """`[..., r] -> [..., out]`. Starts at zero, so that the update is zero at first."""


def init_kaiming(weight: torch.Tensor, generator: torch.Generator | None = None) -> None:
    """Kaiming uniform, as PEFT (for A) and `nn.Linear`."""
    init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)


class LoraLinear(nn.Module):
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
        super().__init__()
        layer: Any = ffn.get_submodule(name)
        inputs, outputs = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)
        self.owner = (ffn,)  # in a tuple, so that it is not a submodule
        self.name = name
        self.scaling = alpha / rank
        self.lora_A = LoraA(inputs, rank)
        self.lora_B = LoraB(rank, outputs)

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own weight, whose type T5's FFN reads."""
        return self.owner[0].get_submodule(self.name).weight  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.owner[0].get_submodule(self.name)(x) + self.scaling * self.lora_B(self.lora_A(x))

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
