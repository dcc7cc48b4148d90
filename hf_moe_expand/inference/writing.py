"""Settings of models that write: answers, and text of their own."""

from typing import Any

from pydantic import Field

from ..core.errors import InputError
from ..core.schema import Coefficient, Count, Positive, Schema, Share, Text, Whole


class Answering(Schema):
    """How models answer."""

    max_new_tokens: Count = Field(256, description="most tokens of an answer")
    temperature: Coefficient = Field(
        0.0, description="divisor of the logits; 0 takes the most probable token each time"
    )
    top_p: Share = Field(1.0, gt=0, description="draw among the tokens with this share of the probability")
    seed: Whole = Field(0, ge=0, lt=2**32, description="random seed of each answer")
    system: Text | None = Field(None, description="system message of the chat")

    def model_post_init(self, _: Any) -> None:
        if not self.temperature and (self.top_p != 1 or self.seed):
            raise InputError("top_p and seed are for drawing, but the temperature is 0: raise it, or leave them out.")


class SampleSettings(Schema):
    """How a model writes text of its own."""

    documents: Count = Field(1000, description="documents to write")
    tokens: Count = Field(256, description="most tokens of a document, the prompt's left out")
    temperature: Positive = Field(1.0, description="divisor of the logits")
    top_p: Share = Field(1.0, gt=0, description="share of the probability among whose tokens is drawn")
    batch_size: Count = Field(16, description="documents written at once")
    prompts: list[Text] = Field([])
    seed: Whole = Field(0, ge=0, lt=2**32, description="random seed")
