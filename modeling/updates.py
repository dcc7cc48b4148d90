"""Low-rank updates of linear maps (LoRA, Hu et al. 2021): `W x + b + alpha / r * B A x`, with A `[r, in]` and B
`[out, r]`, named, scaled and initialised as in PEFT; and what parts that make small experts have in common."""

import math
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D

from .part import BasePart


class LoraFactor(nn.Module):
    """A linear map, A or B of an update.

    Not an `nn.Linear`, so that quantisation and "all linear layers" adapters leave it alone.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def init_kaiming(weight: torch.Tensor, generator: torch.Generator | None = None) -> None:
    """Kaiming uniform, as PEFT (for A) and `nn.Linear`."""
    init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)


class LoraUpdate(nn.Module):
    """`scaling * B A x`, the update of a linear layer or, as of a head that is tied to it, of an embedding.

    Args:
        layer: the layer.
        name: its name in the module that owns it.
        rank: r.
        scaling: `alpha / r`.
        bias: whether B has one, which the layer's own is changed by (`lora_bias` of PEFT).
    """

    dropout = 0.0  # of its input, in training

    def __init__(self, layer: Any, name: str, rank: int, scaling: float, bias: bool = False) -> None:
        super().__init__()
        if isinstance(layer, Conv1D):
            inputs, outputs = layer.nx, layer.nf
        elif isinstance(layer, nn.Embedding):
            inputs, outputs = layer.embedding_dim, layer.num_embeddings
        else:
            inputs, outputs = layer.in_features, layer.out_features
        self.name, self.scaling = name, scaling
        self.lora_A = LoraFactor(inputs, rank)
        self.lora_B = LoraFactor(rank, outputs, bias)

    def forward(self, x: torch.Tensor, only_T: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., in] -> [..., out]`; zero but for the tokens of `only_T` (bool), if given."""
        low = self.lora_A(F.dropout(x, self.dropout) if self.dropout and self.training else x)
        if only_T is None:  # in PEFT's order
            change = self.lora_B(low)
            return change if self.scaling == 1 else self.scaling * change
        return self.lora_B((self.scaling * low).where(only_T.view(*low.shape[:-1], 1), 0))

    def init_part(self) -> None:
        """First weights: random rows in A and zeros in B, so that the update is zero at first."""
        init_kaiming(self.lora_A.weight)
        for factor in self.lora_B.parameters():
            init.zeros_(factor)


class PartOfExperts(BasePart):
    """A part that makes experts. Its settings are those of all of them, or `{"each": [...]}`, those of the experts of
    each expansion, None where they are FFNs."""

    @classmethod
    def read(cls, fields: dict[str, Any], config: Any) -> Any:
        if (updates := fields.get("updates_of_packs")) is None:
            return super().read(fields, config)
        keys = [*cls.flat.values()]
        own = [dict(zip(keys, one, strict=True)) if one and len(one) == len(keys) else None for one in updates]
        each = [one for one, size in zip(own, fields["packs"], strict=True) for _ in range(size)]
        return {"each": each} if any(each) else None

    def check(self) -> None:
        each = self.settings.get("each", [self.settings])
        if not any(each) or ("each" in self.settings and len(each) != len(self.config.counts_of_expansions)):
            raise ValueError(f"parts.{self.name} is {self.settings}: must have settings, or those of each expansion.")
        for one in each:
            if one is not None:
                self.check_expert(**one)

    def check_expert(self, **settings: Any) -> None:
        """Raises ValueError where an expansion's settings are wrong."""

    def make_expert(self, layer: int, number: int) -> Callable[[nn.Module], nn.Module] | None:
        one = self.settings
        if "each" in one:
            ends = [counts[layer] for counts in self.config.counts_of_expansions]
            one = one["each"][bisect_right(ends, number)]
        return None if one is None else partial(self.make, **one)

    def make(self, ffn: nn.Module, **settings: Any) -> nn.Module:
        """An expert, made of a layer's FFN."""
        raise NotImplementedError
