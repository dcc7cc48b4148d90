"""Fits gates that send home what they do not recognise, without training.

Example: hf-moe-expand gates qwen-el-1 qwen-el-2 --data en=en.jsonl --data el=el.jsonl
"""

from collections.abc import Iterable
from typing import Any

from ...settings import GateSettings
from ..base import Stage


class FitGates(Stage):
    """Gates of many classes (`analysis/gate_fit.py`)."""

    key = "gates"
    name = "gates"
    title = "Gates"
    participle = "gated"
    place = 50
    runs_unasked = False
    optional = True
    settings = GateSettings

    @classmethod
    def languages(cls, settings: Any, old: Iterable[str], new: Iterable[str]) -> list[str]:
        return [*old, *new]
