"""The losses of the routers, a file for each equation: it is a pure function of one layer, beside the object that a
trainer is given (`router_losses=[BalanceLoss(0.01), LanguagePriorLoss(0.1)]`)."""

from .balance import BalanceLoss as BalanceLoss
from .balance import LocalizedBalanceLoss as LocalizedBalanceLoss
from .balance import expert_selections as expert_selections
from .balance import language_importance as language_importance
from .balance import load_balance_loss as load_balance_loss
from .balance import localized_balance_loss as localized_balance_loss
from .classifier import ClassifierLoss as ClassifierLoss
from .classifier import GroupLoss as GroupLoss
from .classifier import classifier_loss as classifier_loss
from .distillation import DistillationLoss as DistillationLoss
from .distillation import distillation_loss as distillation_loss
from .gate_budget import GateBudgetLoss as GateBudgetLoss
from .gate_budget import gate_budget_loss as gate_budget_loss
from .language_prior import LanguagePriorLoss as LanguagePriorLoss
from .language_prior import language_prior_routing_loss as language_prior_routing_loss
from .layer_loss import OLD as OLD
from .layer_loss import LayerLoss as LayerLoss
from .layer_loss import LossBatch as LossBatch
from .layer_loss import RouterLoss as RouterLoss
from .layer_loss import TokenCounts as TokenCounts
from .layer_loss import TokenMasks as TokenMasks
from .layer_loss import checked_losses as checked_losses
from .layer_loss import where_counted as where_counted

# Logged by a trainer without losses, since they cost little and show how a model routes.
LOGGED: tuple[RouterLoss, ...] = (BalanceLoss(0.0), LanguagePriorLoss(0.0), GateBudgetLoss(0.0))
