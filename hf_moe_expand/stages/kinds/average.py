"""Averages each new expert with the FFN from which it was copied, without training.

Example: hf-moe-expand merge average qwen-el-2 --weight 0.8 --out qwen-el
"""

from pathlib import Path
from typing import Any

from ...checkpoint.arguments import AverageSettings
from ...checkpoint.merge import average_experts
from ..kind import Stage, StepResult


class AverageExperts(Stage):
    """The mean of new experts and the FFNs that they copied (`checkpoint/merge.py`)."""

    key = "average"
    name = "average-experts"
    title = "Average"
    result_name = "averaged"
    place = 70
    is_default = False
    optional = True
    settings = AverageSettings

    @classmethod
    def work(cls, settings: Any, run: Any, before: Path, out: Path) -> StepResult:
        size, weight = run.expansion.expand.max_shard_size, settings.weight
        average_experts(before, out, weight, max_shard_size=size, overwrite=True)
        return StepResult(f"{weight:g} of each new expert, {1 - weight:g} of the FFN that it copied")
