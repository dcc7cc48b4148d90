"""A new expert in every layer, which a new language's tokens take alone."""

from typing import Literal

from pydantic import Field

from ...core.errors import InputError
from ...core.schema import Count, Flag, Text
from .base import Allocation, LayerPlan, Target


class ExclusivePlan(LayerPlan):
    """A new expert in every layer, beside the original FFN: a new language's tokens take it alone.

    Example: hf-moe-expand plan exclusive --layers 24 --old en --new el --out plan.json
    """

    title = "Exclusive experts"
    card = "exclusive"
    tag = "exclusive-experts"
    fixed_counts = True

    method: Literal["exclusive"] = Field(description="Exclusive experts")
    exclusive: Flag = Field(True, description="Always true.")

    modules: Text | None = Field(
        None,
        description="what a language has of its own: `ffn`, the FFN, by default; `all` linear maps of a layer; those "
        "of its `attention`; or maps as PEFT names them",
    )
    rank: Count | None = Field(None, description="rank of updates of these, by default whole copies")

    def model_post_init(self, _: object) -> None:
        if not self.exclusive:
            raise InputError("exclusive is false: take `method: moe-lpr`, whose experts a router mixes.")

    def allocate(self, target: Target) -> Allocation:
        return Allocation([target.least] * target.num_layers)
