"""Losses, freezing and the Trainer subclasses that carry them."""

from .freezing import FreezeReport, Stage, freeze
from .grouped_sampler import GroupedSampler
from .losses import classifier_loss, expert_selections, language_prior_routing_loss, load_balance_loss
from .router_losses import RouterLossMixin, RouterLossWeights
from .stages import AdaptTrainer, GroupTrainer, NormalTrainer, PostPretrainTrainer, ReviewTrainer

__all__ = [
    "AdaptTrainer",
    "FreezeReport",
    "GroupTrainer",
    "GroupedSampler",
    "NormalTrainer",
    "PostPretrainTrainer",
    "ReviewTrainer",
    "RouterLossMixin",
    "RouterLossWeights",
    "Stage",
    "classifier_loss",
    "expert_selections",
    "freeze",
    "language_prior_routing_loss",
    "load_balance_loss",
]
