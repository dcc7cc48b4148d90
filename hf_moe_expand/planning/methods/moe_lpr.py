"""MoE-LPR: the same number of experts in every layer."""

from typing import Literal

from pydantic import Field

from ...core.errors import InputError
from ...core.schema import Count
from .base import Allocation, LayerPlan, Target


class MoELPRPlan(LayerPlan):
    """The same number of experts in every layer (MoE-LPR).

    Example: hf-moe-expand plan moe-lpr --layers 24 --experts 6 --old en,es,zh --new el,hu,tr --out plan.json
    """

    title = "MoE-LPR"
    card = "moe_lpr"
    tag = "moe-lpr"
    words = "with the same number of experts in every layer"
    fixed_counts = True

    method: Literal["moe-lpr"] = Field(description="MoE-LPR")
    experts: Count = Field(
        description="Experts in each layer, the original counted; in a model that grows, new ones alone."
    )

    def allocate(self, target: Target) -> Allocation:
        if self.experts < target.least:
            raise InputError(f"experts is {self.experts}: a layer needs at least 2, the original FFN and a new expert.")
        return Allocation([self.experts] * target.num_layers)
