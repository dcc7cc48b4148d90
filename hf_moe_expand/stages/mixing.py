"""Stages whose languages may be sampled with a temperature or scheduled by a curriculum."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..data.curriculum import Curriculum
from ..data.packing import PackedText
from ..errors import errors_at
from ..schema import Count, Number, Text
from ..trainers.curriculum_sampler import LanguageMix
from .base import TrainingStage
from .config import StageConfig, key


@dataclass
class MixedConfig(StageConfig):
    """Fields of the stages whose languages may be weighted or scheduled."""

    tokens_per_language: Count | None = key(None, "tokens of each language to train on; all of its text by default")
    curriculum: Text | None = key(None, "file with the step at which each language enters")
    temperature: Number = key(
        1.0,
        "languages are drawn in proportion to `blocks ** (1 / temperature)`: 1 keeps the data's proportions, higher is "
        "more uniform",
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


class MixingStage(TrainingStage):
    """A stage with the fields of `MixedConfig`."""

    def block_groups(self, texts: Iterable[str], model_config: Any, config: Any) -> list[list[str]] | None:
        return [[code] for code in texts] if is_mixed(config) else None

    def mix(self, packed: PackedText, model_config: Any, config: Any) -> LanguageMix | None:
        if not is_mixed(config):
            return None
        languages = [code for code in packed.languages if code in packed.tokens]
        curriculum = read_curriculum(config, languages)
        entry = None if curriculum is None else [curriculum.entry[code] for code in languages]
        return LanguageMix(packed.blocks, config.temperature, entry, self.groups_of_languages(languages, model_config))

    def groups_of_languages(self, languages: Sequence[str], model_config: Any) -> list[int] | None:
        """The group of each language, if a batch must hold only one group."""
        return None
