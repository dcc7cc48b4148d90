"""The step that makes the plan."""

from dataclasses import replace
from typing import Any

from ...checkpoint.facts import Facts
from ...checkpoint.source import load_config, resolve_checkpoint
from ...core.errors import InputError
from ...data.sources import counted
from ...modeling import count_layers
from ...planning.make import make_plan
from ...planning.results import DeviationResult, SimilarityResult
from ...stages.outlook import Found, Outlook, StepResult
from .base import RunStep, digest_of


class MakePlan(RunStep):
    """Decides how many experts each layer gets."""

    title, writes = "plan", "plan.json"

    def inputs(self) -> dict[str, Any]:
        planned = self.run.expansion.planned
        vectors = digest_of(getattr(planned, "grouping", None))  # a file of linguistic vectors, if it is one
        return {**vectors, "plan": planned.model_dump(), "old": self.run.old, "new": self.run.new}

    def check(self, outlook: Outlook) -> Found:
        """Makes a plan from equal similarities, which has the totals and layer counts of the real one."""
        if outlook.config is None:
            return Found(outlook)
        self._check_copied(outlook.least)
        recipe = self.run.recipe
        layers, codes, settings = count_layers(outlook.config), self.run.new, self.run.expansion.planned
        same = [1.0] * layers
        encoder = Facts(outlook.config).encoder_layers
        falling = [1 - layer / layers for layer in range(layers)]
        named = [*codes, *recipe.old]
        similarity = SimilarityResult(
            old=list(recipe.old), new=codes, tokens=0, pairs={f"{a}-{b}": same for a in named for b in named},
            new_new=None, new_old=same, similarity=falling if settings.makes_groups else same, encoder_layers=encoder,
        )  # fmt: skip
        alike = [[float(a == b) for b in codes] for a in codes]
        deviation = DeviationResult(
            languages=codes, deviation=falling, by_language=dict.fromkeys(codes, falling), similarity=alike, layers=[],
            steps=0, learning_rate=0.0, batch_size=0, block_size=0, seed=0,
        )  # fmt: skip
        plan = make_plan(
            settings, layers, list(recipe.old), codes, similarity, recipe.seed, deviation,
            grows_from=() if outlook.plan is None else outlook.plan.experts_per_layer, encoder_layers=encoder,
            exclusive=outlook.plan is not None and outlook.plan.exclusive,
        )  # fmt: skip
        least = outlook.least
        if settings.fixed_counts:
            least = min(count for count in plan.experts_per_layer if count > 1)
        elif not (least and getattr(settings, "only_layers", None)):
            # Else other layers do not grow.
            least += getattr(settings, "minimum", None) or (1 if least else 2)
        line = f"expansion {self.run.number}: {plan.method}, {plan.total_experts} experts, "
        return Found(replace(outlook, plan=plan, least=least), [line + self._classifiers(len(plan.classifier_layers))])

    def _classifiers(self, placed: int) -> str:
        expansion = self.run.expansion
        if later := next((s.classifier_layers for stage, s in expansion.stages() if stage.key == "review"), None):
            return f"{counted(later, 'classifier')}, placed after stage 1"
        return counted(placed, "classifier") + ("" if placed else expansion.planned.without_classifiers)

    def _check_copied(self, least: int) -> None:
        """Refuses a further expansion that copies an expert which some layer may not have."""
        copied = self.run.expansion.expand.copy_from
        if self.run.number > 1 and isinstance(copied, int) and copied >= least:
            raise InputError(
                f"expansion {self.run.number}: expand.copy_from is {copied}, but a layer may have only experts "
                f"0..{least - 1}: give one of these."
            )

    def work(self) -> StepResult:
        run, planned = self.run, self.run.expansion.planned
        path = run.folder / "analysis.json"
        similarity = SimilarityResult.from_json(path) if planned.needs == "similarity" else None
        deviation = DeviationResult.from_json(path) if planned.needs == "deviation" else None
        facts = Facts(load_config(resolve_checkpoint(run.start, run.revision)))
        plan = make_plan(
            planned, len(facts.counts), run.old, run.new, similarity, run.recipe.seed, deviation,
            grows_from=facts.counts if facts.grown else (), encoder_layers=facts.encoder_layers,
            exclusive=facts.exclusive,
        )  # fmt: skip
        plan.save(self.output)
        summary = f"experts per layer {plan.counts_in_words}"
        if plan.groups:
            return StepResult(f"{summary}; groups {'; '.join(' '.join(group) for group in plan.groups)}")
        classifiers = f"; classifiers in layers {plan.classifiers_in_words}" if plan.classifier_layers else ""
        return StepResult(f"{summary}{classifiers}")
