"""DeltaMoE: adds the change of a fine-tune (instruct - base) to the expanded model.

Example: hf-moe-expand graft qwen-el-1 qwen-el-chat --base Qwen/Qwen2.5-0.5B --instruct Qwen/Qwen2.5-0.5B-Instruct
"""

from pathlib import Path
from typing import Any
from warnings import catch_warnings

from ...checkpoint.arguments import GraftSettings
from ...checkpoint.merge import check_fine_tune, graft_delta
from ..kind import Stage, StepResult, Trial


class Graft(Stage):
    """DeltaMoE's graft: alignment without alignment data."""

    key = "graft"
    name = "graft"
    title = "Graft"
    result_name = "grafted"
    place = 40
    families = ("layer_moe", "dmoe")
    is_default = False
    optional = True
    settings = GraftSettings

    @classmethod
    def attempt(cls, settings: Any, run: Any, before: Path, out: Path, trial: Trial) -> list[str]:
        if trial.offline:
            before.rename(out)
            return [f"skipped: whether {settings.instruct} is a fine-tune of {trial.base}"]
        check_fine_tune(trial.base, settings.instruct, settings.keep_tokenizer, trial.revision)
        with catch_warnings(action="ignore"):  # of tensors without values
            super().attempt(settings, run, before, out, trial)
        return [f"{settings.instruct}, of the base's shapes"]

    @classmethod
    def work(cls, settings: Any, run: Any, before: Path, out: Path) -> StepResult:
        recipe = run.recipe
        report = graft_delta(
            before, out, recipe.base, settings.instruct, scale=settings.scale, keep_tokenizer=settings.keep_tokenizer,
            revision=recipe.revision, max_shard_size=run.expansion.expand.max_shard_size, overwrite=True,
        )  # fmt: skip
        return StepResult(f"base and instruct have a cosine of {report.instruct_cosine:.4f}")
