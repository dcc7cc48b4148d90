"""The steps before a plan: similarity of languages (LayerMoE), separability of old and new text, deviation of layers
(DMoE)."""

import shutil
from dataclasses import dataclass
from typing import Any, ClassVar

from ..analysis.deviation import measure_deviation
from ..analysis.reading import document_blocks, token_blocks
from ..analysis.separability import measure_separability, split
from ..analysis.similarity import measure_similarity
from ..checkpoint.source import resolve_checkpoint
from ..errors import InputError
from ..models import load_for_inference, load_tokenizer
from ..self_written import SelfWrittenText
from .base import Checks, ExpansionRun, Step, StepResult


@dataclass
class AnalyzeSimilarity(Step):
    """Measures the similarity of languages in each layer."""

    run: ExpansionRun

    def __post_init__(self) -> None:
        self.name, self.output = f"{self.run.prefix}analyze", self.run.folder / "analysis.json"

    def inputs(self) -> dict[str, Any]:
        codes = self.run.expansion.analyzed_languages(self.run.old, self.run.number > 1)
        return {
            "analysis": self.run.expansion.analysis.model_dump(), "old": self.run.old, "new": self.run.new,
            "texts": self.run.contents(codes),
        }  # fmt: skip

    def check(self, checks: Checks) -> None:
        check_tokens(self.run, checks)

    def work(self) -> StepResult:
        run, settings = self.run, self.run.expansion.analysis
        model, tokenizer = load_for_inference(run.start, run.revision)
        result = measure_similarity(
            model, tokenizer, run.texts([*run.old, *run.new], model.config), run.old, run.new,
            tokens=settings.tokens, block_size=settings.block_size, batch_size=settings.batch_size,
        )  # fmt: skip
        result.to_json(self.output)
        low, high = min(result.similarity), max(result.similarity)
        return StepResult(f"similarity {low:.3f} to {high:.3f} over {len(result.similarity)} layers")


@dataclass
class AnalyzeSeparability(Step):
    """Measures how well each layer tells old text from new, with the settings of the similarity."""

    stands_for_earlier: ClassVar[bool] = False  # the plan needs the similarity too
    run: ExpansionRun

    def __post_init__(self) -> None:
        self.name = f"{self.run.prefix}analyze separability"
        self.output = self.run.folder / "separability.json"

    def inputs(self) -> dict[str, Any]:
        return AnalyzeSimilarity(self.run).inputs()

    def check(self, checks: Checks) -> None:
        """Refuses local text of which nothing can be held out, as far as its order in the files shows."""
        check_tokens(self.run, checks)
        if checks.offline:
            return
        settings, recipe = self.run.expansion.analysis, checks.recipe
        tokenizer = load_tokenizer(resolve_checkpoint(recipe.base, recipe.revision), recipe.base)
        for code in (*self.run.old, *self.run.new):
            source = self.run.sources[code]
            if source.files():
                sizes = (tokenizer, settings.tokens, settings.block_size)
                split(code, document_blocks(code, source.documents(), *sizes), recipe.seed)

    def work(self) -> StepResult:
        run, settings = self.run, self.run.expansion.analysis
        model, tokenizer = load_for_inference(run.start, run.revision)
        result = measure_separability(
            model, tokenizer, run.texts([*run.old, *run.new], model.config), run.old, run.new,
            tokens=settings.tokens, block_size=settings.block_size, batch_size=settings.batch_size,
            seed=run.recipe.seed,
        )  # fmt: skip
        result.to_json(self.output)
        low, high = min(result.separability), max(result.separability)
        return StepResult(
            f"accuracy after {result.length} tokens {low:.3f} to {high:.3f} over {len(result.token)} layers"
        )


@dataclass
class AnalyzeDeviation(Step):
    """Measures how far training on each language moves each layer, and how similar these changes are."""

    run: ExpansionRun

    def __post_init__(self) -> None:
        self.name, self.output = f"{self.run.prefix}analyze", self.run.folder / "analysis.json"

    def inputs(self) -> dict[str, Any]:
        new = self.run.new
        return {"deviation": self.run.expansion.deviation.model_dump(), "new": new, "texts": self.run.contents(new)}

    def check(self, checks: Checks) -> None:
        """Refuses text with fewer bytes than the needed tokens, since a token has at least one byte."""
        if checks.offline:
            return
        settings = self.run.expansion.deviation
        needed = settings.steps * settings.batch_size * settings.block_size
        for code in self.run.new:
            source = self.run.sources[code]
            if not source.files():
                continue  # text on the hub is assumed to be enough
            size = 0
            for text in source.documents():
                size += len(text.encode()) + 1
                if size >= needed:
                    break
            if size < needed:
                raise InputError(
                    f"Language {code!r} has {size:,} bytes of text, but the deviation analysis reads {needed:,} tokens "
                    "(steps x batch_size x block_size): give more text, or smaller `deviation: {steps: ..., "
                    "batch_size: ...}`."
                )

    def work(self) -> StepResult:
        run = self.run
        model, tokenizer = load_for_inference(run.start, run.revision)
        work = run.folder / "deviation.work"
        result = measure_deviation(
            model, tokenizer, run.texts(run.new, model.config), work_dir=work, seed=run.recipe.seed,
            **run.expansion.deviation.model_dump(),
        )  # fmt: skip
        result.to_json(self.output)
        shutil.rmtree(work)
        low, high = min(result.deviation), max(result.deviation)
        return StepResult(f"deviation {low:.4g} to {high:.4g} over {len(result.deviation)} layers")


def check_tokens(run: ExpansionRun, checks: Checks) -> None:
    """Refuses local text with fewer tokens than the similarity or the search for the nearest experts needs."""
    if checks.offline or checks.config.is_encoder_decoder:  # the analysis itself counts sentence pairs at its start
        return
    settings, recipe = run.expansion.analysis, checks.recipe
    tokenizer: Any = None
    for code in run.expansion.analyzed_languages(run.old, further=run.number > 1):
        source = run.sources[code]
        if isinstance(source, SelfWrittenText):
            if source.tokens_to_come < settings.tokens:
                raise InputError(
                    f"self_written: the base writes at most {source.tokens_to_come:,} tokens in {code}, but the "
                    f"analysis reads {settings.tokens:,} of each language: raise self_written.documents, or lower "
                    "`analysis: {tokens: ...}`."
                )
        elif source.files() and checks.counted.get(code, 0) < settings.tokens:
            tokenizer = tokenizer or load_tokenizer(resolve_checkpoint(recipe.base, recipe.revision), recipe.base)
            token_blocks(code, source.documents(), tokenizer, settings.tokens, settings.block_size)
            checks.counted[code] = settings.tokens
