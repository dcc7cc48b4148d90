"""The step that fits gates."""

from dataclasses import dataclass
from typing import Any

from ..analysis.gating import check_languages, fit_gates
from ..errors import errors_at
from .base import Checks, StepResult, contents
from .stage import StageStep


@dataclass
class GatesStep(StageStep):
    """Writes the checkpoint with gates that send home what they do not recognise."""

    def inputs(self) -> dict[str, Any]:
        anchors = contents(self.run.recipe.anchor_sources)
        return {**super().inputs(), "texts": contents(self._texts()), "anchors": anchors}

    def check(self, checks: Checks) -> None:
        recipe, share = self.run.recipe, 100 * self.settings.unseen_share
        checks.lines.append(f"gates: at most {share:g} % of an unseen language's tokens go to new experts")
        super().check(checks)
        if checks.config is not None and not recipe.joins:
            rounds = [recipe.old_languages, *(expansion.new for expansion in recipe.all_expansions[: self.run.number])]
            classes = {code: number for number, codes in enumerate(rounds) for code in codes}
            with errors_at(self.stage.key):
                check_languages(classes, self._texts(), recipe.anchor_sources or None)  # type: ignore[arg-type]

    def work(self) -> StepResult:
        recipe = self.run.recipe
        shuffled = {code: source.load().shuffle(seed=recipe.seed)["text"] for code, source in self._texts().items()}
        anchors = {code: source.load()["text"] for code, source in recipe.anchor_sources.items()} or None
        report = fit_gates(
            self.before, self.output, shuffled, anchors, self.settings, seed=recipe.seed,
            max_shard_size=self.run.expansion.expand.max_shard_size, overwrite=True,
        )  # fmt: skip
        gates = report.gates
        passing = ", ".join(f"{code} {100 * shares[0]:.0f} %" for code, shares in gates.new.items())
        return StepResult(
            f"new experts take {passing} of the new languages' tokens", {"unseen": gates.unseen, "new": gates.new}
        )
