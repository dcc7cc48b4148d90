"""The step that fits the language gate of a dense base, before the plan."""

from typing import Any

from ...analysis.gating import check_layer, fit_base_gate, layer_of_file
from ...checkpoint.source import load_config, resolve_checkpoint
from ...modeling import count_layers
from ...planning.layers import layers_in
from ...stages.kinds.gates import FitGates, gate_result
from ...stages.outlook import Found, Outlook, StepResult
from .base import ExpansionRun, RunStep

GATE_FILE = "gate.safetensors"


class FitBaseGate(RunStep):
    """Fits the gate of the dense base: the plan leaves the layers below it dense."""

    read_later, stands_for_earlier = True, False
    title, writes = "gate", GATE_FILE

    def inputs(self) -> dict[str, Any]:
        run, settings = self.run, self.run.expansion.gates
        only = {"only_layers": only_layers(run)} if only_layers(run) else {}
        return {
            "gates": settings.model_dump(),
            "old": run.old,
            "new": run.new,
            **only,
            **FitGates.inputs(settings, run),
        }

    def check(self, outlook: Outlook) -> Found:
        if outlook.config is not None:
            check_layer(self.run.expansion.gates, expanded_layers(self.run, outlook.config))
        return Found(outlook, FitGates.preview(self.run.expansion.gates, self.run, outlook))

    def work(self) -> StepResult:
        run = self.run
        texts, anchors = run.documents()
        settings, revision = run.expansion.gates, run.revision
        layers = expanded_layers(run, load_config(resolve_checkpoint(run.start, revision)))
        report = fit_base_gate(
            run.start, self.output, texts, run.new, anchors, settings, layers=layers, revision=revision, overwrite=True
        )
        return gate_result(report.gates)


def only_layers(run: ExpansionRun) -> str | None:
    """The layers to which the plan confines experts, as the recipe has them."""
    return getattr(run.expansion.planned, "only_layers", None)


def expanded_layers(run: ExpansionRun, config: Any) -> list[int]:
    """The layers of a decoder that the plan may expand."""
    only, count = only_layers(run), count_layers(config)
    return layers_in(only, count) if only else list(range(count))


def gate_layer(run: ExpansionRun) -> int | None:
    """The layer of the gate that was fitted for this expansion of a dense base; None without one."""
    file = run.folder / GATE_FILE
    return layer_of_file(file) if fits_base(run) and file.is_file() else None


def fits_base(run: ExpansionRun) -> bool:
    """Whether the gate of this expansion is fitted on the dense base, before the plan."""
    return run.number == 1 and not run.recipe.joins and run.expansion.has("gates")


def changes_base(run: ExpansionRun) -> bool:
    """Whether a stage of this expansion changes the base, so that a gate that was fitted on it is fitted once more."""
    return any(
        stage.key == "graft" or getattr(settings, "everything", False) for stage, settings in run.expansion.stages()
    )
