"""Losses, freezing and the Trainer subclasses that carry them."""

from .curriculum_sampler import CurriculumSampler, LanguageMix
from .freezing import EVERYTHING, FreezeReport, Trained, freeze
from .grouped_sampler import GroupedSampler
from .losses import (
    BalanceLoss,
    ClassifierLoss,
    DistillationLoss,
    GateBudgetLoss,
    GroupLoss,
    LanguagePriorLoss,
    LayerLoss,
    LocalizedBalanceLoss,
    LossBatch,
    RouterLoss,
    RouterLossWeights,
    classifier_loss,
    distillation_loss,
    expert_selections,
    gate_budget_loss,
    language_importance,
    language_prior_routing_loss,
    load_balance_loss,
    localized_balance_loss,
)
from .masking import Masking, mask_routing
from .router_losses import RouterLossMixin

__all__ = [
    "EVERYTHING",
    "BalanceLoss",
    "ClassifierLoss",
    "CurriculumSampler",
    "DistillationLoss",
    "FreezeReport",
    "GateBudgetLoss",
    "GroupLoss",
    "GroupedSampler",
    "LanguageMix",
    "LanguagePriorLoss",
    "LayerLoss",
    "LocalizedBalanceLoss",
    "LossBatch",
    "Masking",
    "RouterLoss",
    "RouterLossMixin",
    "RouterLossWeights",
    "Trained",
    "classifier_loss",
    "distillation_loss",
    "expert_selections",
    "freeze",
    "gate_budget_loss",
    "language_importance",
    "language_prior_routing_loss",
    "load_balance_loss",
    "localized_balance_loss",
    "mask_routing",
]
