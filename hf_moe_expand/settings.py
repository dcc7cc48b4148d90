"""Settings of the steps that do not train, and of models that write. A training stage's settings are in the stage's
file, a plan's in its method's."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, BeforeValidator, Field, WithJsonSchema

from .disk import DEFAULT_SHARD_SIZE
from .errors import InputError
from .languages import UNDETERMINED, check_language_code
from .recipe_paths import Place
from .schema import Coefficient, Count, Declared, Flag, Number, Positive, Share, Text, Whole

# Of LoRA experts.
LORA_RANK, LORA_ALPHA = 8, 16.0


class AnalysisSettings(Declared):
    """Similarity of languages in each layer (LayerMoE), and which experts a further expansion copies."""

    tokens: Count = Field(100_000, description="tokens of each language (Q)")
    block_size: Count = Field(1024, description="tokens that the model sees at once")
    batch_size: Count = Field(8, description="blocks in a forward pass")


class DeviationSettings(Declared):
    """How training moves each layer (DMoE)."""

    steps: Count = Field(10, description="training steps on each language")
    learning_rate: Positive = Field(8e-6, description="learning rate of the first step; it decays to zero")
    batch_size: Count = Field(2048, description="blocks in a step")
    block_size: Whole = Field(512, ge=2, description="tokens in a block")
    micro_batch_size: Count = Field(
        8, description="blocks in one forward and backward pass; affects only memory and speed"
    )
    last_layers: Count = Field(3, description="number of last layers over whose FFNs languages are compared")


class ExpandSettings(Declared):
    """Kind and initial weights of the new experts."""

    expert_init: Text = Field("copy", description="`copy` of the original FFN, or `random` weights (an ablation)")
    copy_from: Annotated[Whole, Field(ge=0)] | Literal["nearest"] = Field(
        0,
        description="in a further expansion, the expert that new ones copy: its number, or `nearest`, the one to "
        "which each layer routes the new languages' text most",
    )
    conditional_routing: Flag = Field(
        False, description="share the original FFN among all tokens; a gate weighs the other experts (CMR)"
    )
    expert_kind: Text = Field(
        "ffn",
        description="`ffn`; `lora`: low-rank updates of the original FFN (MoLA, LoRAMoE); or `added`: small FFNs "
        "beside the original block, which may be a mixture of experts",
    )
    lora_rank: Count = Field(LORA_RANK, description="rank of the updates")
    lora_alpha: Positive = Field(LORA_ALPHA, description="the updates are scaled by lora_alpha / lora_rank")
    expert_width: Count | None = Field(None, description="width of the added FFNs")
    max_shard_size: Text = Field(DEFAULT_SHARD_SIZE, description="size of the largest weight file")


class JoinSettings(Declared):
    """Language packs, which are joined without training."""

    packs: list[Place] = Field(
        min_length=2, description="folders or hub ids of expansions of `base`, made apart; `NAME=FOLDER` names a pack"
    )
    keep_both: Flag = Field(False, description="join packs that add one and the same language, too")
    calibrate: Flag = Field(
        False, description="fit gates that tell the packs' languages from all others, on text under `old` and `new`"
    )
    tokens: Whole = Field(500, ge=16, description="tokens of each language by which the join is scored")
    max_shard_size: Text = Field(DEFAULT_SHARD_SIZE, description="size of the largest weight file")


class GraftSettings(Declared):
    """`model + scale * (instruct - base)` (DeltaMoE Eq. 8, 9)."""

    instruct: Place = Field(description="folder or hub id of the fine-tune")
    scale: Annotated[Number, AllowInfNan(False)] = Field(1.0, description="factor of the change")
    keep_tokenizer: Flag = Field(
        False, description="keep the model's tokenizer, chat template and generation config, not the fine-tune's"
    )


class GateSettings(Declared):
    """How the gate that sends home what it does not recognise is fitted."""

    layer: Annotated[Whole, Field(ge=0)] | None = Field(
        None, description="the layer that has the gate; by default the best one of the first third"
    )
    unseen_share: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="most tokens of a language that the gate has not seen that may go to new experts, as a share; a "
        "language above it is a near relative of a new one, and named",
    )
    tokens: Whole = Field(1600, ge=100, description="tokens of each of the model's languages to fit on")
    anchor_tokens: Whole = Field(400, ge=100, description="tokens of each anchor language to fit on")
    bound: Positive = Field(4.0, le=1024, description="most evidence of one token, in nats")
    window: Count = Field(64, description="tokens whose evidence counts")


class AverageSettings(Declared):
    """`weight * expert + (1 - weight) * FFN`, of each new expert and the FFN from which it was copied."""

    weight: float = Field(0.8, ge=0, le=1, description="the new expert's weight in the mean")


class EvaluationSettings(Declared):
    """How held-out text is scored."""

    block_size: Count = Field(1024, description="tokens in a window")
    batch_size: Count = Field(8, description="windows in a forward pass")
    max_tokens: Annotated[Whole, Field(ge=2)] | None = Field(
        None,
        description="tokens of each language, in whole documents (a longer first one is cut); all of its text by "
        "default",
    )
    questions: dict[Text, Place] | None = Field(
        None,
        description="by old language, a file with questions, one a line, that base and result answer in the base's "
        "chat template; by default ten in English, if English is old; `{}` for none",
    )


class TranslationSettings(Declared):
    """How a model translates parallel text, to be scored."""

    shots: Whole = Field(0, ge=0, description="number of first lines that are examples in each prompt, not scored")
    limit: Count | None = Field(None, description="maximum of sentences to score")
    batch_size: Count = Field(8, description="sentences translated at once")
    max_new_tokens: Count = Field(256, description="maximum of tokens in a translation")
    beams: Count = Field(1, description="beams of an encoder-decoder's search; 1 is greedy")


class Answering(Declared):
    """How models answer.

    Raises:
        InputError: a value is out of range, or there is a system message without a chat.
    """

    max_new_tokens: Count = Field(256, description="most tokens of an answer")
    temperature: Coefficient = Field(
        0.0, description="divisor of the logits; 0 takes the most probable token each time"
    )
    top_p: Share = Field(1.0, gt=0, description="draw among the tokens with this share of the probability")
    seed: Whole = Field(0, ge=0, lt=2**32, description="random seed of each answer")
    chat: Flag = Field(False, description="a prompt is a user's message in the chat template")
    system: Text | None = Field(None, description="system message of the chat")

    def model_post_init(self, _: Any) -> None:
        if self.system is not None and not self.chat:
            raise InputError("A system message belongs to a chat: ask with the chat template, or leave it out.")


def _by_language(prompts: Any) -> Any:
    """Prompts of each language; those of a plain list belong to no language that is known."""
    if isinstance(prompts, list):
        return {UNDETERMINED: prompts}
    if not isinstance(prompts, Mapping):
        raise InputError(f"expected a list of prompts, or a list for each language, found {prompts!r}.")
    for code in prompts:
        check_language_code(code)
    return prompts


_PROMPTS = {"type": "array", "items": {"type": "string"}}


class _Writing(Declared):
    """What the settings of all self-written text have in common."""

    documents: Annotated[Count, Field(description="documents to write in each language")] = 1000
    tokens: Annotated[Count, Field(description="most tokens of a document, the prompt's left out")] = 256
    temperature: Annotated[Positive, Field(description="divisor of the logits")] = 1.0
    top_p: Annotated[Share, Field(description="share of the probability among whose tokens is drawn", gt=0)] = 1.0
    batch_size: Annotated[Count, Field(description="documents written at once")] = 16


class SampleSettings(_Writing):
    """How a model writes the text of one language.

    Raises:
        InputError: a number is out of range, or a prompt is empty.
    """

    prompts: list[Text] = Field(default_factory=list)
    seed: Annotated[Whole, Field(ge=0, lt=2**32, description="random seed")] = 0

    def model_post_init(self, _: Any) -> None:
        if not all(prompt.strip() for prompt in self.prompts):
            raise InputError("prompts: a prompt is empty: leave it out, or give a few words.")


class SelfWrittenSettings(_Writing):
    """Old text that the base writes itself, once, before the first step: review and analyses read it.

    Raises:
        InputError: a number is out of range, a prompt is empty, or two languages have no prompts.
    """

    prompts: Annotated[
        dict[Text, list[Text]],
        BeforeValidator(_by_language),
        WithJsonSchema({"anyOf": [_PROMPTS, {"type": "object", "additionalProperties": _PROMPTS}]}),
        Field(
            description="beginnings, taken in turn: a list, or a list for each language; without any, documents begin "
            "by themselves. A plain list's language is `und`, undetermined"
        ),
    ] = {UNDETERMINED: []}  # noqa: RUF012 (a model copies it)

    def model_post_init(self, _: Any) -> None:
        if not self.prompts:
            raise InputError("prompts: names no language: give a list of prompts, or leave `prompts` out.")
        self.samples(0)
        if len(free := [code for code, prompts in self.prompts.items() if not prompts]) > 1:
            raise InputError(
                f"prompts: {', '.join(free)} have no prompts, so their texts would be the same: only one language's "
                "documents can begin by themselves."
            )

    def samples(self, seed: int) -> dict[str, SampleSettings]:
        """How the text of each language is written."""
        common = self.model_dump(exclude={"prompts"})
        return {code: SampleSettings(**common, prompts=list(p), seed=seed) for code, p in self.prompts.items()}
