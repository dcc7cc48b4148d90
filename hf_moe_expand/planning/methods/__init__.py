"""The methods that make a plan, one file each. A new method is a new file, imported here."""

# The order of `--help`.
from . import layer_moe, moe_lpr, separable, mola, random_counts, dmoe  # noqa: F401  isort: skip
from .base import (
    DEFAULT_METHOD,
    METHODS,
    Allocation,
    AnyPlan,
    LayerPlan,
    Option,
    PlanSettings,
    Target,
    method_title,
    plan_settings,
    read_plan_settings,
)

__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "Allocation",
    "AnyPlan",
    "LayerPlan",
    "Option",
    "PlanSettings",
    "Target",
    "method_title",
    "plan_settings",
    "read_plan_settings",
]
