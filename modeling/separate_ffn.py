"""An FFN whose linear layers stand one by one in the layer (OPT, XGLM, BART, M2M100), as a module."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def has_separate_ffn(layer: nn.Module) -> bool:
    """Whether a layer computes `fc2(dropout(activation_fn(fc1(x))))` itself."""
    first, second = getattr(layer, "fc1", None), getattr(layer, "fc2", None)
    return (
        isinstance(first, nn.Linear)
        and isinstance(second, nn.Linear)
        and callable(getattr(layer, "activation_fn", None))
        and first.in_features == second.out_features
    )


class SeparateFFN(nn.Module):
    """`fc2(dropout(activation_fn(fc1(x))))` of a layer, whose modules and names it shares."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.fc1, self.activation_fn, self.fc2 = layer.fc1, layer.activation_fn, layer.fc2
        self.dropout = float(getattr(layer, "activation_dropout", 0.0))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner = F.dropout(self.activation_fn(self.fc1(hidden_states)), self.dropout, self.training)
        return self.fc2(inner)


def put_in_place(layer: Any, expanded: nn.Module) -> None:
    """Lets the layer call `expanded` where it called `fc1`, and nothing afterwards."""
    layer.fc1 = expanded
    layer.activation_fn, layer.fc2, layer.activation_dropout = nn.Identity(), nn.Identity(), 0.0
