"""Settings of models that write: answers, and text of their own."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from ..core.errors import InputError
from ..core.languages import UNDETERMINED, check_language_code
from ..core.schema import Coefficient, Count, Flag, Positive, Schema, Share, Text, Whole


class Answering(Schema):
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
        if not self.temperature and (self.top_p != 1 or self.seed):
            raise InputError("top_p and seed are for drawing, but the temperature is 0: raise it, or leave them out.")


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


class _Writing(Schema):
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
