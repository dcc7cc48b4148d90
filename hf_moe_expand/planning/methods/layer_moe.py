"""LayerMoE: fewer experts in layers where languages are more similar."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ...core.errors import InputError
from ...core.schema import Count, Positive, checked
from .base import Allocation, LayerPlan, Target, check_total


class LayerMoEPlan(LayerPlan):
    """Fewer experts in layers where languages are more similar (LayerMoE).

    Example: hf-moe-expand plan layer-moe --analysis analysis.json --total-experts 72 --classifier-layers 7 --out p.json
    """

    title = "LayerMoE"
    analysis = "similarity"
    without_classifiers = ": the paper's ablation; it has 7 in a first expansion, 5 in a second"
    words = "fewer where the languages' hidden states are more alike"

    method: Literal["layer-moe"] = Field("layer-moe", description="LayerMoE")
    total_experts: Count = Field(description="Experts in all layers, each layer's original counted.")
    minimum: Count | None = Field(None, description="Least experts in a layer: 2, or 1 new one if growing.")
    similarity_floor: Positive | None = Field(None, description="Count smaller similarities as this.")

    def allocate(self, target: Target) -> Allocation:
        similarity = target.measured("similarity").similarity
        counts = allocate_experts(similarity, self.total_experts, self.minimum or target.least, self.similarity_floor)
        return Allocation(counts, {"similarity": similarity})

    def largest(self, target: Target) -> Allocation:
        alike = [1.0] * target.num_layers
        return Allocation(allocate_experts(alike, self.total_experts, self.minimum or target.least))


@checked
def allocate_experts(
    similarity: Sequence[float], total: int, minimum: int = 2, floor: float | None = None
) -> list[int]:
    """Experts of each layer, fewer where languages are more similar (LayerMoE Eq. 10).

    `N_l = ceil(share_l * delta)` with `share_l = (1 / S_l) / sum_j (1 / S_j)` and counts that sum to `total`. A ceiling
    with a fixed total is Adams' apportionment: every layer starts at `minimum`, and the next expert goes to the layer
    with the largest `share_l / n_l`, the first one on a tie.

    Args:
        similarity: S_l of each layer, positive.
        total, minimum: experts in all layers together, and in a layer; expert 0 of each counted.
        floor: lower bound that replaces smaller similarities.
    """
    if floor is not None:
        if floor <= 0:
            raise InputError(f"The similarity floor is {floor}: must be positive.")
        similarity = [max(value, floor) for value in similarity]
    for layer, value in enumerate(similarity):
        if not value > 0:
            raise InputError(
                f"The similarity of layer {layer} is {value:g}, but experts are allocated by 1/similarity, which needs "
                "positive values. Set a floor (--similarity-floor 0.01), which replaces smaller values."
            )
    check_total(total, len(similarity), minimum)
    counts = [minimum] * len(similarity)
    for _ in range(total - sum(counts)):
        # share_l / n_l is proportional to 1 / (S_l n_l).
        layer = min(range(len(counts)), key=lambda i: similarity[i] * counts[i])
        counts[layer] += 1
    return counts
