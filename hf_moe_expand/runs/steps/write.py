"""The first step of a recipe with `self_written`: the base writes old text."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.disk import StepOutput
from ...core.errors import errors_at
from ...inference.models import check_decoder
from ...inference.self_written import check_positions, write_texts
from ...inference.writing import SelfWrittenSettings
from ...stages.outlook import Found, Outlook, StepResult
from ..recipe import Recipe
from .base import Step

# Generous: bytes of a token's text, and of the words about its origin in a document's row.
_TOKEN, _ORIGIN = 8, 600


@dataclass
class WriteOldText(Step):
    """Lets the dense base write the old text that analyses and review read."""

    read_later = True
    name = "self_written"

    recipe: Recipe
    chosen: SelfWrittenSettings

    def __post_init__(self) -> None:
        self.output = Path(next(iter(self.recipe.written_sources.values())).source)

    def inputs(self) -> dict[str, Any]:
        return {"self_written": self.chosen.model_dump()}

    def check(self, outlook: Outlook) -> Found:
        chosen, written = self.chosen, []
        if outlook.config is not None:
            check_decoder(outlook.config, self.recipe.base, "texts that the base writes itself (self_written)")
            with errors_at("self_written"):
                for sample in chosen.samples(self.recipe.seed).values():
                    check_positions(sample, outlook.config, outlook.tokenizer)
            size = len(chosen.prompts) * chosen.documents * (chosen.tokens * _TOKEN + _ORIGIN)
            written.append(StepOutput(self.output, size))
        says = f"the base writes {chosen.documents:,} documents of up to {chosen.tokens:,} tokens"
        return Found(outlook, [f"self_written: {says}: {', '.join(chosen.prompts)}"], written)

    def work(self) -> StepResult:
        recipe = self.recipe
        write_texts(recipe.base, recipe.revision, self.chosen.samples(recipe.seed), self.output)
        return self.finish()

    def finish(self) -> StepResult:
        with open(self.output, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        languages, words = ", ".join(self.recipe.written_sources), sum(len(row["text"].split()) for row in rows)
        return StepResult(f"{len(rows):,} documents ({languages}) and {words:,} words, written by the base")
