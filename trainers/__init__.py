"""Losses, freezing and the Trainer subclasses that carry them."""

from .curriculum_sampler import CurriculumSampler, LanguageMix
from .freezing import FreezeReport, Stage, freeze
from .grouped_sampler import GroupedSampler
from .losses import (
    BalanceLoss,
    ClassifierLoss,
    GateBudgetLoss,
    GroupLoss,
    LanguagePriorLoss,
    LayerLoss,
    LocalizedBalanceLoss,
    LossBatch,
    RouterLoss,
    RouterLossWeights,
    classifier_loss,
    expert_selections,
    gate_budget_loss,
    language_importance,
    language_prior_routing_loss,
    load_balance_loss,
    localized_balance_loss,
)
from .router_losses import RouterLossMixin
from .stages import AdaptTrainer, GroupTrainer, NormalTrainer, PostPretrainTrainer, ReviewTrainer

__all__ = [
    "AdaptTrainer",
    "BalanceLoss",
    "ClassifierLoss",
    "CurriculumSampler",
    "FreezeReport",
    "GateBudgetLoss",
    "GroupLoss",
    "GroupTrainer",
    "GroupedSampler",
    "LanguageMix",
    "LanguagePriorLoss",
    "LayerLoss",
    "LocalizedBalanceLoss",
    "LossBatch",
    "NormalTrainer",
    "PostPretrainTrainer",
    "ReviewTrainer",
    "RouterLoss",
    "RouterLossMixin",
    "RouterLossWeights",
    "Stage",
    "classifier_loss",
    "expert_selections",
    "freeze",
    "gate_budget_loss",
    "language_importance",
    "language_prior_routing_loss",
    "load_balance_loss",
    "localized_balance_loss",
]
