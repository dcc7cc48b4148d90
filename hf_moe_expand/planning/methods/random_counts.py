"""Random counts: LayerMoE's ablation."""

import random
from typing import Annotated

from pydantic import Field

from ...schema import Count
from .allocation import Allocation, Target, check_total
from .base import plan_method


@plan_method(
    "random", title="random counts", card="layer_moe", tag="layer-moe",
    words="the total distributed over the layers at random",
)  # fmt: skip
def random_counts(
    target: Target,
    *,
    total_experts: Annotated[Count, Field(description="Experts in all layers, each layer's original counted.")],
    minimum: Annotated[Count | None, Field(description="Least experts in a layer: 2, or 1 new one if growing.")] = None,
) -> Allocation:
    """A total number of experts, distributed over the layers at random (LayerMoE's ablation).

    Example: hf-moe-expand plan random --layers 24 --total-experts 72 --old en,es,zh --new el,hu,tr --out plan.json
    """
    least = minimum or target.least
    check_total(total_experts, target.num_layers, least)
    counts = [least] * target.num_layers
    draw = random.Random(target.seed)
    for _ in range(total_experts - sum(counts)):
        counts[draw.randrange(target.num_layers)] += 1
    return Allocation(counts, drawn=True)
