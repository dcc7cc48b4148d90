"""Random counts: LayerMoE's ablation."""

import random
from typing import Literal

from pydantic import Field

from ...core.schema import Count
from .base import Allocation, LayerPlan, Target, check_total


class RandomPlan(LayerPlan):
    """A total number of experts, distributed over the layers at random (LayerMoE's ablation).

    Example: hf-moe-expand plan random --layers 24 --total-experts 72 --old en,es,zh --new el,hu,tr --out plan.json
    """

    title = "random counts"
    words = "the total distributed over the layers at random"

    method: Literal["random"] = Field(description="random counts")
    total_experts: Count = Field(description="Experts in all layers, each layer's original counted.")
    minimum: Count | None = Field(None, description="Least experts in a layer: 2, or 1 new one if growing.")

    def allocate(self, target: Target) -> Allocation:
        least = self.minimum or target.least
        check_total(self.total_experts, target.num_layers, least)
        counts = [least] * target.num_layers
        draw = random.Random(target.seed)
        for _ in range(self.total_experts - sum(counts)):
            counts[draw.randrange(target.num_layers)] += 1
        return Allocation(counts, drawn=True)
