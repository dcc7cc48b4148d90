"""Conditional routing (CMR, Elbayad et al. 2022): all tokens share expert 0, whose share is learned.

Shape suffixes as in `routing.py`.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from .expanded_ffn import ExpandedFFN
from .part import BasePart
from .routing import Choice, Scores
from .routing_control import RoutingRequest


class ConditionalGate(Scores):
    """`w x`, `[T, h] -> [T, 1]`; its sigmoid is the share of the routed experts in a token's output, one half at
    first."""


def with_shared_expert(logits_TN: torch.Tensor, gate_logits_T: torch.Tensor) -> torch.Tensor:
    """Router logits of a layer with conditional routing, whose softmax is each expert's share: `1 - g` for expert 0,
    the shared one, and `g G_i` for the others, with `g = sigmoid(gate_logits)` (Elbayad et al. Eq. 4) and the scores G
    over the routed experts 1..N-1."""
    shared_T1 = F.logsigmoid(-gate_logits_T).unsqueeze(-1)
    routed_TN = F.logsigmoid(gate_logits_T).unsqueeze(-1) + logits_TN[:, 1:].log_softmax(-1)
    return torch.cat([shared_T1, routed_TN], -1)


def beside_shared(
    logits_TN: torch.Tensor, weights_TK: torch.Tensor, index_TK: torch.Tensor, closed_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Conditional routing (Elbayad et al. Eq. 5): `y = (1 - g) E_0(x) + g sum_k weight_k E_k(x)`.

    Args:
        logits_TN: see `with_shared_expert`.
        weights_TK, index_TK: weights and indices of the routed experts, numbered from 0.
        closed_T: bool, the tokens whose g is 0.

    Returns:
        weights `[T, 1 + K]` and expert indices `[T, 1 + K]`, expert 0 first; index N where no expert runs.
    """
    gate_T1 = 1 - logits_TN[:, :1].exp()
    if closed_T is not None:
        gate_T1 = gate_T1.masked_fill(closed_T.unsqueeze(-1), 0)
    index_TK = (index_TK + 1).masked_fill(gate_T1 == 0, logits_TN.shape[-1])
    return (
        torch.cat([1 - gate_T1, gate_T1 * weights_TK], -1),
        torch.cat([torch.zeros_like(index_TK[:, :1]), index_TK], -1),
    )


class ConditionalFFN(ExpandedFFN):
    """An expanded FFN with a shared expert."""

    shares_expert_0 = True
    model_config: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conditional_gate = ConditionalGate(self.model_config.hidden_size, 1)

    def score(self, request: RoutingRequest, x_Th: torch.Tensor) -> torch.Tensor:
        return with_shared_expert(super().score(request, x_Th), self.conditional_gate(x_Th).squeeze(-1))

    def choose(
        self, request: RoutingRequest, logits_TN: torch.Tensor, allowed_TN: torch.Tensor | None,
        closed_T: torch.Tensor | None = None,
    ) -> Choice:  # fmt: skip
        if allowed_TN is not None:
            allowed_TN = allowed_TN[:, 1:]
            closed_T = ~allowed_TN.any(-1)
            allowed_TN = allowed_TN | closed_T.unsqueeze(-1)
        choice = super().choose(request, logits_TN[:, 1:], allowed_TN, closed_T)
        weights_TK, index_TK = beside_shared(logits_TN, choice.weights, choice.experts, choice.closed)
        return replace(choice, weights=weights_TK, experts=index_TK)


class Part(BasePart):
    """`config.parts["cmr"]` is true."""

    name = "cmr"
    flat: ClassVar = {"conditional_routing": None}
    not_beside: ClassVar = {
        "exclusive": "a token of a new language takes its expert alone, but conditional routing shares expert 0",
        "dmoe": "conditional routing shares expert 0, which in a DMoE belongs to a group",
    }
    layer_class = ConditionalFFN
    shares_expert_0 = True

    def check(self) -> None:
        if self.settings is not True:
            raise ValueError(f"conditional_routing is {self.settings!r}: must be true or false.")
