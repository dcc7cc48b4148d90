"""The steps before a plan: similarity of languages (LayerMoE), deviation (DMoE)."""

import shutil
from collections.abc import Sequence
from typing import Any

from ...analysis.deviation import check_sizes, measure_deviation
from ...analysis.reading import token_blocks
from ...analysis.similarity import measure_similarity
from ...core.disk import readable_size
from ...core.errors import InputError, errors_at
from ...inference.models import load_for_inference
from ...modeling import count_layers
from ...stages.kind import StepResult
from ...stages.trial import Trial
from .step import ExpansionRun, RunStep


class AnalyzeSimilarity(RunStep):
    """Measures the similarity of languages in each layer."""

    title, writes = "analyze", "analysis.json"

    def inputs(self) -> dict[str, Any]:
        codes = self.run.expansion.analyzed_languages(self.run.old, self.run.number > 1)
        return {
            "analysis": self.run.expansion.analysis.model_dump(), "old": self.run.old, "new": self.run.new,
            "texts": self.run.contents(codes),
        }  # fmt: skip

    def check(self, trial: Trial) -> list[str]:
        return check_tokens(self.run, trial)

    def work(self) -> StepResult:
        run = self.run
        model, tokenizer = load_for_inference(run.start, run.revision)
        texts = run.texts([*run.old, *run.new], model.config)
        result = measure_similarity(model, tokenizer, texts, run.old, run.new, **run.expansion.analysis.model_dump())
        result.to_json(self.output)
        return StepResult(f"similarity {_range(result.similarity)} over {len(result.similarity)} layers")


class AnalyzeDeviation(RunStep):
    """Measures how far training on each language moves each layer, and how similar these changes are."""

    title, writes = "analyze", "analysis.json"

    def inputs(self) -> dict[str, Any]:
        new = self.run.new
        return {"deviation": self.run.expansion.deviation.model_dump(), "new": new, "texts": self.run.contents(new)}

    def check(self, trial: Trial) -> list[str]:
        """Refuses text with fewer bytes than the needed tokens, since a token has at least one byte."""
        settings = self.run.expansion.deviation
        with errors_at("deviation"):
            check_sizes(trial.config, count_layers(trial.config), settings.block_size, settings.last_layers)
        if trial.offline:
            return []
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
            else:
                raise InputError(
                    f"Language {code!r} has {readable_size(size)} of text, but the deviation analysis reads "
                    f"{needed:,} tokens (steps x batch_size x block_size): give more text, or smaller `deviation: "
                    "{steps: ..., batch_size: ...}`."
                )
        return []

    def work(self) -> StepResult:
        run, work = self.run, self.run.folder / "deviation.work"
        model, tokenizer = load_for_inference(run.start, run.revision)
        result = measure_deviation(
            model, tokenizer, run.texts(run.new, model.config), work_dir=work, seed=run.recipe.seed,
            **run.expansion.deviation.model_dump(),
        )  # fmt: skip
        shutil.rmtree(work)
        result.to_json(self.output)
        return StepResult(f"deviation {_range(result.deviation, '.4g')} over {len(result.deviation)} layers")


def _range(values: Sequence[float], digits: str = ".3f") -> str:
    return f"{min(values):{digits}} to {max(values):{digits}}"


def check_tokens(run: ExpansionRun, trial: Trial) -> list[str]:
    """Refuses local text with fewer tokens than the similarity or the search for the nearest experts needs; returns a
    line that says which languages have enough."""
    if trial.offline or trial.config.is_encoder_decoder:  # the analysis itself counts sentence pairs at its start
        return []
    settings, enough = run.expansion.analysis, []
    for code in run.expansion.analyzed_languages(run.old, further=run.number > 1):
        source = run.sources[code]
        if source.files():
            token_blocks(code, source.documents(), trial.tokenizer, settings.tokens, settings.block_size)
            enough.append(code)
    return [f"analysis: {' '.join(enough)} have enough text"] if enough else []
