"""The steps that work on an expanded checkpoint: a training stage, a graft, or an average of experts."""

import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ..checkpoint.graft import check_fine_tune, graft_delta
from ..checkpoint.merge import average_experts
from ..checkpoint.source import load_config
from ..data.packing import NEW_PER_OLD, review_documents
from ..data.sources import LanguageText
from ..disk import StepOutput
from ..errors import InputError, errors_at
from ..evaluation.validation import validation_sources
from ..forecast import forecast, tokens_at_hand, training_disk
from ..memory import device_memory
from ..models import longest_block
from ..recipe_paths import unset_variable
from ..records import History
from ..self_written import SelfWrittenText
from ..stages.base import Stage, TrainingStage
from ..stages.checks import StageFacts
from ..stages.resume import remove_training
from ..stages.run import check_frozen, train_stage
from ..trainers.router_losses import CHECKPOINTING
from .base import Checks, RunStep, StepResult, check_pairs, contents

# The training arguments on which memory, time and the size of the training checkpoints depend.
_OF_COSTS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs", "save_strategy",
    "save_steps", "save_total_limit", "optim", "distributed_config",
)  # fmt: skip
# Steps that are done again without much loss.
_FEW_STEPS = 100


@dataclass
class StageStep(RunStep):
    """A step that runs a stage on the checkpoint `before`."""

    stage: type[Stage]
    settings: Any
    before: Path

    def __post_init__(self) -> None:
        self.title = self.writes = self.stage.key  # type: ignore[misc]
        super().__post_init__()

    def _texts(self) -> dict[str, LanguageText]:
        """The text that the stage reads."""
        codes = self.stage.languages(self.settings, self.run.old, self.run.new)
        return {code: self.run.sources[code] for code in dict.fromkeys(codes)}

    def inputs(self) -> dict[str, Any]:
        return {self.stage.key: self.settings.model_dump()}

    def check(self, checks: Checks) -> None:
        if checks.network is not None:
            checks.written.append(StepOutput(self.output, checks.checkpoint_bytes, self._working(checks)))

    def _working(self, checks: Checks) -> int:
        """The most bytes of the files beside the output while the stage runs."""
        return 0


class TrainStep(StageStep):
    """A step that runs a training stage."""

    every_rank = True
    stage: type[TrainingStage]

    def inputs(self) -> dict[str, Any]:
        return {**super().inputs(), "texts": contents(self._texts())}

    def check(self, checks: Checks) -> None:
        recipe, model = checks.recipe, checks.config
        facts = StageFacts(
            self.run.old, self.run.new, list(self._texts()), recipe.all_expansions[0].expand.conditional_routing,
            None if model is None else longest_block(model), None if model is None else bool(model.is_encoder_decoder),
            key=self.stage.key, offline=checks.offline,
        )  # fmt: skip
        self._on_this_machine(facts).config(self.output, recipe.seed, self.stage.key).check(facts)
        checks.lines += facts.skipped
        super().check(checks)
        self._check_held_out_pairs(checks)
        if not checks.offline and getattr(self.settings, "old_documents", None) is not None:
            self._check_documents(checks)
        if checks.network is not None and not checks.config.is_encoder_decoder:
            self._estimate(checks)

    def _on_this_machine(self, facts: StageFacts) -> Any:
        """The settings without the arguments that only the machine that trains can check."""
        training = dict(self.settings.training)
        if not torch.accelerator.is_available():
            training.pop("tf32", None)
        launcher = training.get("deepspeed")
        if facts.offline and isinstance(launcher, str) and not Path(launcher).is_file():
            facts.skipped.append(f"skipped: {facts.key}: training.deepspeed: {launcher} is not on this machine")
            del training["deepspeed"]
        return self.settings.model_copy(update={"training": training})

    def _estimate(self, checks: Checks) -> None:
        """Says the forecast of the stage on this machine."""
        training, config = self.settings.training, self._costs(checks)
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = next((mixed[name] for name in mixed if training.get(name)), torch.float32)
        tokens: dict[str, int | None] = {}
        for code, source in ({} if checks.offline else self._texts()).items():
            if isinstance(source, SelfWrittenText):
                tokens[code] = source.tokens_to_come
            else:
                tokens[code] = tokens_at_hand(source, checks.tokenizer)
        if training.get("save_strategy") == "no" and not 0 < config.max_steps <= _FEW_STEPS:
            checks.lines.append(f'{self.name}: save_strategy is "no": after an interruption the stage starts anew')
        found = forecast(checks.network, config, tokens, dtype, bool(training.get(CHECKPOINTING)))
        if training.get("distributed_config") or training.get("deepspeed"):
            found = replace(found, memory=None)  # which is shared out
        checks.lines.append(f"{self.name}: {found.words(device_memory())}")

    def _check_held_out_pairs(self, checks: Checks) -> None:
        """Refuses held-out text of an encoder-decoder that is no sentence pairs of its languages."""
        validation = getattr(self.settings, "validation", None)
        if validation is None or checks.config is None or not checks.config.is_encoder_decoder:
            return
        for code, source in validation_sources(validation).items():
            if not (checks.offline and unset_variable(source.source)):
                with errors_at(f"{self.stage.key}.validation.texts.{code}"):
                    check_pairs(source, checks)

    def _costs(self, checks: Checks) -> Any:
        """The stage's configuration without the arguments that cost nothing, which another machine may refuse."""
        relevant = {name: value for name, value in self.settings.training.items() if name in _OF_COSTS}
        return self.settings.model_copy(update={"training": relevant}).config(self.output, checks.recipe.seed)

    def _working(self, checks: Checks) -> int:
        return training_disk(self._costs(checks), checks.network)

    def _check_documents(self, checks: Checks) -> None:
        """Refuses local text with fewer documents than the review needs, before stage 1 trains for days; says how many
        it takes if the settings allow fewer."""
        review, old, new = self.settings, self.run.old, self.run.new
        wanted = dict.fromkeys(old, review.old_documents)
        each = review.new_per_old or NEW_PER_OLD
        wanted |= dict.fromkeys(new, max(1, round(review.old_documents * each)))
        available = {code: _count(self.run.sources[code], count) for code, count in wanted.items()}
        written = checks.recipe.self_written
        if written is not None and written.documents < review.old_documents and not review.fewer_documents:
            raise InputError(
                f"self_written.documents is {written.documents}, but `{self.stage.key}` takes "
                f"{review.old_documents} documents of each old language (old_documents): raise the one or lower the "
                "other."
            )
        taken = review_documents(available, old, new, review.old_documents, each, review.fewer_documents)
        if taken != wanted:
            counts = ", ".join(f"{count:,} of {wanted[code]:,} in {code}" for code, count in taken.items())
            checks.lines.append(f"{self.name}: fewer documents than asked for: {counts}")

    def work(self) -> StepResult:
        recipe = self.run.recipe
        config = self.settings.config(self.output, recipe.seed)
        train_stage(self.before, self.output, self._texts(), config, None, False, recipe.allow_lost_text)
        return self.finish()

    def finish(self) -> StepResult:
        if not PartialState().is_main_process:
            return StepResult("")
        remove_training(self.output)  # an interruption may have come between the output and its removal
        record = History.of(load_config(self.output)).last.stages[-1]
        frozen = check_frozen(self.before, self.output, record.stage)
        return StepResult(f"{record.steps} steps; {frozen} frozen tensors are byte-identical", {"frozen": frozen})


class GraftStep(StageStep):
    """A step that runs DeltaMoE's graft."""

    def check(self, checks: Checks) -> None:
        recipe, instruct = checks.recipe, self.settings.instruct
        if checks.offline:
            checks.lines.append(f"skipped: whether {instruct} is a fine-tune of {recipe.base}")
        else:
            check_fine_tune(recipe.base, instruct, self.settings.keep_tokenizer, recipe.revision)
            checks.lines.append(f"graft: {instruct}, of the base's shapes")
        super().check(checks)

    def work(self) -> StepResult:
        recipe, settings = self.run.recipe, self.settings
        report = graft_delta(
            self.before, self.output, recipe.base, settings.instruct, scale=settings.scale,
            keep_tokenizer=settings.keep_tokenizer, revision=recipe.revision,
            max_shard_size=self.run.expansion.expand.max_shard_size, overwrite=True,
        )  # fmt: skip
        return StepResult(f"base and instruct have a cosine of {report.instruct_cosine:.4f}")


class AverageStep(StageStep):
    """A step that averages new experts with the FFNs that they copied."""

    def check(self, checks: Checks) -> None:
        expand = self.run.expansion.expand
        if expand.expert_init == "random" and expand.expert_kind == "ffn":
            raise InputError(
                "average: averages experts with the FFNs that they copied, but expand.expert_init is 'random': leave "
                "`average` out, or take 'copy'."
            )
        if self.run.number > 1 and expand.copy_from != 0 and expand.expert_kind != "ffn":
            raise InputError(
                f"average: expand.copy_from is {expand.copy_from!r}, but LoRA and added experts are averaged with "
                "expert 0 alone: leave `average` or `copy_from` out."
            )
        super().check(checks)

    def work(self) -> StepResult:
        weight, size = self.settings.weight, self.run.expansion.expand.max_shard_size
        average_experts(self.before, self.output, weight, max_shard_size=size, overwrite=True)
        return StepResult(f"{weight:g} of each new expert, {1 - weight:g} of the FFN that it copied")


def _count(source: LanguageText, most: int) -> int:
    """Counts documents of a source up to `most`; text on the hub is assumed to be enough."""
    if isinstance(source, SelfWrittenText):
        return min(source.documents_to_come, most)
    return sum(1 for _ in islice(source.documents(), min(most, sys.maxsize))) if source.files() else most
