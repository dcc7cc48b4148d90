"""Settings of what changes checkpoints without training."""

from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, BeforeValidator, Field

from ..core.disk import DEFAULT_SHARD_SIZE
from ..core.recipe_paths import Located
from ..core.schema import Count, Flag, Number, Positive, Schema, Text, Whole

ShardSize = Annotated[Text, Field(description="size of the largest weight file")]


def _joined(value: Any) -> Any:
    """PEFT's list of names, as one text."""
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return ",".join(value) if is_list else value


class NewExperts(Schema):
    """Kind and initial weights of the new experts."""

    expert_init: Literal["copy", "random"] = Field(
        "copy", description="`copy` of the original FFN, or `random` weights (an ablation)"
    )
    conditional_routing: Flag = Field(
        False, description="share the original FFN among all tokens; its share of a token's output is learned (CMR)"
    )
    expert_kind: Literal["ffn", "lora", "added", "adapter"] = Field(
        "ffn",
        description="`ffn`; `lora`: low-rank updates of the original FFN (MoLA, LoRAMoE); `added`: small FFNs beside "
        "the original block, which may be a mixture of experts; or `adapter`: low-rank updates of all linear layers, "
        "in attention too",
    )
    target_modules: Annotated[Text | None, BeforeValidator(_joined)] = Field(
        None, description="the linear layers that adapters update, as PEFT names them: `q_proj,v_proj`; all by default"
    )
    lora_rank: Count = Field(8, description="rank of the updates")
    lora_alpha: Positive = Field(16.0, description="the updates are scaled by lora_alpha / lora_rank")
    expert_width: Count | None = Field(None, description="width of the added FFNs")


class ExpandSettings(NewExperts):
    """Kind and initial weights of the new experts."""

    copy_from: Annotated[Whole, Field(ge=0)] | Literal["nearest"] = Field(
        0,
        description="in a further expansion, the expert that new ones copy: its number, or `nearest`, the one to "
        "which each layer routes the new languages' text most",
    )
    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE

    @property
    def experts(self) -> NewExperts:
        """The settings of the new experts alone."""
        return NewExperts(**self.model_dump(include=set(NewExperts.model_fields)))


class WriteSettings(Schema):
    """How a checkpoint is written."""

    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE
    overwrite: Flag = Field(False, description="replace the output if it exists")


class JoinSettings(Schema):
    """Language packs, which are joined without training."""

    packs: list[Located] = Field(
        min_length=2, description="folders or hub ids of expansions of `base`, made apart; `NAME=FOLDER` names a pack"
    )
    max_shard_size: ShardSize = DEFAULT_SHARD_SIZE


class GraftSettings(Schema):
    """`model + scale * (instruct - base)` (DeltaMoE Eq. 8, 9)."""

    instruct: Located = Field(description="folder or hub id of the fine-tune")
    scale: Annotated[Number, AllowInfNan(False)] = Field(1.0, description="factor of the change")
    keep_tokenizer: Flag = Field(
        False, description="keep the model's tokenizer, chat template and generation config, not the fine-tune's"
    )


class TunedSettings(Schema):
    """How fine-tunes of the base become languages."""

    rank: Count | None = Field(
        None, description="with --tuned: keep the best low-rank update of each map's difference; by default all is kept"
    )
    weight: Number = Field(1.0, description="with --tuned: times the difference; 0.5 is the mean with the base")


class AverageSettings(Schema):
    """`weight * expert + (1 - weight) * FFN`, of each new expert and the FFN from which it was copied."""

    weight: float = Field(0.8, ge=0, le=1, description="the new expert's weight in the mean")
