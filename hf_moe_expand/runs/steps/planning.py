"""The step that makes the plan."""

from typing import Any

from ...checkpoint.facts import Facts
from ...checkpoint.source import load_config, resolve_checkpoint
from ...data.rows import counted
from ...planning.make import make_plan
from ...planning.plan import Plan
from ...planning.results import DeviationResult, SimilarityResult
from ...stages.kind import StepResult
from ...stages.trial import Trial
from .step import RunStep, digest_of


class MakePlan(RunStep):
    """Decides how many experts each layer gets."""

    title, writes = "plan", "plan.json"

    def inputs(self) -> dict[str, Any]:
        planned = self.run.expansion.planned
        vectors = digest_of(getattr(planned, "grouping", None))  # a file of linguistic vectors, if it is one
        return {**vectors, "plan": planned.model_dump(), "old": self.run.old, "new": self.run.new}

    def check(self, trial: Trial) -> list[str]:
        """Makes the largest plan that the analysis may give."""
        plan, planned = self._made(measured=False), self.run.expansion.planned
        self.output.parent.mkdir(parents=True, exist_ok=True)
        plan.save(self.output)
        line = f"expansion {self.run.number}: {plan.method}, {plan.total_experts} experts, "
        waits = "; the analysis says in which layers, and these are the most" if planned.needs else ""
        return [line + self._classifiers(len(plan.classifier_layers)) + waits]

    def _classifiers(self, placed: int) -> str:
        expansion = self.run.expansion
        if later := next((s.classifier_layers for stage, s in expansion.stages() if stage.key == "review"), None):
            return f"{counted(later, 'classifier')}, placed after stage 1"
        return counted(placed, "classifier") + ("" if placed else expansion.planned.without_classifiers)

    def _made(self, measured: bool = True) -> Plan:
        run, planned = self.run, self.run.expansion.planned
        path, needs = run.folder / "analysis.json", planned.needs if measured else None
        facts = Facts(load_config(resolve_checkpoint(run.start, run.revision)))
        return make_plan(
            planned, len(facts.counts), run.old, run.new,
            SimilarityResult.from_json(path) if needs == "similarity" else None, run.recipe.seed,
            DeviationResult.from_json(path) if needs == "deviation" else None,
            grows_from=facts.counts if facts.grown else (), encoder_layers=facts.encoder_layers,
            exclusive=facts.exclusive, measured=measured,
        )  # fmt: skip

    def work(self) -> StepResult:
        plan = self._made()
        plan.save(self.output)
        summary = f"experts per layer {plan.counts_in_words}"
        if plan.groups:
            return StepResult(f"{summary}; groups {'; '.join(' '.join(group) for group in plan.groups)}")
        classifiers = f"; classifiers in layers {plan.classifiers_in_words}" if plan.classifier_layers else ""
        return StepResult(f"{summary}{classifiers}")
