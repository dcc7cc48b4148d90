"""The steps before a plan: similarity of languages (LayerMoE), separability of old and new text, deviation of layers
(DMoE)."""

import shutil
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from ..analysis.deviation import measure_deviation
from ..analysis.reading import document_blocks, token_blocks
from ..analysis.separability import measure_separability, split
from ..analysis.similarity import measure_similarity
from ..errors import InputError
from ..models import load_for_inference
from ..results import DeviationResult, SimilarityResult
from ..self_written import SelfWrittenText
from .base import Checks, ExpansionRun, RunStep, StepResult


class _Analysis(RunStep):
    """Measures the base, or the checkpoint before, on text, and writes the result as JSON."""

    def work(self) -> StepResult:
        result = self._measured(*load_for_inference(self.run.start, self.run.revision))
        result.to_json(self.output)
        return StepResult(self._summary(result))

    @abstractmethod
    def _measured(self, model: Any, tokenizer: Any) -> Any:
        """The result."""

    @abstractmethod
    def _summary(self, result: Any) -> str:
        """The result in a line."""


class AnalyzeSimilarity(_Analysis):
    """Measures the similarity of languages in each layer."""

    title, writes = "analyze", "analysis.json"

    def inputs(self) -> dict[str, Any]:
        codes = self.run.expansion.analyzed_languages(self.run.old, self.run.number > 1)
        return {
            "analysis": self.run.expansion.analysis.model_dump(), "old": self.run.old, "new": self.run.new,
            "texts": self.run.contents(codes),
        }  # fmt: skip

    def check(self, checks: Checks) -> None:
        check_tokens(self.run, checks)

    def _measured(self, model: Any, tokenizer: Any) -> SimilarityResult:
        return measure_similarity(*self._text(model, tokenizer), **self.run.expansion.analysis.model_dump())

    def _text(self, model: Any, tokenizer: Any) -> tuple[Any, Any, dict[str, Any], list[str], list[str]]:
        """The model, and the text that it reads."""
        run = self.run
        return model, tokenizer, run.texts([*run.old, *run.new], model.config), run.old, run.new

    def _summary(self, result: SimilarityResult) -> str:
        return f"similarity {_range(result.similarity)} over {len(result.similarity)} layers"


class AnalyzeSeparability(AnalyzeSimilarity):
    """Measures how well each layer tells old text from new, with the settings of the similarity."""

    stands_for_earlier = False  # the plan needs the similarity too
    title, writes = "analyze separability", "separability.json"

    def check(self, checks: Checks) -> None:
        """Refuses local text of which nothing can be held out, as far as its order in the files shows."""
        check_tokens(self.run, checks)
        if checks.offline:
            return
        settings = self.run.expansion.analysis
        for code in (*self.run.old, *self.run.new):
            source = self.run.sources[code]
            if source.files():
                sizes = (checks.tokenizer, settings.tokens, settings.block_size)
                split(code, document_blocks(code, source.documents(), *sizes), checks.recipe.seed)

    def _measured(self, model: Any, tokenizer: Any) -> Any:
        settings = self.run.expansion.analysis.model_dump()
        return measure_separability(*self._text(model, tokenizer), **settings, seed=self.run.recipe.seed)

    def _summary(self, result: Any) -> str:
        accuracy = _range(result.separability)
        return f"accuracy after {result.length} tokens {accuracy} over {len(result.token)} layers"


class AnalyzeDeviation(_Analysis):
    """Measures how far training on each language moves each layer, and how similar these changes are."""

    title, writes = "analyze", "analysis.json"

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

    def _measured(self, model: Any, tokenizer: Any) -> DeviationResult:
        run, work = self.run, self.run.folder / "deviation.work"
        result = measure_deviation(
            model, tokenizer, run.texts(run.new, model.config), work_dir=work, seed=run.recipe.seed,
            **run.expansion.deviation.model_dump(),
        )  # fmt: skip
        shutil.rmtree(work)
        return result

    def _summary(self, result: DeviationResult) -> str:
        return f"deviation {_range(result.deviation, '.4g')} over {len(result.deviation)} layers"


def _range(values: Sequence[float], digits: str = ".3f") -> str:
    return f"{min(values):{digits}} to {max(values):{digits}}"


def check_tokens(run: ExpansionRun, checks: Checks) -> None:
    """Refuses local text with fewer tokens than the similarity or the search for the nearest experts needs."""
    if checks.offline or checks.config.is_encoder_decoder:  # the analysis itself counts sentence pairs at its start
        return
    settings = run.expansion.analysis
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
            token_blocks(code, source.documents(), checks.tokenizer, settings.tokens, settings.block_size)
            checks.counted[code] = settings.tokens
