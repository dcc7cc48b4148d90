"""The losses of the routers, one file each: the equation as a pure function of one layer, and the object that a trainer
is given (`router_losses=[BalanceLoss(0.01), LanguagePriorLoss(0.1)]`)."""

from .balance import BalanceLoss, expert_selections, load_balance_loss
from .base import OLD, LayerLoss, LossBatch, RouterLoss, TokenCounts, TokenMasks, checked_losses
from .classifier import ClassifierLoss, classifier_loss
from .distillation import DistillationLoss, distillation_loss
from .gate_budget import GateBudgetLoss, gate_budget_loss
from .group import GroupLoss
from .language_prior import LanguagePriorLoss, language_prior_routing_loss
from .localized_balance import LocalizedBalanceLoss, language_importance, localized_balance_loss

# Logged by a trainer without losses, since they cost little and show how a model routes.
LOGGED: tuple[RouterLoss, ...] = (BalanceLoss(0.0), LanguagePriorLoss(0.0), GateBudgetLoss(0.0))

__all__ = [
    "LOGGED",
    "OLD",
    "BalanceLoss",
    "ClassifierLoss",
    "DistillationLoss",
    "GateBudgetLoss",
    "GroupLoss",
    "LanguagePriorLoss",
    "LayerLoss",
    "LocalizedBalanceLoss",
    "LossBatch",
    "RouterLoss",
    "TokenCounts",
    "TokenMasks",
    "checked_losses",
    "classifier_loss",
    "distillation_loss",
    "expert_selections",
    "gate_budget_loss",
    "language_importance",
    "language_prior_routing_loss",
    "load_balance_loss",
    "localized_balance_loss",
]
