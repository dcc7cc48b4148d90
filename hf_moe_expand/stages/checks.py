"""What is known of a stage before anything runs, and the checks of its settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..data.curriculum import Curriculum
from ..errors import InputError, errors_at
from ..evaluation.validation import validation_sources
from ..recipe_paths import unset_variable
from ..trainers.masking import check_gates
from .arguments import check_label_smoothing, check_training_arguments


@dataclass(frozen=True)
class StageFacts:
    """The facts about a stage that are known before anything runs.

    Attributes:
        key: the stage's key in a recipe, which messages name; empty for settings in a file of their own.
        old, new: the languages before the expansion, and the languages that it adds.
        output: folder of the run.
        seed: random seed.
        has_gates: whether the model has the gates of conditional routing; None if unknown.
        longest: number of positions that the model takes; None if it sets no limit.
        is_encoder_decoder: whether the model is an encoder-decoder; None if unknown.
        base, revision: the dense model.
        offline: download nothing, and skip checks that need an absent file.
        skipped: one line for each skipped check.
    """

    key: str
    old: Sequence[str]
    new: Sequence[str]
    output: Path
    seed: int
    has_gates: bool = False
    longest: int | None = None
    is_encoder_decoder: bool | None = None
    base: str = ""
    revision: str | None = None
    offline: bool = False
    skipped: list[str] = field(default_factory=list)

    def key_of(self, name: str) -> str:
        """The name of a field of the settings in messages."""
        return f"{self.key}.{name}" if self.key else name


def check_block_size(block_size: int, longest: int | None, where: str = "block_size") -> None:
    """Refuses blocks of more tokens than the model takes positions.

    Args:
        longest: number of positions that the model takes; None if it sets no limit.
        where: name of the setting in the message.

    Raises:
        InputError: the blocks are too long.
    """
    if longest is not None and block_size > longest:
        raise InputError(f"{where} is {block_size}, but the base takes {longest} positions: lower it.")


def check_stage(stage: Any, settings: Any, facts: StageFacts) -> list[str]:
    """Checks training arguments, languages, curriculum and held-out text of a stage.

    Raises:
        InputError: one of them is wrong; the message names the key.
    """
    check_training_arguments(settings.training, facts.key_of("training"))
    check_label_smoothing(settings.training, facts.is_encoder_decoder, facts.key_of("training"))
    settings = _on_this_machine(settings, facts)
    settings.config(facts.output, facts.seed, facts.key)
    languages = list(dict.fromkeys(stage.languages(settings, facts.old, facts.new)))
    with errors_at(facts.key):
        stage.check_text(settings, languages, list(facts.old), list(facts.new))
    check_gates(stage.masking(settings), facts.has_gates, facts.key_of("masking"))
    check_block_size(settings.block_size, facts.longest, facts.key_of("block_size"))
    validation = getattr(settings, "validation", None)
    named_files = [*(validation.texts.values() if validation else ()), getattr(settings, "curriculum", None)]
    unset = next(filter(None, map(unset_variable, filter(None, named_files))), None)
    if facts.offline and unset:
        facts.skipped.append(f"skipped: {facts.key}: {unset} is not set")
    else:
        check_mix(settings, languages, facts.key)
    return []


def check_mix(settings: Any, languages: list[str], where: str = "") -> None:
    """Checks the settings of a stage, or its configuration, for held-out text, temperature and curriculum.

    Args:
        languages: languages on which the stage trains.
        where: prefix of the settings' names in messages.

    Raises:
        InputError: a setting is wrong, or contradicts the languages or the training arguments.
    """
    prefix = f"{where}." if where else ""
    validation = getattr(settings, "validation", None)
    for code, source in validation_sources(validation).items() if validation is not None else ():
        with errors_at(f"{prefix}validation.texts.{code}"):
            source.check()
    temperature = getattr(settings, "temperature", 1.0)
    if not temperature > 0:
        raise InputError(
            f"{prefix}temperature is {temperature:g}: must be larger than 0; 1 keeps the data's proportions."
        )
    if not is_mixed(settings):
        return
    training = _given(settings)
    accelerator = training.get("accelerator_config")
    if isinstance(accelerator, str):
        raise InputError(f"{prefix}training.accelerator_config: must be a mapping with a curriculum or a temperature.")
    if training.get("ignore_data_skip") or (accelerator or {}).get("split_batches"):
        raise InputError(
            f"{prefix}training: ignore_data_skip and split_batches cannot be used with a curriculum or a temperature, "
            "whose batches have an order; leave them out."
        )
    curriculum = read_curriculum(settings, languages)
    if curriculum is None:
        return
    if "num_train_epochs" in training or training.get("max_steps", curriculum.steps) != curriculum.steps:
        raise InputError(
            f"{settings.curriculum} is for {curriculum.steps} steps, but {prefix}training sets another length: leave "
            "max_steps and num_train_epochs out, or make the curriculum again with --steps."
        )


def is_mixed(config: Any) -> bool:
    """Whether a stage's languages are weighted or scheduled."""
    return getattr(config, "curriculum", None) is not None or getattr(config, "temperature", 1.0) != 1.0


def read_curriculum(config: Any, languages: Sequence[str]) -> Curriculum | None:
    """The curriculum that a stage's configuration names.

    Raises:
        InputError: the file is wrong, or its languages are not those on which the stage trains.
    """
    if getattr(config, "curriculum", None) is None:
        return None
    curriculum = Curriculum.load(config.curriculum)
    with errors_at(config.curriculum):
        curriculum.check_languages(languages)
    return curriculum


def _given(settings: Any) -> Mapping[str, Any]:
    """The training arguments that the user gave in settings or a configuration."""
    return settings.chosen() if hasattr(settings, "given") else settings.training


def _on_this_machine(settings: Any, facts: StageFacts) -> Any:
    """Settings without the arguments that only the machine that trains can check."""
    training = dict(settings.training)
    if not torch.accelerator.is_available():
        training.pop("tf32", None)  # refused without a GPU, but the checking machine may not be the one that trains
    launcher = training.get("deepspeed")
    if facts.offline and isinstance(launcher, str) and not Path(launcher).is_file():
        facts.skipped.append(f"skipped: {facts.key}: training.deepspeed: {launcher} is not on this machine")
        del training["deepspeed"]
    return settings.model_copy(update={"training": training})
