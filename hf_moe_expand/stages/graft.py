"""DeltaMoE: adds the change of a fine-tune (instruct - base) to the expanded model.

Example: hf-moe-expand graft qwen-el-1 qwen-el-chat --base Qwen/Qwen2.5-0.5B --instruct Qwen/Qwen2.5-0.5B-Instruct
"""

from dataclasses import field
from typing import Annotated, Any

from pydantic import AllowInfNan, Field

from ..checkpoint.graft import check_fine_tune
from ..schema import Flag, Number, Text, settings
from .base import Stage
from .checks import StageFacts


@settings
class GraftSettings:
    """`model + scale * (instruct - base)` (DeltaMoE Eq. 8, 9)."""

    instruct: Annotated[Text, Field(description="folder or hub id of the fine-tune")]
    scale: Annotated[Number, AllowInfNan(False), Field(description="factor of the change")] = 1.0
    keep_tokenizer: Annotated[
        Flag, Field(description="keep the model's tokenizer, chat template and generation config, not the fine-tune's")
    ] = field(default=False)


class Graft(Stage):
    """DeltaMoE's graft: alignment without alignment data."""

    key = "graft"
    name = "graft"
    title = "Graft"
    participle = "grafted"
    families = ("layer_moe", "dmoe")
    settings = GraftSettings  # type: ignore[assignment]
    runs_unasked = False
    optional = True

    def check(self, settings: Any, facts: StageFacts) -> list[str]:
        if facts.offline:
            return [f"skipped: whether {settings.instruct} is a fine-tune of {facts.base}"]
        check_fine_tune(facts.base, settings.instruct, settings.keep_tokenizer, facts.revision)
        return [f"graft: {settings.instruct}, of the base's shapes"]


STAGE = Graft()
