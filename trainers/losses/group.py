"""DMoE's language-group loss: the router classifies a token's language group."""

from dataclasses import dataclass

import torch

from .base import LayerLoss, LossBatch
from .classifier import classifier_loss, record_accuracy


@dataclass(frozen=True)
class GroupLoss(LayerLoss):
    """`L_group = mean over (layer, token) of - log p(group | token)` (DMoE Eq. 3): `classifier_loss` of the routers,
    over the tokens of known language in the step (lambda of DMoE)."""

    name = "group"
    metrics = ("group_loss", "group_accuracy")
    needs_languages = True
    needs_groups = True
    over = "tagged"

    coef: float = 1.28

    def layer_loss(self, batch: LossBatch, layer: int, count: torch.Tensor) -> torch.Tensor:
        logits_TN = batch.routing[layer].router_logits
        record_accuracy(batch, "group_accuracy", logits_TN)
        return classifier_loss(logits_TN, batch.tokens.class_T, batch.tokens.tagged_T, count)
