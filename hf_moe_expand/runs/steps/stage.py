"""The steps that run a stage on an expanded checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate import PartialState

from ...checkpoint.facts import Facts
from ...checkpoint.source import load_config
from ...core.disk import StepOutput, readable_size
from ...core.errors import InputError, errors_at
from ...data.held_out import check_held_out
from ...data.sources import LanguageText, contents
from ...evaluation.validation import validation_sources
from ...inference.memory import least_memory, memory_of_all, training_disk
from ...stages.base import Stage
from ...stages.config import StageConfig
from ...stages.outlook import Found, Outlook, StepResult
from ...stages.prepare import prepare
from ...stages.resume import remove_training
from ...stages.run import check_frozen, train_stage
from ...trainers.bfloat16 import NO_BFLOAT16, has_bfloat16
from .base import RunStep, digest_of


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

    def check(self, outlook: Outlook) -> Found:
        return self._found(outlook, self.stage.preview(self.settings, self.run, outlook))

    def _found(self, outlook: Outlook, lines: list[str], working: int = 0) -> Found:
        """`working`: the most bytes of the files beside the output while the stage runs."""
        if outlook.network is None:
            return Found(outlook, lines)
        return Found(outlook, lines, [StepOutput(self.output, outlook.checkpoint_bytes, working)])

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

    def check(self, outlook: Outlook) -> Found:
        settings, key, network = self.settings, self.stage.key, outlook.network
        texts = dict.fromkeys(self._texts()) if outlook.offline else self._texts()
        model = self._unknown_model() if network is None else network.config
        prepared = prepare(settings, model, texts, key, outlook.offline, outlook.tokenizer)
        lines = list(prepared.lines)
        if network is None:
            return self._found(outlook, lines)
        if not outlook.offline:
            with errors_at(key):
                prepared.check_enough(outlook.tokenizer)
            if validation := getattr(settings, "validation", None):
                tests = {f"{key}.validation.texts.{c}": text for c, text in validation_sources(validation).items()}
                lines += check_held_out(tests, self._texts(), bool(model.is_encoder_decoder))
        if not model.is_encoder_decoder:
            split = settings.distributed_config or settings.deepspeed
            least, most = least_memory(network, settings), memory_of_all()
            if outlook.here and not split and most and least > most:
                raise InputError(
                    f"{key}: takes at least {readable_size(least)} of memory, but {readable_size(most)} are here: "
                    "lower per_device_train_batch_size or block_size, or take a smaller base. To check a recipe for "
                    "another machine: validate --offline."
                )
            lines += prepared.length(self.name, outlook.tokenizer)
        if outlook.here and settings.bf16 and not has_bfloat16():
            lines.append(f"warning: {key}: {NO_BFLOAT16}leave it out.")
        return self._found(outlook, lines, training_disk(network, settings))

    def _unknown_model(self) -> Any:
        """What is known of the model where the base is not at hand."""
        run = self.run
        model = SimpleNamespace(
            expansions=[record.to_dict() for record in run.history.expansions], is_encoder_decoder=None,
            conditional_routing=run.recipe.all_expansions[0].expand.conditional_routing,
            exclusive_experts=getattr(run.expansion.plan, "exclusive", False),
        )  # fmt: skip
        model.get_text_config = lambda decoder: model
        return model

    def work(self) -> StepResult:
        recipe = self.run.recipe
        config = self.settings.built(self.output, recipe.seed, self.stage.key)
        train_stage(self.before, self.output, self._texts(), config, allow_lost_text=recipe.allow_lost_text)
        return self.finish()

    def finish(self) -> StepResult:
        if not PartialState().is_main_process:
            return StepResult("")
        remove_training(self.output)  # an interruption may have come between the output and its removal
        record = Facts(load_config(self.output)).history.last.stages[-1]
        frozen = check_frozen(self.before, self.output, record.stage)
        return StepResult(f"{record.steps} steps; {frozen} frozen tensors are byte-identical", {"frozen": frozen})
