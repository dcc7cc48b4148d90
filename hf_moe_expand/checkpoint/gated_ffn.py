"""Which layers of an FFN are its gate and its up projection.

No list of names says it: the FFN's own code, run once with small random layers in place of its own, computes
`down(act(gate(x)) * up(x))` or another form.
"""

import copy
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..modeling.experts import shared_config


def gate_and_up(ffn: nn.Module) -> tuple[str, ...] | None:
    """The names of `gate` and `up`, or of one linear layer with the outputs of both, in an FFN that computes
    `down(act(gate(x)) * up(x))`, in training too; None if it computes another form, or has other parameters."""
    layers: Any = {name: layer for name, layer in ffn.named_modules() if type(layer) is nn.Linear}
    owned = {f"{name}.{kind}" for name, layer in layers.items() for kind, _ in layer.named_parameters()}
    if len(layers) not in (2, 3) or owned != {name for name, _ in ffn.named_parameters()}:
        return None
    activations = [n for n, value in {**vars(ffn), **ffn._modules}.items() if callable(value) and n not in layers]
    for *first, last in permutations(layers):
        if any(_computes(ffn, first, last, activation) for activation in activations):
            return tuple(first)
    return None


def _computes(ffn: nn.Module, first: Sequence[str], last: str, activation: str) -> bool:
    draw = torch.Generator().manual_seed(0)
    hidden, inner = 6, 10
    outputs = inner if len(first) == 2 else 2 * inner
    small = [*(_Small(hidden, outputs, draw) for _ in first), _Small(inner, hidden, draw)]
    replaced: dict[int, Any] = {
        id(ffn.get_submodule(name)): layer for name, layer in zip([*first, last], small, strict=True)
    }
    x = torch.randn(5, hidden, generator=draw, dtype=torch.float64, device="cpu")
    try:
        actual = copy.deepcopy(ffn, replaced | shared_config(ffn)).train()(x)
        gate, up = torch.cat([layer(x) for layer in small[:-1]], -1).chunk(2, -1)
        expected = small[-1](getattr(ffn, activation)(gate) * up)
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
