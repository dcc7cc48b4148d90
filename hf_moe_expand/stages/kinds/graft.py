"""DeltaMoE: adds the change of a fine-tune (instruct - base) to the expanded model.

Example: hf-moe-expand graft qwen-el-1 qwen-el-chat --base Qwen/Qwen2.5-0.5B --instruct Qwen/Qwen2.5-0.5B-Instruct
"""

from ...settings import GraftSettings
from ..base import Stage


class Graft(Stage):
    """DeltaMoE's graft: alignment without alignment data."""

    key = "graft"
    name = "graft"
    title = "Graft"
    participle = "grafted"
    place = 40
    families = ("layer_moe", "dmoe")
    runs_unasked = False
    optional = True
    settings = GraftSettings
