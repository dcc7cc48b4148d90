"""MoE-LPR: the same number of experts in every layer."""

from typing import Annotated

from pydantic import Field

from ...errors import InputError
from ...schema import Count
from .allocation import Allocation, Target
from .base import plan_method


@plan_method(
    "moe-lpr", title="MoE-LPR", card="moe_lpr", tag="moe-lpr", fixed_counts=True,
    words="with the same number of experts in every layer",
)  # fmt: skip
def moe_lpr(
    target: Target,
    *,
    experts: Annotated[Count, Field(description="Experts in each layer, the original counted.")],
) -> Allocation:
    """The same number of experts in every layer (MoE-LPR).

    Example: hf-moe-expand plan moe-lpr --layers 24 --experts 6 --old en,es,zh --new el,hu,tr --out plan.json
    """
    if experts < target.least:
        raise InputError(f"experts is {experts}: a layer needs at least 2, the original FFN and a new expert.")
    return Allocation([experts] * target.num_layers)
