"""MoLA: more experts in higher layers, by a fixed shape."""

from typing import Literal

from pydantic import Field

from .base import Allocation, LayerPlan, Target

Shape = Literal["inverted-triangle", "triangle", "hourglass", "rectangle"]

# Experts in each quarter of the depth, first layers first.
SHAPES: dict[Shape, tuple[int, int, int, int]] = {
    "inverted-triangle": (2, 4, 6, 8),
    "triangle": (8, 6, 4, 2),
    "hourglass": (8, 2, 2, 8),
    "rectangle": (5, 5, 5, 5),
}


class MoLAPlan(LayerPlan):
    """More experts in higher layers, by a fixed shape (MoLA).

    Example: hf-moe-expand plan mola --layers 24 --old en,es,zh --new el,hu,tr --out plan.json
    """

    title = "MoLA"
    words = "more in higher layers, by one of MoLA's fixed shapes"
    fixed_counts = True
    grows = False

    method: Literal["mola"] = Field(description="MoLA")
    shape: Shape = Field(
        "inverted-triangle",
        description="`inverted-triangle` (2 4 6 8 by quarters), `triangle`, `hourglass` or `rectangle`.",
    )

    def allocate(self, target: Target) -> Allocation:
        layers = target.num_layers
        return Allocation([SHAPES[self.shape][4 * layer // layers] for layer in range(layers)], {"shape": self.shape})
