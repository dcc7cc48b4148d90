"""Added experts: `E_e(x) = E_0(x) + D_e(x)`, with E_0 the block of the base as it is, a dense FFN or a mixture. D_e
is a gated FFN of any width with a last layer of zeros at first, so that a new expert gives the output of expert 0."""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .dispatch import dispatch
from .expanded_ffn import ExpandedFFN, run_whole
from .routing import LayerRouting
from .updates import PartOfExperts, init_kaiming

# The names that configurations have for their FFN's activation.
_ACTIVATIONS = (
    "hidden_act", "hidden_activation", "activation_function", "activation", "afn", "dense_act_fn", "mlp_hidden_act",
)  # fmt: skip


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

    def init_part(self) -> None:
        """First weights: random rows, and zeros in `down`."""
        init_kaiming(self.gate_proj.weight)
        init_kaiming(self.up_proj.weight)
        init.zeros_(self.down_proj.weight)


class AddedFFN(ExpandedFFN):
    """An expanded FFN whose new experts are added to expert 0's output."""

    def _run_chosen(
        self, routing: LayerRouting, home_T: torch.Tensor | None, hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> Any:  # fmt: skip
        """A token's weights sum to 1, hence `y = E_0(x) + sum_e w_e D_e(x)`: the block runs once for all tokens, called
        as the dense layer calls it, and a token that takes expert 0 alone gets its bits. Whatever expert 0 returns
        beside its output is passed on."""
        new = list(self.experts)[1:]
        # In the list without expert 0 the others are one number lower, and "no expert", at its end, is expert 0 too.
        others_TK = torch.where(routing.experts == 0, len(new), routing.experts - 1)
        y_Th = dispatch(new, hidden_states, routing.weights, others_TK, False, self.training)
        return _plus(run_whole(self.experts[0], hidden_states, residual), y_Th)

    def _run_single(
        self, number: int, hidden_states: torch.Tensor, residual: torch.Tensor | None, training: bool = False
    ) -> Any:
        y = run_whole(self.experts[0], hidden_states, residual)
        y = _plus(y, self.experts[number](hidden_states)) if number else y
        if training:  # idle experts stay in the graph, as in `run_in_turn`
            nothing_0h = hidden_states.flatten(0, -2)[:0]
            y = _plus(y, sum(other(nothing_0h).sum() for other in list(self.experts)[1:]))
        return y


def _plus(output: Any, change: Any) -> Any:
    """Expert 0's output with a change of its hidden states, `[T, h]` or a number."""
    if isinstance(output, tuple):
        return _plus(output[0], change), *output[1:]
    return output + (change.view(output.shape) if change.dim() else change).to(output.dtype)


class Part(PartOfExperts):
    """An expert's settings are `{"width": w}`."""

    name = kind = "added"
    flat: ClassVar = {"expert_width": "width"}
    layer_class = AddedFFN
    splits = "0"  # new experts are small, and every rank keeps them whole
    beside_mixtures = True
    not_beside: ClassVar = {"lora": "added experts stand beside added experts alone"}

    def check(self) -> None:
        if None in self.settings.get("each", ()):
            raise ValueError(f"parts.added: {self.not_beside['lora']}.")
        super().check()

    def check_expert(self, width: Any = None) -> None:  # type: ignore[override]
        if not isinstance(width, int) or width < 1:
            raise ValueError(f"expert_width is {width!r}: added experts need a width of at least 1.")

    def make(self, ffn: nn.Module, width: int) -> nn.Module:  # type: ignore[override]
        names = (getattr(self.config, name, None) for name in _ACTIVATIONS)
        activation = next((name for name in names if isinstance(name, str) and name in ACT2FN), "silu")
        if any(True for _ in ACT2FN[activation].parameters()):  # one with weights of its own
            activation = "silu"
        return AddedExpert(self.config.hidden_size, width, activation)
