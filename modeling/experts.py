"""New experts: copies of the backbone's FFN, expert 0 with a low-rank update on its linear layers (LoRA), or expert 0
with a small FFN beside it (added experts).

LoRA (Hu et al. 2021): `W x + b + alpha / r * B A x`, with A `[r, in]` and B `[out, r]`, named, scaled and initialised
as in PEFT: A is Kaiming-uniform and B zero, so that a new expert gives the output of expert 0.

MoLA (Gao et al., Findings of NAACL 2025) and LoRAMoE (Dou et al. 2024) make each linear layer a separate mixture,
`W x + sum_e w_e B_e A_e x`, with its own router, inside the FFN's non-linearity. Here an expert is a whole FFN as in
every expansion, `y = sum_e w_e FFN_{W + alpha / r * B_e A_e}(x)`, including expert 0 without an update, with one router
for all. Both agree for an FFN that is one linear layer, since the weights sum to 1.

Added experts: `E_e(x) = E_0(x) + D_e(x)`, with E_0 the base's own block as it is, a dense FFN or a whole mixture. D_e
is a gated FFN of any width whose last layer starts at zero, so that a new expert gives the output of expert 0 too.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

# The names that configurations have for their FFN's activation.
_ACTIVATIONS = (
    "hidden_act", "hidden_activation", "activation_function", "activation", "afn", "dense_act_fn", "mlp_hidden_act",
)  # fmt: skip


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


def init_kaiming(weight: torch.Tensor, generator: torch.Generator | None = None) -> None:
    """Kaiming uniform, as PEFT (for A) and `nn.Linear`."""
    init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)


class LoraUpdate(nn.Module):
    """`scaling * B A x`, the update of one linear layer.

    Args:
        layer: the layer.
        name: its name in the module that owns it.
        rank: r.
        scaling: `alpha / r`.
    """

    dropout = 0.0  # of its input, in training

    def __init__(self, layer: Any, name: str, rank: int, scaling: float) -> None:
        super().__init__()
        self.name = name
        inputs, outputs = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)
        self.scaling = scaling
        self.lora_A = LoraFactor(inputs, rank)
        self.lora_B = LoraFactor(rank, outputs)

    def forward(self, x: torch.Tensor, only_T: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., in] -> [..., out]`; zero but for the tokens of `only_T` (bool), if given."""
        low = self.lora_A(F.dropout(x, self.dropout) if self.dropout and self.training else x)
        if only_T is None:  # in PEFT's order
            return self.scaling * self.lora_B(low)
        return self.lora_B((self.scaling * low).where(only_T.view(*low.shape[:-1], 1), 0))

    def init_weights(self) -> None:
        """First weights: random rows in A and zeros in B, so that the update is zero at first."""
        init_kaiming(self.lora_A.weight)
        init.zeros_(self.lora_B.weight)


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


class AddedExpert(nn.Module):
    """`D_e(x) = down(act(gate(x)) * up(x))`, `[..., h] -> [..., h]`, with `width` rows in `gate` and `up`."""

    def __init__(self, hidden_size: int, width: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)
        self.act_fn = ACT2FN[activation]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))

    def init_weights(self) -> None:
        """First weights: random rows, and zeros in `down`."""
        for layer in (self.gate_proj, self.up_proj):
            init_kaiming(layer.weight)
        init.zeros_(self.down_proj.weight)


def activation_of(config: Any) -> str:
    """The name of a backbone's activation; `silu` where its configuration has none, or one with weights of its own."""
    names = (getattr(config, name, None) for name in _ACTIVATIONS)
    name = next((name for name in names if isinstance(name, str) and name in ACT2FN), "silu")
    return "silu" if any(True for _ in ACT2FN[name].parameters()) else name
