"""What is known of a stage before it trains, and the checks of its configuration that all stages share."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..data.curriculum import Curriculum
from ..errors import InputError, errors_at
from ..evaluation.validation import validation_sources
from ..recipe_paths import unset_variable


@dataclass(frozen=True)
class StageFacts:
    """What is known of a stage before it trains: from a recipe, or from a checkpoint and its text.

    Attributes:
        old, new: the languages before the last expansion, and those that it adds.
        texts: the languages with text.
        has_gates: whether the model has the gates of conditional routing.
        longest: number of positions that the model takes; None if it sets no limit, or is not known.
        is_encoder_decoder: whether the model is an encoder-decoder; None if unknown.
        model: the model's configuration; None before the recipe has made it.
        key: the stage's key in a recipe, which messages name; empty for a configuration of its own.
        offline: skip checks that need an absent file.
        skipped: one line for each skipped check.
    """

    old: Sequence[str]
    new: Sequence[str]
    texts: Collection[str]
    has_gates: bool = False
    longest: int | None = None
    is_encoder_decoder: bool | None = None
    model: Any = None
    key: str = ""
    offline: bool = False
    skipped: list[str] = field(default_factory=list)

    def key_of(self, name: str) -> str:
        """The name of a setting in messages."""
        return f"{self.key}.{name}" if self.key else name


def check_block_size(block_size: int, longest: int | None, where: str = "block_size") -> None:
    """Refuses blocks of more tokens than the model takes positions.

    Args:
        longest: number of positions that the model takes; None if it sets no limit.
        where: name of the setting in the message.
    """
    if longest is not None and block_size > longest:
        raise InputError(f"{where} is {block_size}, but the base takes {longest} positions: lower it.")


def check_mix(config: Any, facts: StageFacts) -> None:
    """Refuses wrong held-out text, and a temperature or curriculum that contradicts the languages or arguments."""
    validation = getattr(config, "validation", None)
    named_files = [*(validation.texts.values() if validation else ()), getattr(config, "curriculum", None)]
    if facts.offline and (unset := next(filter(None, map(unset_variable, filter(None, named_files))), None)):
        facts.skipped.append(f"skipped: {facts.key}: {unset} is not set")
        return
    for code, source in validation_sources(validation).items() if validation is not None else ():
        with errors_at(facts.key_of(f"validation.texts.{code}")):
            source.check()
    if not is_mixed(config):
        return
    where, training = facts.key_of("training"), config.chosen()
    accelerator = training.get("accelerator_config")
    if isinstance(accelerator, str):
        raise InputError(f"{where}.accelerator_config: must be a mapping with a curriculum or a temperature.")
    if training.get("ignore_data_skip") or (accelerator or {}).get("split_batches"):
        raise InputError(
            f"{where}: ignore_data_skip and split_batches cannot be used with a curriculum or a temperature, "
            "whose batches have an order; leave them out."
        )
    curriculum = read_curriculum(config, list(facts.texts))
    if curriculum is None:
        return
    if "num_train_epochs" in training or training.get("max_steps", curriculum.steps) != curriculum.steps:
        raise InputError(
            f"{config.curriculum} is for {curriculum.steps} steps, but {where} sets another length: leave "
            "max_steps and num_train_epochs out, or make the curriculum again with --steps."
        )


def is_mixed(config: Any) -> bool:
    """Whether a stage's languages are weighted or scheduled."""
    return getattr(config, "curriculum", None) is not None or getattr(config, "temperature", 1.0) != 1.0


def read_curriculum(config: Any, languages: Sequence[str]) -> Curriculum | None:
    """The curriculum that a stage's configuration names; refuses one for other languages than the stage's."""
    if getattr(config, "curriculum", None) is None:
        return None
    curriculum = Curriculum.load(config.curriculum)
    with errors_at(config.curriculum):
        curriculum.check_languages(languages)
    return curriculum
