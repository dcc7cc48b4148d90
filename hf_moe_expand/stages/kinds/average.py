"""Averages each new expert with the FFN from which it was copied, without training.

Example: hf-moe-expand merge average qwen-el-2 --weight 0.8 --out qwen-el
"""

from ...settings import AverageSettings
from ..base import Stage


class AverageExperts(Stage):
    """The mean of new experts and the FFNs that they copied (`checkpoint/merge.py`)."""

    key = "average"
    name = "average-experts"
    title = "Average"
    participle = "averaged"
    place = 70
    runs_unasked = False
    optional = True
    settings = AverageSettings
