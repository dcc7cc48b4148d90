"""The language-prior routing loss of MoE-LPR and LayerMoE, which sends tokens of old languages to expert 0.

Shape suffixes: T tokens, N experts of a layer.
"""

from dataclasses import dataclass

import torch

from ...core.schema import checked
from .layer_loss import LayerLoss, LossBatch, where_counted


def language_prior_routing_loss(
    router_logits_TN: torch.Tensor, old_T: torch.Tensor, count: float | torch.Tensor | None = None
) -> torch.Tensor:
    """`L_LPR = - mean over old tokens of log G_0(t)` (MoE-LPR Eq. 9-10): old-language tokens go to expert 0.

    Args:
        old_T: bool, the tokens of old languages (F(t) in the paper).
        count: divisor of the sum; the number of old tokens by default (0 tokens give 0).
    """
    log_scores_T = router_logits_TN.log_softmax(-1)[:, 0]
    divisor = old_T.sum().clamp(min=1) if count is None else count
    return -where_counted(old_T, log_scores_T).sum() / divisor


@checked
@dataclass(frozen=True)
class LanguagePriorLoss(LayerLoss):
    """`language_prior_routing_loss` over the old tokens of the step (beta of MoE-LPR, LayerMoE)."""

    name = "language_prior"
    metrics = ("language_prior_loss",)
    needs_languages = True
    over = "old"

    coef: float = 0.1

    def layer_loss(self, batch: LossBatch, layer: int, count: torch.Tensor) -> torch.Tensor:
        routing, old_T = batch.routing[layer], batch.tokens.old_T
        if routing.own is not None:  # the class has decided: a token that cannot take expert 0 is no affair of a router
            old_T = old_T & routing.own[:, 0]
        return language_prior_routing_loss(routing.scored_logits, old_T, count)
