"""`RouterLossWeights`, which named all losses in one object. It is kept for one release."""

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
    """The losses of these weights, with a FutureWarning that says what to write instead."""
    losses: list[RouterLoss] = [BalanceLoss(balance), LanguagePriorLoss(language_prior)]
    losses.append(GateBudgetLoss(budget, gate_budget))
    if localized_balance:
        losses.append(LocalizedBalanceLoss(localized_balance, localized_delta))
    if group:
        losses.append(GroupLoss(group))
    if classifier:
        losses.append(ClassifierLoss(classifier))
    warnings.warn(
        f"RouterLossWeights is deprecated and goes with the next release. Pass router_losses={losses}; a loss with "
        "coefficient 0 is logged and changes nothing.",
        FutureWarning,
        stacklevel=2,
    )
    return losses
