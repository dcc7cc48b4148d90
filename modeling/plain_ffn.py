"""Plain FFNs, `down(act(gate(x)) * up(x))` or `down(act(up(x)))`, of which all experts of a layer can run together.

Whether an FFN is plain, and which of its layers is which, no list of names says: its own code, run once with small
random layers in place of its own, computes the form or another one.
"""

import copy
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from .experts import shared_config


@dataclass(frozen=True)
class PlainFFN:
    """The form of a plain FFN.

    Attributes:
        kind: class of its linear layers, `nn.Linear` or `Conv1D`.
        first: names of `gate` and `up`, of one layer with the outputs of both, or of `up`.
        last: name of `down`.
        activation: name of `act`.
        gated: whether there is a gate.
    """

    kind: type[Any]
    first: tuple[str, ...]
    last: str
    activation: str
    gated: bool

    def layers(self, expert: nn.Module) -> list[Any]:
        """The linear layers of an expert, `down` last."""
        return [expert.get_submodule(name) for name in (*self.first, self.last)]

    def inner(self, activation: Any, hidden_AF: torch.Tensor) -> torch.Tensor:
        """The input of `down`, `[A, f]`, from the outputs of the layers before it."""
        if not self.gated:
            return activation(hidden_AF)
        gate_Af, up_Af = hidden_AF.chunk(2, -1)
        return activation(gate_Af) * up_Af


def plain_form(ffn: nn.Module) -> PlainFFN | None:
    """The form that an FFN computes, in training too; None if it is not plain."""
    layers: Any = {name: layer for name, layer in ffn.named_modules() if type(layer) in (nn.Linear, Conv1D)}
    kinds = {type(layer) for layer in layers.values()}
    owned = {f"{name}.{kind}" for name, layer in layers.items() for kind, _ in layer.named_parameters()}
    if len(layers) not in (2, 3) or len(kinds) != 1 or owned != {name for name, _ in ffn.named_parameters()}:
        return None
    activations = [n for n, value in {**vars(ffn), **ffn._modules}.items() if callable(value) and n not in layers]
    for *first, last in permutations(layers):
        for activation in activations:
            for gated in (True, False):
                form = PlainFFN(next(iter(kinds)), tuple(first), last, activation, gated)
                if (gated or len(first) == 1) and _computes(ffn, form):
                    return form
    return None


def _computes(ffn: nn.Module, form: PlainFFN) -> bool:
    draw = torch.Generator().manual_seed(0)
    hidden, inner = 6, 10
    outputs = 2 * inner if form.gated and len(form.first) == 1 else inner
    small = [*(_Small(hidden, outputs, draw) for _ in form.first), _Small(inner, hidden, draw)]
    replaced: dict[int, Any] = {id(layer): other for layer, other in zip(form.layers(ffn), small, strict=True)}
    x = torch.randn(5, hidden, generator=draw, dtype=torch.float64, device="cpu")
    try:
        actual = copy.deepcopy(ffn, replaced | shared_config(ffn)).train()(x)
        activation = getattr(ffn, form.activation)
        expected = small[-1](form.inner(activation, torch.cat([layer(x) for layer in small[:-1]], -1)))
        return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-9, atol=1e-12)
    except Exception:  # code of another form fails in many ways
        return False


class _Small(nn.Module):
    """A linear layer whose weights are no parameters, since the library may create those on another device."""

    def __init__(self, inputs: int, outputs: int, draw: torch.Generator) -> None:
        super().__init__()
        self.weight = torch.randn(outputs, inputs, generator=draw, dtype=torch.float64, device="cpu")
        self.bias = torch.randn(outputs, generator=draw, dtype=torch.float64, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
