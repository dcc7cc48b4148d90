"""The steps before a plan: similarity of languages (LayerMoE), deviation (DMoE), the gate of a dense base."""

import shutil
from collections.abc import Sequence
from typing import Any

from ...analysis.deviation import check_sizes, measure_deviation
from ...analysis.gating import fit_base_gate
from ...analysis.reading import token_blocks
from ...analysis.similarity import measure_similarity
from ...core.errors import InputError, errors_at
from ...data.sources import LanguageText
from ...inference.models import load_for_inference
from ...modeling import count_layers
from ...stages.kind import StepResult, Trial
from ...stages.kinds.gates import FitGates, gate_result
from .step import ExpansionRun, Step

ANALYSIS, GATE = "analysis.json", "gate.safetensors"


def similarity_step(run: ExpansionRun) -> Step:
    """Measures the similarity of languages in each layer."""
    settings = run.expansion.analysis.model_dump()

    def inputs() -> dict[str, Any]:
        texts = run.contents(run.expansion.analyzed_languages(run.old, run.number > 1))
        return {"analysis": settings, "old": run.old, "new": run.new, "texts": texts}

    def work() -> StepResult:
        model, tokenizer = load_for_inference(run.start, run.revision)
        texts = run.texts([*run.old, *run.new], model.config)
        result = measure_similarity(model, tokenizer, texts, run.old, run.new, **settings)
        result.to_json(run.folder / ANALYSIS)
        return StepResult(f"similarity {_range(result.similarity)} over {len(result.similarity)} layers")

    return run.step("analyze", ANALYSIS, inputs, work, lambda trial: check_tokens(run, trial))


def deviation_step(run: ExpansionRun) -> Step:
    """Measures how far training on each language moves each layer, and how similar these changes are."""
    settings = run.expansion.deviation

    def inputs() -> dict[str, Any]:
        return {"deviation": settings.model_dump(), "new": run.new, "texts": run.contents(run.new)}

    def check(trial: Trial) -> list[str]:
        with errors_at("deviation"):
            check_sizes(trial.config, count_layers(trial.config), settings.block_size, settings.last_layers)
        for code in run.new if not trial.offline else ():
            _check_bytes(run.sources[code], settings.steps * settings.batch_size * settings.block_size)
        return []

    def work() -> StepResult:
        place = run.folder / "deviation.work"
        model, tokenizer = load_for_inference(run.start, run.revision)
        texts = run.texts(run.new, model.config)
        result = measure_deviation(
            model, tokenizer, texts, work_dir=place, seed=run.recipe.seed, **settings.model_dump()
        )
        result.to_json(run.folder / ANALYSIS)
        shutil.rmtree(place)
        return StepResult(f"deviation {_range(result.deviation, '.4g')} over {len(result.deviation)} layers")

    return run.step("analyze", ANALYSIS, inputs, work, check)


def gate_step(run: ExpansionRun) -> Step:
    """Fits the gate of the dense base."""
    settings = run.expansion.gates

    def inputs() -> dict[str, Any]:
        gates = {"gates": settings.model_dump(), "old": run.old, "new": run.new}
        return {**gates, **FitGates.inputs(settings, run)}

    def check(trial: Trial) -> list[str]:
        classes = dict.fromkeys(run.old, 0) | dict.fromkeys(run.new, 1)
        with errors_at("gates"):
            return [f"gates: {line}" for line in FitGates.check_text(settings, run, trial, classes)]

    def work() -> StepResult:
        texts, anchors = run.documents()
        report = fit_base_gate(
            run.start, run.folder / GATE, texts, run.new, anchors, settings, revision=run.revision, overwrite=True
        )
        return gate_result(report.gates)

    return run.step("gate", GATE, inputs, work, check)


def gates_base(run: ExpansionRun) -> bool:
    """Whether the gate of this expansion is fitted on the dense base, before the plan."""
    return run.number == 1 and not run.recipe.joins and run.expansion.has("gates")


def changes_base(run: ExpansionRun) -> bool:
    """Whether a stage of this expansion changes the base, so that a gate that was fitted on it is fitted once more."""
    return any(
        stage.key == "graft" or getattr(settings, "everything", False) for stage, settings in run.expansion.stages()
    )


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


def _check_bytes(source: LanguageText, tokens: int) -> None:
    """Refuses local text with fewer bytes than the analysis reads tokens, since a token has at least one byte."""
    size = 0
    for text in source.documents() if source.files() else ():  # text on the hub is taken to be enough
        size += len(text.encode()) + 1
        if size >= tokens:
            return
    if size:
        raise InputError(f"{source.language}: {size:,} bytes of text are too few for {tokens:,} tokens of `deviation`.")


def _range(values: Sequence[float], digits: str = ".3f") -> str:
    return f"{min(values):{digits}} to {max(values):{digits}}"
