"""The step that fits the language gate of a dense base, before the plan."""

from pathlib import Path
from typing import Any

from ...analysis.gating import fit_base_gate
from ...core.errors import errors_at
from ...stages.kind import StepResult
from ...stages.kinds.gates import FitGates, gate_result
from ...stages.trial import Trial
from .step import ExpansionRun, RunStep

GATE_FILE = "gate.safetensors"


class FitBaseGate(RunStep):
    """Fits the gate of the dense base."""

    read_later = True
    title, writes = "gate", GATE_FILE

    def inputs(self) -> dict[str, Any]:
        run, settings = self.run, self.run.expansion.gates
        return {
            "gates": settings.model_dump(),
            "old": run.old,
            "new": run.new,
            **FitGates.inputs(settings, run),
        }

    def check(self, trial: Trial) -> list[str]:
        with errors_at("gates"):
            return [f"gates: {line}" for line in FitGates.check_text(self.run.expansion.gates, self.run, trial)]

    def work(self) -> StepResult:
        run = self.run
        texts, anchors = run.documents()
        settings, revision = run.expansion.gates, run.revision
        report = fit_base_gate(
            run.start, self.output, texts, run.new, anchors, settings, revision=revision, overwrite=True
        )
        return gate_result(report.gates)


def gate_file(run: ExpansionRun) -> Path | None:
    """The gate that was fitted for this expansion of a dense base; None without one."""
    file = run.folder / GATE_FILE
    return file if fits_base(run) and file.is_file() else None


def fits_base(run: ExpansionRun) -> bool:
    """Whether the gate of this expansion is fitted on the dense base, before the plan."""
    return run.number == 1 and not run.recipe.joins and run.expansion.has("gates")


def changes_base(run: ExpansionRun) -> bool:
    """Whether a stage of this expansion changes the base, so that a gate that was fitted on it is fitted once more."""
    return any(
        stage.key == "graft" or getattr(settings, "everything", False) for stage, settings in run.expansion.stages()
    )
