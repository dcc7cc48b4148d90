"""Settings of evaluations and translations."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..core.recipe_paths import Located
from ..core.schema import Count, Schema, Text, Whole


class EvaluationSettings(Schema):
    """How held-out text is scored."""

    block_size: Count = Field(1024, description="tokens in a window")
    batch_size: Count = Field(8, description="windows in a forward pass")
    max_tokens: Annotated[Whole, Field(ge=2)] | None = Field(
        None,
        description="tokens of each language, in whole documents (a longer first one is cut); by default all of its "
        "text on a GPU, and on a CPU as many as two cores score in less than two minutes",
    )
    questions: dict[Text, Located] | None = Field(
        None,
        description="by old language, a file with questions, one a line, that base and result answer in the base's "
        "chat template; by default ten in English, if English is old; `{}` for none",
    )


class HarnessSettings(Schema):
    """How tasks of lm-evaluation-harness are run."""

    num_fewshot: Annotated[Whole, Field(ge=0)] | None = Field(
        None, description="examples for tasks given without @N; by default each task's own number"
    )
    limit: Count | None = Field(None, description="maximum of documents to score of each task")
    include_path: Path | None = Field(None, description="folder with tasks of your own for the harness")


class TranslationSettings(Schema):
    """How a model translates parallel text, to be scored."""

    shots: Whole = Field(0, ge=0, description="number of first lines that are examples in each prompt, not scored")
    limit: Count | None = Field(None, description="maximum of sentences to score")
    batch_size: Count = Field(8, description="sentences translated at once")
    max_new_tokens: Count = Field(256, description="maximum of tokens in a translation")
    beams: Count = Field(1, description="beams of an encoder-decoder's search; 1 is greedy")
