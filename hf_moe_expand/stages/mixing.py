"""Stages whose languages may be sampled with a temperature or scheduled by a curriculum."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ..data.packing import PackedText
from ..recipe_paths import Place
from ..schema import Count, Number
from ..trainers.samplers import LanguageMix
from .base import TrainingStage
from .checks import is_mixed, read_curriculum
from .config import setting


@dataclass
class MixedConfig(TrainingStage):
    """Fields of the stages whose languages may be weighted or scheduled."""

    tokens_per_language: Count | None = setting(None, "tokens of each language to train on; all of its text by default")
    curriculum: Place | None = setting(None, "file with the step at which each language enters")
    temperature: Annotated[Number, Field(gt=0)] = setting(
        1.0,
        "languages are drawn in proportion to `blocks ** (1 / temperature)`: 1 keeps the data's proportions, higher is "
        "more uniform",
    )

    def block_groups(self, texts: Iterable[str], model_config: Any) -> list[list[str]] | None:
        return [[code] for code in texts] if is_mixed(self) else None

    def mix(self, packed: PackedText, model_config: Any) -> LanguageMix | None:
        if not is_mixed(self):
            return None
        languages = [code for code in packed.languages if code in packed.tokens]
        curriculum = read_curriculum(self, languages)
        entry = None if curriculum is None else [curriculum.entry[code] for code in languages]
        return LanguageMix(packed.blocks, self.temperature, entry, self.groups_of_languages(languages, model_config))

    def groups_of_languages(self, languages: Sequence[str], model_config: Any) -> list[int] | None:
        """The group of each language, if a batch must hold only one group."""
        return None
