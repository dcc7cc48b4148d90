"""Settings of the steps that do not train. A stage's settings are in the stage's file, a plan's in its method's."""

from typing import Annotated, Any

from pydantic import Field

from .disk import DEFAULT_SHARD_SIZE
from .errors import InputError
from .schema import Count, Declared, Flag, Positive, Text, Whole

# Of LoRA experts.
LORA_RANK, LORA_ALPHA = 8, 16.0


class AnalysisSettings(Declared):
    """Similarity of languages in each layer (LayerMoE), separability of old and new text, and which experts a further
    expansion copies."""

    tokens: Annotated[Count, Field(description="tokens of each language (Q)")] = 100_000
    block_size: Annotated[Count, Field(description="tokens that the model sees at once")] = 1024
    batch_size: Annotated[Count, Field(description="blocks in a forward pass")] = 8


class DeviationSettings(Declared):
    """How training moves each layer (DMoE)."""

    steps: Annotated[Count, Field(description="training steps on each language")] = 10
    learning_rate: Annotated[Positive, Field(description="learning rate of the first step; it decays to zero")] = 8e-6
    batch_size: Annotated[Count, Field(description="blocks in a step")] = 2048
    block_size: Annotated[Annotated[Whole, Field(ge=2)], Field(description="tokens in a block")] = 512
    micro_batch_size: Annotated[
        Count, Field(description="blocks in one forward and backward pass; affects only memory and speed")
    ] = 8
    last_layers: Annotated[Count, Field(description="number of last layers over whose FFNs languages are compared")] = 3


class ExpandSettings(Declared):
    """Kind and initial weights of the new experts."""

    expert_init: Annotated[Text, Field(description="`copy` of the original FFN, or `random` weights (an ablation)")] = (
        "copy"
    )
    copy_from: Annotated[
        Whole | Text,
        Field(
            description="in a further expansion, the expert that new ones copy: its number, or `nearest`, the one to "
            "which each layer routes the new languages' text most"
        ),
    ] = 0
    conditional_routing: Annotated[
        Flag, Field(description="share the original FFN among all tokens; a gate weighs the other experts (CMR)")
    ] = False
    expert_kind: Annotated[
        Text,
        Field(
            description="`ffn`; `lora`: low-rank updates of the original FFN (MoLA, LoRAMoE); or `added`: small FFNs "
            "beside the original block, which may be a mixture of experts"
        ),
    ] = "ffn"
    lora_rank: Annotated[Count, Field(description="rank of the updates")] = LORA_RANK
    lora_alpha: Annotated[Positive, Field(description="the updates are scaled by lora_alpha / lora_rank")] = LORA_ALPHA
    expert_width: Annotated[Count | None, Field(description="width of the added FFNs")] = None
    max_shard_size: Annotated[Text, Field(description="size of the largest weight file")] = DEFAULT_SHARD_SIZE

    def model_post_init(self, _: Any) -> None:
        copied = self.copy_from
        if copied != "nearest" and (isinstance(copied, str) or copied < 0):
            raise InputError(f"copy_from is {copied!r}: must be an expert's number or `nearest`.")


class JoinSettings(Declared):
    """Language packs, which are joined without training."""

    packs: Annotated[
        list[Text],
        Field(
            min_length=2,
            description="folders or hub ids of expansions of `base`, made apart; `NAME=FOLDER` names a pack",
        ),
    ]
    keep_both: Annotated[Flag, Field(description="join packs that add one and the same language, too")] = False
    calibrate: Annotated[
        Flag, Field(description="fit gates, or find a factor for each pack's router, on text under `old` and `new`")
    ] = False
    gates: Annotated[
        Flag,
        Field(description="with calibrate: fit gates that tell the packs' languages from all others; else factors"),
    ] = True
    tokens: Annotated[
        Annotated[Whole, Field(ge=16)], Field(description="tokens of each language by which the join is scored")
    ] = 500
    max_shard_size: Annotated[Text, Field(description="size of the largest weight file")] = DEFAULT_SHARD_SIZE


class GateSettings(Declared):
    """How gates that send home what they do not recognise are fitted."""

    unseen_share: Annotated[
        Annotated[float, Field(gt=0, lt=1)],
        Field(description="most tokens of a language that a gate has not seen that may go to new experts, as a share"),
    ] = 0.01
    tokens: Annotated[
        Annotated[Whole, Field(ge=100)], Field(description="tokens of each of the model's languages to fit on")
    ] = 1600
    anchor_tokens: Annotated[
        Annotated[Whole, Field(ge=100)], Field(description="tokens of each anchor language to fit on")
    ] = 400
    decay: Annotated[
        Annotated[float, Field(gt=0, le=1)], Field(description="factor of the evidence so far from token to token")
    ] = 0.95
    bound: Annotated[Positive, Field(description="most evidence of one token, in nats")] = 2.0
    state_free: Annotated[
        Flag,
        Field(description="judge each token by itself, for servers that keep no evidence beside the cache (vLLM)"),
    ] = False


class EvaluationSettings(Declared):
    """How held-out text is scored."""

    block_size: Annotated[Count, Field(description="tokens in a window")] = 1024
    batch_size: Annotated[Count, Field(description="windows in a forward pass")] = 8
    max_tokens: Annotated[
        Annotated[Whole, Field(ge=2)] | None,
        Field(
            description="tokens of each language, in whole documents (a longer first one is cut); all of its text by "
            "default"
        ),
    ] = None
    questions: Annotated[
        dict[Text, Text] | None,
        Field(
            description="by old language, a file with questions, one a line, that base and result answer in the base's "
            "chat template; by default ten in English, if English is old; `{}` for none"
        ),
    ] = None
