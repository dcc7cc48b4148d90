"""`RouterLossWeights`, the former object with the weights of all losses. It is kept for one release."""

import warnings

from .balance import BalanceLoss
from .base import RouterLoss
from .classifier import ClassifierLoss
from .gate_budget import GateBudgetLoss
from .group import GroupLoss
from .language_prior import LanguagePriorLoss
from .localized_balance import LocalizedBalanceLoss


def RouterLossWeights(
    balance: float = 0.0,
    language_prior: float = 0.0,
    classifier: float = 0.0,
    group: float = 0.0,
    budget: float = 0.0,
    gate_budget: float = 0.8,
    localized_balance: float = 0.0,
    localized_delta: float = 0.1,
) -> list[RouterLoss]:
    """The losses with these weights; raises a FutureWarning with the arguments to pass instead."""
    losses: list[RouterLoss] = [BalanceLoss(balance), LanguagePriorLoss(language_prior)]
    losses.append(GateBudgetLoss(budget, gate_budget))
    if localized_balance:
        losses.append(LocalizedBalanceLoss(localized_balance, localized_delta))
    if group:
        losses.append(GroupLoss(group))
    if classifier:
        losses.append(ClassifierLoss(classifier))
    warnings.warn(
        f"RouterLossWeights is deprecated and will be removed in the next release. Pass router_losses={losses}; a loss "
        "with coefficient 0 is only logged.",
        FutureWarning,
        stacklevel=2,
    )
    return losses
