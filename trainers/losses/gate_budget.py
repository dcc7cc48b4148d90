"""The budget of the routed experts' share in conditional routing (Elbayad et al. 2022).

Shape suffixes: T tokens, N experts of a layer.
"""

from dataclasses import dataclass

import torch

from ...core.errors import InputError
from ...core.schema import checked
from ...modeling import LayerRouting
from .layer_loss import LayerLoss, LossBatch, where_counted


def gate_budget_loss(
    router_logits_TN: torch.Tensor,
    budget: float,
    mask_T: torch.Tensor | None = None,
    count: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """`L_budget = mean_t |g(x_t) - b|` of conditional routing (Elbayad et al. Eq. 7), of a layer that shares expert 0,
    whose score is `1 - g`.

    Args:
        budget: b, the share of the routed experts.
        mask_T: bool, the counted tokens; all by default.
        count: divisor of the sum; the number of counted tokens by default.
    """
    distance_T = (1 - router_logits_TN.softmax(-1)[:, 0] - budget).abs()
    divisor = max(distance_T.shape[0], 1) if count is None else count
    if mask_T is not None:
        distance_T = where_counted(mask_T, distance_T)
        divisor = mask_T.sum().clamp(min=1) if count is None else count
    return distance_T.sum() / divisor


@checked
@dataclass(frozen=True)
class GateBudgetLoss(LayerLoss):
    """`gate_budget_loss` over the step's tokens, in layers with a shared expert (lambda_CMR); raises InputError where
    the budget is not from 0 to 1."""

    name = "budget"
    metrics = ("budget_loss",)

    coef: float = 0.1
    gate_budget: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gate_budget <= 1:
            raise InputError(f"GateBudgetLoss: gate_budget is {self.gate_budget}: must be at least 0 and at most 1.")

    def applies_to(self, routing: LayerRouting) -> bool:
        return routing.shared

    def layer_loss(self, batch: LossBatch, layer: int, count: torch.Tensor) -> torch.Tensor:
        return gate_budget_loss(batch.routing[layer].router_logits, self.gate_budget, batch.tokens.counted_T, count)
