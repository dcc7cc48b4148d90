"""Added experts: `E_e(x) = E_0(x) + D_e(x)`, with E_0 the base's own block as it is, a dense FFN or a whole mixture.

D_e is a gated FFN of any width, `down(act(gate(x)) * up(x))`, whose `down` starts at zero, so that a new expert gives
the output of expert 0. A token's weights sum to 1, hence `y = E_0(x) + sum_e w_e D_e(x)`: the block runs once for all
tokens, called as the dense layer calls it, and a token that takes expert 0 alone gets its bits.

Shape suffixes as in `routing.py`.
"""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .dispatch import dispatch, run_expert
from .experts import init_kaiming
from .plain_ffn import PlainFFN

# The names that configurations have for their FFN's activation.
_ACTIVATIONS = (
    "hidden_act", "hidden_activation", "activation_function", "activation", "afn", "dense_act_fn", "mlp_hidden_act",
)  # fmt: skip


class AddedExpert(nn.Module):
    """D_e, `[..., h] -> [..., h]`.

    Args:
        hidden_size: h.
        width: rows of `gate` and `up`.
        activation: name of the activation (`ACT2FN`).
    """

    form = PlainFFN(nn.Linear, ("gate_proj", "up_proj"), "down_proj", "act_fn", True)

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


def run_added(
    experts: nn.ModuleList,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    weights_TK: torch.Tensor,
    index_TK: torch.Tensor,
    training: bool,
) -> Any:
    """The layer's output, `[..., h] -> [..., h]`: expert 0's, which includes the residual if it takes one, and the
    weighted outputs of the added experts. Whatever expert 0 returns beside its output is passed on."""
    added = list(experts)[1:]
    # In the list without expert 0 the others are one number lower, and "no expert", at its end, is expert 0 too.
    others_TK = torch.where(index_TK == 0, len(added), index_TK - 1)
    y_Th = dispatch(added, hidden_states, weights_TK, others_TK, False, training, AddedExpert.form)
    return _plus(_base(experts, hidden_states, residual), y_Th)


def run_one_added(
    experts: nn.ModuleList, number: int, hidden_states: torch.Tensor, residual: torch.Tensor | None, training: bool
) -> Any:
    """One expert on all tokens: expert 0 alone, or with the added expert `number`."""
    y = _base(experts, hidden_states, residual)
    if number:
        y = _plus(y, experts[number](hidden_states))
    if training:  # the other experts stay in the graph, as in `run_in_turn`
        nothing_0h = hidden_states.flatten(0, -2)[:0]
        idle = sum(run_expert(other, nothing_0h, False).sum() for other in list(experts)[1:])
        y = _plus(y, idle)
    return y


def _base(experts: nn.ModuleList, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
    return experts[0](hidden_states, *(() if residual is None else (residual,)))


def _plus(output: Any, change: Any) -> Any:
    """Expert 0's output with a change of its hidden states, `[T, h]` or a number."""
    if isinstance(output, tuple):
        return _plus(output[0], change), *output[1:]
    return output + (change.view(output.shape) if change.dim() else change).to(output.dtype)
