"""The steps that run a stage on an expanded checkpoint."""

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
from ...data.sources import contents
from ...evaluation.validation import validation_sources
from ...inference.memory import least_memory, memory_of_all, training_disk
from ...stages.config import StageConfig
from ...stages.kind import Stage, StepResult, Trial
from ...stages.prepare import check_enough, length
from ...stages.resume import remove_training
from ...stages.run import check_frozen, train_stage
from ...trainers.bfloat16 import NO_BFLOAT16, has_bfloat16
from .step import ExpansionRun, Step, digest_of


def stage_step(run: ExpansionRun, stage: type[Stage], settings: Any, before: Path) -> Step:
    """Runs a stage on the checkpoint `before`."""
    if isinstance(settings, StageConfig):
        return _train_step(run, settings, before)
    key, out = stage.key, run.folder / stage.key

    def inputs() -> dict[str, Any]:
        return {key: settings.model_dump(), **stage.inputs(settings, run)}

    def check(trial: Trial) -> list[str]:
        with errors_at(key):
            return [f"{key}: {line}" for line in stage.attempt(settings, run, before, out, trial)]

    return run.step(key, key, inputs, lambda: stage.work(settings, run, before, out), check, before=before)


def _train_step(run: ExpansionRun, settings: StageConfig, before: Path) -> Step:
    key, recipe, out = settings.key, run.recipe, run.folder / settings.key
    codes = dict.fromkeys(settings.languages(settings, run.old, run.new))
    texts = {code: run.sources[code] for code in codes}

    def inputs() -> dict[str, Any]:
        schedule = digest_of(getattr(settings, "curriculum", None))
        return {**schedule, key: settings.keywords(), "texts": contents(texts)}

    def check(trial: Trial) -> list[str]:
        """Checks the stage with its model and its text; of its training the model's history gets the name alone."""
        read: Any = dict.fromkeys(texts) if trial.offline else texts
        with errors_at(key):
            model = settings.load_config(before)
            said = settings.check(model, read, offline=trial.offline, tokenizer=trial.tokenizer)
            if not trial.offline:
                check_enough(settings, model, read, trial.tokenizer)
            network = network_of(model)
            if trial.here:
                _check_memory(settings, network)
        lines = [f"{key}: {line}" for line in said]
        validation = getattr(settings, "validation", None)
        if validation and not trial.offline:
            tests = {f"{key}.validation.texts.{code}": text for code, text in validation_sources(validation).items()}
            lines += check_held_out(tests, read, bool(model.is_encoder_decoder))
        if not model.is_encoder_decoder:
            lines += length(settings, model, read, run.named(key), trial.tokenizer)
        if trial.here and settings.bf16 and not has_bfloat16():
            lines.append(f"warning: {key}: {NO_BFLOAT16}leave it out.")
        trial.beside[run.named(key)] = training_disk(network, settings)
        add_stage(model, StageRecord(stage=settings.trained()[0]))
        model.save_pretrained(before)
        before.rename(out)
        return lines

    def work() -> StepResult:
        if not out.exists():  # else an interruption came between the output and its record
            with errors_at(key):
                train_stage(before, out, texts, settings, recipe.seed, allow_lost_text=recipe.allow_lost_text)
        if not PartialState().is_main_process:
            return StepResult("")
        remove_training(out)
        record = Facts(load_config(out)).history.last.stages[-1]
        frozen = check_frozen(before, out, settings)
        return StepResult(f"{record.steps} steps; {frozen} frozen tensors are byte-identical", {"frozen": frozen})

    return run.step(key, key, inputs, work, check, before=before, every_rank=True)


def _check_memory(settings: StageConfig, network: Any) -> None:
    """Refuses a training of more memory than there is here; what an encoder-decoder takes is not known."""
    if settings.distributed_config or settings.deepspeed or network.config.is_encoder_decoder:
        return
    least, most = least_memory(network, settings), memory_of_all()
    if most and least > most:
        raise InputError(
            f"takes at least {readable_size(least)} of memory, but {readable_size(most)} are here: lower "
            "per_device_train_batch_size or block_size, or take a smaller base. To check a recipe for another machine: "
            "validate --offline."
        )
