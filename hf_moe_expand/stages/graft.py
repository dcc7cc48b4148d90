"""DeltaMoE: adds the change of a fine-tune (instruct - base) to the expanded model.

Example: hf-moe-expand graft qwen-el-1 qwen-el-chat --base Qwen/Qwen2.5-0.5B --instruct Qwen/Qwen2.5-0.5B-Instruct
"""

from typing import Annotated

from pydantic import AllowInfNan, Field

from ..schema import Declared, Flag, Number, Text
from .base import Stage


class GraftSettings(Declared):
    """`model + scale * (instruct - base)` (DeltaMoE Eq. 8, 9)."""

    instruct: Text = Field(description="folder or hub id of the fine-tune")
    scale: Annotated[Number, AllowInfNan(False)] = Field(1.0, description="factor of the change")
    keep_tokenizer: Flag = Field(
        False, description="keep the model's tokenizer, chat template and generation config, not the fine-tune's"
    )


class Graft(Stage):
    """DeltaMoE's graft: alignment without alignment data."""

    key = "graft"
    name = "graft"
    title = "Graft"
    participle = "grafted"
    families = ("layer_moe", "dmoe")
    runs_unasked = False
    optional = True
    settings = GraftSettings


STAGE = Graft
