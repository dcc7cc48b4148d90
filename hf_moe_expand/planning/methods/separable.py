"""LayerMoE's counts in the layers that can tell old text from new; the other layers stay dense."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from ...errors import InputError
from ...schema import Number
from .base import Allocation, Target
from .layer_moe import LayerMoEPlan, check_positive


class SeparablePlan(LayerMoEPlan):
    """LayerMoE's counts in the layers that can tell old text from new; the other layers stay dense.

    Example: hf-moe-expand plan separable --analysis analysis.json --separability s.json --total-experts 72 --out p.json
    """

    title = "separable layers"
    needs_separability = True
    words = "in the layers that can tell old text from new, fewer where the languages' hidden states are more alike"

    method: Literal["separable"] = Field(description="separable layers")  # type: ignore[assignment]
    min_separability: Number = Field(
        0.9, ge=0.5, le=1, description="Least balanced accuracy, after 32 tokens, of a layer that gets experts."
    )

    def allocate(self, target: Target) -> Allocation:
        similarity, separability = target.similarity, target.separability
        if any(set(a) != set(b) for a, b in ((similarity.old, separability.old), (similarity.new, separability.new))):
            raise InputError(
                f"The similarity is of old {', '.join(similarity.old)} and new {', '.join(similarity.new)}, the "
                f"separability of old {', '.join(separability.old)} and new {', '.join(separability.new)}: measure "
                "both on the same languages."
            )
        chosen = [
            layer for layer, accuracy in enumerate(separability.separability) if accuracy >= self.min_separability
        ]
        if not chosen:
            raise InputError(
                f"No layer can tell old text from new: the best one's balanced accuracy after {separability.length} "
                f"tokens is {max(separability.separability):.3f}, but min_separability is {self.min_separability:g}. "
                "Lower --min-separability (`plan: {min_separability: ...}` in a recipe), or plan without it "
                "(layer-moe)."
            )
        check_positive({layer: max(similarity.similarity[layer], self.similarity_floor or -1) for layer in chosen})
        by_similarity = LayerMoEPlan(
            total_experts=self.total_experts, minimum=self.minimum, similarity_floor=self.similarity_floor
        )
        made = by_similarity.allocate_in(chosen, target)
        apart = {"separability": separability.separability, "min_separability": self.min_separability}
        return replace(made, details={**made.details, **apart})
