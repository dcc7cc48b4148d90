"""The loss of LayerMoE's routing classifiers, which learn the class of each token's language, and DMoE's, whose routers
learn its group.

Shape suffixes: T tokens, C classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...core.schema import checked
from ...modeling import LayerRouting
from .layer_loss import LayerLoss, LossBatch

_IGNORED = -100


def classifier_loss(
    classifier_logits_TC: torch.Tensor,
    class_T: torch.Tensor,
    mask_T: torch.Tensor | None = None,
    count: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """`L_CLS`: cross-entropy of the routing classifier over all counted tokens.

    LayerMoE's Eq. 11 as printed sums over old tokens only, which a constant classifier would satisfy. With a router's
    logits and the language group of each token, this is DMoE's language-group loss (Eq. 3), `- log p(group | token)`.

    Args:
        class_T: class of each token's language; 0 is old.
        mask_T: bool, the counted tokens; all by default.
        count: divisor of the sum; the number of counted tokens by default.
    """
    counted_T = torch.ones_like(class_T, dtype=torch.bool) if mask_T is None else mask_T
    divisor = counted_T.sum().clamp(min=1) if count is None else count
    class_T = class_T.where(counted_T, _IGNORED)
    return F.cross_entropy(classifier_logits_TC, class_T, ignore_index=_IGNORED, reduction="sum") / divisor


@checked
@dataclass(frozen=True)
class ClassifierLoss(LayerLoss):
    """`classifier_loss` over the step's tokens of known language, in layers with a classifier (LayerMoE's gamma)."""

    name = "classifier"
    metrics = ("classifier_loss", "old_tokens_right", "new_tokens_right")
    needs_languages = True
    over = "tagged"

    coef: float = 0.1

    def applies_to(self, routing: LayerRouting) -> bool:
        return routing.classifier_logits is not None

    def layer_loss(self, batch: LossBatch, layer: int, count: torch.Tensor) -> torch.Tensor:
        logits_TC: Any = batch.routing[layer].classifier_logits
        of_old_T = batch.tokens.class_T == 0
        record_accuracy(batch, "old_tokens_right", logits_TC, of_old_T)
        record_accuracy(batch, "new_tokens_right", logits_TC, ~of_old_T)
        return classifier_loss(logits_TC, batch.tokens.class_T, batch.tokens.tagged_T, count)


def record_accuracy(batch: LossBatch, metric: str, logits_TC: torch.Tensor, of_T: torch.Tensor | None = None) -> None:
    """Records the share of tokens of known language (of those in `of_T`, bool) whose class has the largest logit."""
    counted_T = batch.tokens.tagged_T if of_T is None else batch.tokens.tagged_T & of_T
    right_T = (logits_TC.argmax(-1) == batch.tokens.class_T) & counted_T
    batch.record(metric, right_T.sum(), counted_T.sum())


@checked
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
