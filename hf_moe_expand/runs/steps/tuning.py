"""The step that makes languages of fine-tunes of the base, in place of a plan, an expansion and stage 1."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.reader import CheckpointReader, headers_alone
from ...checkpoint.source import resolve_checkpoint
from ...checkpoint.tuned import codes_of, expand_tuned
from ...core.errors import InputError, errors_at
from ...stages.kind import StepResult
from ...stages.trial import Trial
from .step import RunStep


@dataclass
class JoinFineTunes(RunStep):
    """Writes the model whose languages are fine-tunes; `models` has them by language."""

    title, writes = "tuned", "tuned"
    models: dict[str, str]

    def inputs(self) -> dict[str, Any]:
        folders = [resolve_checkpoint(model) for model in self.models.values()]
        return {"tuned": self.models, "models": [CheckpointReader(it).fingerprint() for it in folders]}

    def check(self, trial: Trial) -> list[str]:
        """Checks all but the tensors, which `work` compares with the base's."""
        new = [code for codes in self.models for code in codes_of(codes)]
        if wrong := [code for code in self.run.new if code not in new]:
            raise InputError(f"new: {', '.join(wrong)}: `tuned` has no fine-tune for it (it has {', '.join(new)}).")
        if trial.offline and not all(Path(model).is_dir() for model in (self.run.start, *self.models.values())):
            return ["skipped: tuned: base and fine-tunes are not all on this machine"]
        with headers_alone():
            return [f"tuned: {self.work().summary}, if all of their tensors differ"]

    def work(self) -> StepResult:
        with errors_at("tuned"):
            report = expand_tuned(
                self.run.start, self.models, self.output, list(self.run.old), revision=self.run.revision,
                max_shard_size=self.run.expansion.expand.max_shard_size, overwrite=True,
            )  # fmt: skip
        return StepResult(f"{', '.join(self.models)}; {report.base_parameters:,} -> {report.parameters:,} parameters")
