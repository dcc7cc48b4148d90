"""The steps that fit the language gate: of a dense base before the plan, or of an expanded checkpoint."""

from dataclasses import dataclass
from typing import Any

from ..analysis.gate_fit import GateReport
from ..analysis.gating import check_languages, fit_base_gate, fit_gates, layer_of_file
from ..errors import errors_at
from .base import Checks, ExpansionRun, RunStep, StepResult, contents
from .stage import StageStep

GATE_FILE = "gate.safetensors"


class FitBaseGate(RunStep):
    """Fits the gate of the dense base: the plan leaves the layers below it dense."""

    read_later, stands_for_earlier = True, False
    title, writes = "gate", GATE_FILE

    def inputs(self) -> dict[str, Any]:
        run = self.run
        return {
            "gates": run.expansion.gates.model_dump(), "old": run.old, "new": run.new,
            "texts": run.contents([*run.old, *run.new]), "anchors": contents(run.recipe.anchor_sources),
        }  # fmt: skip

    def check(self, checks: Checks) -> None:
        _check(self.run, checks, self.run.expansion.gates)

    def work(self) -> StepResult:
        run = self.run
        texts, anchors = _documents(run)
        settings, revision = run.expansion.gates, run.revision
        report = fit_base_gate(
            run.start, self.output, texts, run.new, anchors, settings, revision=revision, overwrite=True
        )
        return _result(report.gates)


@dataclass
class GatesStep(StageStep):
    """Writes the checkpoint with a gate that sends home what it does not recognise."""

    def inputs(self) -> dict[str, Any]:
        anchors = contents(self.run.recipe.anchor_sources)
        return {**super().inputs(), "texts": contents(self._texts()), "anchors": anchors}

    def check(self, checks: Checks) -> None:
        super().check(checks)
        _check(self.run, checks, self.settings)

    def work(self) -> StepResult:
        texts, anchors = _documents(self.run)
        report = fit_gates(
            self.before, self.output, texts, anchors, self.settings, seed=self.run.recipe.seed,
            max_shard_size=self.run.expansion.expand.max_shard_size, overwrite=True,
        )  # fmt: skip
        return _result(report.gates)


def gate_layer(run: ExpansionRun) -> int | None:
    """The layer of the gate that was fitted for this expansion of a dense base; None without one."""
    file = run.folder / GATE_FILE
    return layer_of_file(file) if fits_base(run) and file.is_file() else None


def fits_base(run: ExpansionRun) -> bool:
    """Whether the gate of this expansion is fitted on the dense base, before the plan."""
    return run.number == 1 and not run.recipe.joins and run.expansion.has("gates")


def _check(run: ExpansionRun, checks: Checks, settings: Any) -> None:
    checks.lines.append(
        f"gates: at most {100 * settings.unseen_share:g} % of the tokens of a language that the gate has not seen go "
        "to new experts"
    )
    if checks.config is not None and not run.recipe.joins:
        rounds = [run.recipe.old_languages, *(expansion.new for expansion in run.recipe.all_expansions[: run.number])]
        classes = {code: number for number, codes in enumerate(rounds) for code in codes}
        with errors_at("gates"):
            check_languages(classes, [*run.old, *run.new], run.recipe.anchor_sources or None)  # type: ignore[arg-type]


def _documents(run: ExpansionRun) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The shuffled text of all languages, and that of the anchors that the recipe names."""
    sources = {code: run.sources[code] for code in dict.fromkeys([*run.old, *run.new])}
    texts = {code: source.load().shuffle(seed=run.recipe.seed)["text"] for code, source in sources.items()}
    return texts, {code: source.load()["text"] for code, source in run.recipe.anchor_sources.items()} or None


def _result(report: GateReport) -> StepResult:
    passing = ", ".join(f"{code} {100 * shares[0]:.0f} %" for code, shares in report.new.items())
    facts = {"layer": report.layer, "unseen": report.unseen, "named": report.named}
    facts["new"] = {code: {str(key): share for key, share in of.items()} for code, of in report.new.items()}
    return StepResult(f"in layer {report.layer}; new experts take {passing} of the new languages' tokens", facts)
