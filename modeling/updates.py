"""Low-rank updates of linear maps (LoRA, Hu et al. 2021): `W x + b + alpha / r * B A x`, with A `[r, in]` and B
`[out, r]`, named, scaled and initialised as in PEFT: A is Kaiming-uniform and B zero, so that an update is zero at
first."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D


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


class OwnHead(LoraFactor):
    """A whole head of a language's own."""

    def init_part(self) -> None:
        """First weights, as those of `nn.Linear`."""
        init_kaiming(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)


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
        bias: whether B has one, which the layer's own is changed by (`lora_bias` of PEFT).
    """

    dropout = 0.0  # of its input, in training

    def __init__(self, layer: Any, name: str, rank: int, scaling: float, bias: bool = False) -> None:
        super().__init__()
        self.name = name
        inputs, outputs = sizes_of(layer)
        self.scaling = scaling
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


class EmbeddingUpdate(LoraUpdate):
    """The update of an embedding `[V, h]`: `scaling * B A`, A `[r, h]`, B `[V, r]`, as of a head that is tied to it."""

    def __init__(self, layer: Any, name: str, rank: int, scaling: float) -> None:
        super().__init__(layer, name, rank, scaling)
        # Gemma's and BART's kin scale their embeddings.
        self.factor = float(getattr(layer, "scalar_embed_scale", getattr(layer, "embed_scale", 1.0)))

    def forward(self, x: torch.Tensor, only_T: torch.Tensor | None = None) -> torch.Tensor:
        """`[...] -> [..., h]`, of tokens."""
        rows = F.embedding(x, self.lora_B.weight)
        rows = rows if only_T is None else rows.where(only_T.view(*rows.shape[:-1], 1), 0)
        return self.scaling * self.factor * F.linear(rows, self.lora_A.weight.T)


def sizes_of(layer: Any) -> tuple[int, int]:
    """The inputs and outputs of a map's weight; an embedding's is that of the head which is tied to it."""
    if isinstance(layer, Conv1D):
        return layer.nx, layer.nf
    if isinstance(layer, nn.Embedding):
        return layer.embedding_dim, layer.num_embeddings
    return layer.in_features, layer.out_features


def entries(name: str, settings: Any, fields: set[str], expansions: int) -> list[dict | None]:
    """The settings of a part that makes experts: those of all expansions, or of each, where some may be None.

    Raises:
        ValueError: they have another form.
    """
    each = settings["each"] if isinstance(settings, dict) and {*settings} == {"each"} else None
    is_each = isinstance(each, list) and len(each) == expansions
    found = list(each) if is_each else [settings]  # type: ignore[arg-type]
    if not any(found) or not all(
        (one is None and is_each) or (isinstance(one, dict) and {*one} == fields) for one in found
    ):
        raise ValueError(
            f"parts.{name} is {settings}: must have {', '.join(sorted(fields))}, or `each` with that for each of "
            f"{expansions} expansions."
        )
    return found


def of_packs(fields: dict[str, Any], *names: str) -> dict[str, list] | None:
    """A part's settings by `updates_of_packs` of an earlier version, which has these for some packs; None for none.

    Raises:
        ValueError: it does not fit `packs`.
    """
    updates, packs = fields["updates_of_packs"], fields.get("packs")
    if not isinstance(updates, list) or not isinstance(packs, list) or len(updates) != len(packs):
        raise ValueError(
            f"updates_of_packs is {updates}: must give the settings of the experts of each of the packs {packs}."
        )
    own = [dict(zip(names, one, strict=True)) if one and len(one) == len(names) else None for one in updates]
    each = [one for one, size in zip(own, packs, strict=True) for _ in range(size)]
    return {"each": each} if any(each) else None
