"""Losses, freezing and the Trainer subclasses that carry them."""

from .curriculum_sampler import CurriculumSampler, LanguageMix
from .freezing import FreezeReport, Stage, freeze
from .grouped_sampler import GroupedSampler
from .losses import (
    classifier_loss,
    expert_selections,
    language_importance,
    language_prior_routing_loss,
    load_balance_loss,
    localized_balance_loss,
)
from .masking import Masking, MaskingMixin, mask_routing
from .router_losses import RouterLossMixin, RouterLossWeights
from .stages import AdaptTrainer, GroupTrainer, NormalTrainer, PostPretrainTrainer, ReviewTrainer

__all__ = [
    "AdaptTrainer",
    "CurriculumSampler",
    "FreezeReport",
    "GroupTrainer",
    "GroupedSampler",
    "LanguageMix",
    "Masking",
    "MaskingMixin",
    "NormalTrainer",
    "PostPretrainTrainer",
    "ReviewTrainer",
    "RouterLossMixin",
    "RouterLossWeights",
    "Stage",
    "classifier_loss",
    "expert_selections",
    "freeze",
    "language_importance",
    "language_prior_routing_loss",
    "load_balance_loss",
    "localized_balance_loss",
    "mask_routing",
]
