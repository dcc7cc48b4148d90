"""The step that expands a dense checkpoint, or grows an expanded one."""

from pathlib import Path
from typing import Any

from ...analysis.gating import gate_from_file
from ...analysis.routers import nearest_experts
from ...checkpoint.expand import expand_checkpoint, grow_checkpoint
from ...checkpoint.reader import headers_alone
from ...checkpoint.source import load_config
from ...core.errors import InputError, errors_at
from ...inference.models import load_for_inference
from ...planning.plan import Plan
from ...stages.kind import StepResult
from ...stages.trial import Trial
from .analyze import check_tokens
from .base_gate import gate_file
from .step import RunStep


class Expand(RunStep):
    """Writes the checkpoint with new experts."""

    title, writes = "expand", "expanded"

    @property
    def _copies_nearest(self) -> bool:
        return self.run.number > 1 and self.run.expansion.expand.copy_from == "nearest"

    def inputs(self) -> dict[str, Any]:
        inputs = {"expand": self.run.expansion.expand.model_dump()}
        if self._copies_nearest:
            inputs |= {"analysis": self.run.expansion.analysis.model_dump(), "texts": self.run.contents(self.run.new)}
        return inputs

    def check(self, trial: Trial) -> list[str]:
        lines = check_tokens(self.run, trial) if self._copies_nearest else []
        with errors_at("expand"), headers_alone():
            self._write(Plan.load(self.run.folder / "plan.json"), 0 if self._copies_nearest else self._certain())
        return lines

    def _certain(self) -> int:
        """The expert that new ones copy; refuses one of a further expansion that some layer may not have."""
        copied, number = self.run.expansion.expand.copy_from, self.run.number
        if number == 1 or copied == "nearest":
            return 0
        config: Any = load_config(Path(self.run.start))
        plans = [expansion.planned for expansion in self.run.recipe.all_expansions[: number - 1]]
        least = min(count for count in config.num_experts_per_layer if count > 1)
        if not all(plan.fixed_counts for plan in plans):
            further = [plan for plan in plans[1:] if not getattr(plan, "only_layers", None)]  # else others do not grow
            least = (getattr(plans[0], "minimum", None) or 2) + sum(getattr(p, "minimum", None) or 1 for p in further)
        if int(copied) >= least:
            raise InputError(
                f"expansion {number}: copy_from is {copied}, but a layer may have only experts 0..{least - 1}: give "
                "one of these."
            )
        return int(copied)

    def work(self) -> StepResult:
        plan = Plan.load(self.run.folder / "plan.json")
        return self._write(plan, self._nearest() if self._copies_nearest else self.run.expansion.expand.copy_from)

    def _write(self, plan: Plan, copied: Any) -> StepResult:
        """Writes the checkpoint; `copied` is the expert that further experts copy, or that of each layer."""
        run, settings = self.run, self.run.expansion.expand
        options: dict[str, Any] = {
            "seed": run.recipe.seed, "max_shard_size": settings.max_shard_size, "overwrite": True
        }  # fmt: skip
        if plan.grows_from:
            origin = copied if isinstance(copied, dict) else dict.fromkeys(range(len(plan.grows_from)), copied)
            grow_checkpoint(run.start, self.output, plan, copy_from=origin, **options)
            summary = f"{plan.total_experts - sum(plan.grows_from)} new experts"
            near = f"; nearest in each layer {' '.join(map(str, origin.values()))}" if self._copies_nearest else ""
            return StepResult(summary + near)
        gate = None
        if (file := gate_file(run)) is not None:
            gate, _ = gate_from_file(file, run.start, plan.new, run.revision)
        report = expand_checkpoint(
            run.start, self.output, plan, **settings.experts.model_dump(), revision=run.revision, gate=gate, **options
        )
        return StepResult(f"{report.base_parameters:,} -> {report.parameters:,} parameters")

    def _nearest(self) -> dict[int, int]:
        model, tokenizer = load_for_inference(self.run.start)
        settings = self.run.expansion.analysis.model_dump()
        return nearest_experts(model, tokenizer, self.run.texts(self.run.new, model.config), **settings)
