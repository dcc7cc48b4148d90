"""Fits the gate, without training: recognised new languages take the new experts, all other text goes home.

Example: hf-moe-expand gates qwen-el-1 qwen-el-2 --data en=en.jsonl --data el=el.jsonl
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...analysis.gate_fit import GateReport
from ...analysis.gate_text import LEAST, gate_examples
from ...analysis.gating import anchors_for, check_layer, fit_gates
from ...analysis.settings import GateSettings
from ...checkpoint.facts import Facts
from ...checkpoint.source import load_config
from ...data.sources import contents
from ...modeling import count_layers
from ..kind import Stage, StepResult, Trial


class FitGates(Stage):
    """Gates of many classes (`analysis/gate_fit.py`)."""

    key = "gates"
    name = "gates"
    title = "Gates"
    result_name = "gated"
    place = 50
    is_default = False
    optional = True
    settings = GateSettings

    @classmethod
    def languages(cls, settings: Any, old: Iterable[str], new: Iterable[str]) -> list[str]:
        return [*old, *new]

    @classmethod
    def inputs(cls, settings: Any, run: Any) -> dict[str, Any]:
        return {"texts": run.contents([*run.old, *run.new]), "anchors": contents(run.recipe.anchor_sources)}

    @classmethod
    def attempt(cls, settings: Any, run: Any, before: Path, out: Path, trial: Trial) -> list[str]:
        before.rename(out)
        return cls.check_text(settings, run, trial, Facts(load_config(out)).history.classes)

    @classmethod
    def check_text(cls, settings: Any, run: Any, trial: Trial, classes: Mapping[str, int]) -> list[str]:
        """Refuses a layer that the model lacks, and languages (with their classes) and text from which no gate could
        learn."""
        anchors = run.recipe.anchor_sources or None
        check_layer(settings, count_layers(trial.config))
        codes = [*run.old, *run.new]
        anchors_for(classes, codes, anchors)
        for sources, tokens in (
            ({code: run.sources[code] for code in codes}, settings.tokens),
            (anchors or {}, settings.anchor_tokens),
        ):
            for code, text in sources.items() if not trial.offline else ():
                if text.files():  # fewer tokens than a gate needs to learn a language
                    rows = (row["text"] for beginning in text.beginnings() for row in beginning.rows)
                    gate_examples({code: rows}, trial.tokenizer, min(tokens, 2 * LEAST), LEAST)
        share = f"{100 * settings.unseen_share:g} % of the texts of a language that the gate has not seen"
        return [f"at most {share} go to new experts"]

    @classmethod
    def work(cls, settings: Any, run: Any, before: Path, out: Path) -> StepResult:
        texts, anchors = run.documents()
        report = fit_gates(
            before, out, texts, anchors, settings, seed=run.recipe.seed,
            max_shard_size=(run.recipe.join or run.expansion.expand).max_shard_size, overwrite=True,
        )  # fmt: skip
        return gate_result(report.gates)


def gate_result(report: GateReport) -> StepResult:
    """What a run says of a gate that was fitted."""
    passing = ", ".join(f"{code} {100 * share:.0f} %" for code, share in report.new.items())
    facts = {"layer": report.layer, "unseen": report.unseen, "named": report.named, "new": report.new}
    near = "".join(f"; {' '.join(line.split())}" for line in report.near_relatives())
    return StepResult(f"in layer {report.layer}; new experts take {passing} of the new languages' texts{near}", facts)
