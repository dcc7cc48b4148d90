"""The steps that run a stage on an expanded checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ...checkpoint.facts import Facts
from ...checkpoint.records import StageRecord, add_stage
from ...checkpoint.source import load_config
from ...checkpoint.stored import network_of
from ...core.disk import readable_size
from ...core.errors import InputError, errors_at
from ...data.held_out import check_held_out
from ...data.sources import LanguageText, contents
from ...evaluation.validation import validation_sources
from ...inference.memory import least_memory, memory_of_all, training_disk
from ...stages.config import StageConfig
from ...stages.kind import Stage, StepResult
from ...stages.prepare import check_enough, length
from ...stages.resume import remove_training
from ...stages.run import check_frozen, train_stage
from ...stages.trial import Trial
from ...trainers.bfloat16 import NO_BFLOAT16, has_bfloat16
from .step import RunStep, digest_of


@dataclass
class StageStep(RunStep):
    """A step that runs a stage on the checkpoint `before`."""

    stage: type[Stage]
    settings: Any
    before: Path

    def __post_init__(self) -> None:
        self.title = self.writes = self.stage.key  # type: ignore[misc]
        super().__post_init__()

    def inputs(self) -> dict[str, Any]:
        return {self.stage.key: self.settings.model_dump(), **self.stage.inputs(self.settings, self.run)}

    def check(self, trial: Trial) -> list[str]:
        key = self.stage.key
        with errors_at(key):
            said = self.stage.attempt(self.settings, self.run, self.before, self.output, trial)
        return [f"{key}: {line}" for line in said]

    def work(self) -> StepResult:
        return self.stage.work(self.settings, self.run, self.before, self.output)


class TrainStep(StageStep):
    """A step that runs a training stage."""

    every_rank = True
    settings: StageConfig

    def _texts(self) -> dict[str, LanguageText]:
        """The text that the stage reads."""
        codes = self.stage.languages(self.settings, self.run.old, self.run.new)
        return {code: self.run.sources[code] for code in dict.fromkeys(codes)}

    def inputs(self) -> dict[str, Any]:
        schedule = digest_of(getattr(self.settings, "curriculum", None))
        return {**schedule, self.stage.key: self.settings.keywords(), "texts": contents(self._texts())}

    def check(self, trial: Trial) -> list[str]:
        """Checks the stage with its model and its text; of its training the model's history gets the name alone."""
        settings, key = self.settings, self.stage.key
        texts: Any = dict.fromkeys(self._texts()) if trial.offline else self._texts()
        with errors_at(key):
            model = settings.load_config(self.before)
            said = settings.check(model, texts, offline=trial.offline, tokenizer=trial.tokenizer)
            if not trial.offline:
                check_enough(settings, model, texts, trial.tokenizer)
            network = network_of(model)
            self._check_memory(network, trial)
        lines = [f"{key}: {line}" for line in said]
        validation = getattr(settings, "validation", None)
        if validation and not trial.offline:
            tests = {f"{key}.validation.texts.{code}": text for code, text in validation_sources(validation).items()}
            lines += check_held_out(tests, texts, bool(model.is_encoder_decoder))
        if not model.is_encoder_decoder:
            lines += length(settings, model, texts, self.name, trial.tokenizer)
        if trial.here and settings.bf16 and not has_bfloat16():
            lines.append(f"warning: {key}: {NO_BFLOAT16}leave it out.")
        self.beside = training_disk(network, settings)
        add_stage(model, StageRecord(stage=settings.trained()[0]))
        model.save_pretrained(self.before)
        self.before.rename(self.output)
        return lines

    def _check_memory(self, network: Any, trial: Trial) -> None:
        """Refuses a training of more memory than there is here; what an encoder-decoder takes is not known."""
        split = self.settings.distributed_config or self.settings.deepspeed
        if not trial.here or split or network.config.is_encoder_decoder:
            return
        least, most = least_memory(network, self.settings), memory_of_all()
        if most and least > most:
            raise InputError(
                f"takes at least {readable_size(least)} of memory, but {readable_size(most)} are here: lower "
                "per_device_train_batch_size or block_size, or take a smaller base. To check a recipe for another "
                "machine: validate --offline."
            )

    def work(self) -> StepResult:
        recipe = self.run.recipe
        with errors_at(self.stage.key):
            train_stage(
                self.before, self.output, self._texts(), self.settings, recipe.seed,
                allow_lost_text=recipe.allow_lost_text,
            )  # fmt: skip
        return self.finish()

    def finish(self) -> StepResult:
        if not PartialState().is_main_process:
            return StepResult("")
        remove_training(self.output)  # an interruption may have come between the output and its removal
        record = Facts(load_config(self.output)).history.last.stages[-1]
        frozen = check_frozen(self.before, self.output, record.stage)
        return StepResult(f"{record.steps} steps; {frozen} frozen tensors are byte-identical", {"frozen": frozen})
