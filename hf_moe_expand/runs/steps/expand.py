"""The step that expands a dense checkpoint, or grows an expanded one."""

from dataclasses import replace
from typing import Any

from ...analysis.gating import gate_from_file
from ...analysis.routing import nearest_experts
from ...checkpoint.expand import check_dense_plan, expand_checkpoint, grow_checkpoint, planned_config
from ...checkpoint.new_experts import chosen_kind
from ...checkpoint.stored import network_of
from ...checkpoint.writer import check_shard_size
from ...core.disk import StepOutput
from ...core.errors import errors_at
from ...inference.models import load_for_inference
from ...planning.plan import Plan
from ...stages.outlook import Found, Outlook, StepResult
from .analyze import check_tokens
from .base import RunStep
from .base_gate import gate_file


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

    def check(self, outlook: Outlook) -> Found:
        settings = self.run.expansion.expand
        with errors_at("expand"):
            check_shard_size(settings.max_shard_size)
        lines = check_tokens(self.run, outlook) if self._copies_nearest else []
        if outlook.plan is None:
            return Found(outlook, lines)
        outlook = replace(outlook, network=self._network(outlook.config, outlook.plan))
        return Found(outlook, lines, [StepOutput(self.output, outlook.checkpoint_bytes)])

    def _network(self, dense: Any, plan: Plan) -> Any:
        """The model that `plan` makes of the dense base, without weights."""
        settings = self.run.recipe.all_expansions[0].expand  # further expansions keep the first one's kind of experts
        with errors_at("expand"):
            if not plan.grows_from:
                check_dense_plan(plan, dense, self.run.start)
            kind = chosen_kind(network_of(dense), plan, settings.experts)
            config = planned_config(dense, plan, kind, conditional_routing=settings.conditional_routing)
        self.run.history.write(config)
        return network_of(config)

    def work(self) -> StepResult:
        run, settings = self.run, self.run.expansion.expand
        plan = Plan.load(run.folder / "plan.json")
        options: dict[str, Any] = {
            "seed": run.recipe.seed, "max_shard_size": settings.max_shard_size, "overwrite": True
        }  # fmt: skip
        if plan.grows_from:
            nearest = self._copies_nearest
            layers = range(len(plan.grows_from))
            origin = self._nearest() if nearest else dict.fromkeys(layers, int(settings.copy_from))
            grow_checkpoint(run.start, self.output, plan, copy_from=origin, **options)
            summary = f"{plan.total_experts - sum(plan.grows_from)} new experts"
            copied = f"; nearest in each layer {' '.join(map(str, origin.values()))}" if nearest else ""
            return StepResult(summary + copied)
        gate = None
        if (file := gate_file(run)) is not None:
            gate, _ = gate_from_file(file, run.start, plan.new, run.revision)
        report = expand_checkpoint(
            run.start,
            self.output,
            plan,
            **settings.experts.model_dump(),
            revision=run.revision,
            gate=gate,
            **options,
        )
        return StepResult(f"{report.base_parameters:,} -> {report.parameters:,} parameters")

    def _nearest(self) -> dict[int, int]:
        model, tokenizer = load_for_inference(self.run.start)
        settings = self.run.expansion.analysis.model_dump()
        return nearest_experts(model, tokenizer, self.run.texts(self.run.new, model.config), **settings)
