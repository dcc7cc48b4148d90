"""Stages whose languages may be sampled with a temperature or scheduled by a curriculum."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ..core.errors import InputError, errors_at
from ..core.recipe_paths import Place
from ..core.schema import Count, Number
from ..data.curriculum import Curriculum
from ..data.packing import PackedText
from ..trainers.masking import Masking
from ..trainers.samplers import LanguageMix
from .config import StageConfig
from .keywords import setting

REFUSED = {
    ("exclusive", "masking"): "exclusive experts take the tokens of their languages alone: there is no choice to mask, "
    "and no router that a loss could train",
}


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


@dataclass
class MixedConfig(StageConfig):
    """Fields of the stages whose languages may be weighted or scheduled."""

    tokens_per_language: Count | None = setting(None, "tokens of each language to train on; all of its text by default")
    curriculum: Place | None = setting(None, "file with the step at which each language enters")
    temperature: Annotated[Number, Field(gt=0)] = setting(
        1.0,
        "languages are drawn in proportion to `blocks ** (1 / temperature)`: 1 keeps the data's proportions, higher is "
        "more uniform",
    )

    def check_exclusive(self, model: Any, *losses: str) -> None:
        """Refuses what exclusive experts have no use for: masking, and the coefficients of these losses of routers."""
        chosen = [name for name in ("masking", *losses) if getattr(self, name) not in (0, Masking())]
        if chosen and getattr(model, "exclusive_experts", False):
            raise InputError(f"{REFUSED['exclusive', 'masking']}: leave {' and '.join(chosen)} out.")

    def block_groups(self, texts: Iterable[str], model_config: Any) -> list[list[str]] | None:
        return [[code] for code in texts] if is_mixed(self) else None

    def mix(self, packed: PackedText, model_config: Any) -> LanguageMix | None:
        if not is_mixed(self):
            return None
        languages = list(packed.tokens)
        if len(languages) != len(packed.blocks):
            each = ", ".join(f'["{code}"]' for code in languages)
            raise InputError(
                "A temperature or a curriculum draws each language on its own, but languages share blocks of the "
                f"packed text: pass groups=[{each}] to `pack_texts`."
            )
        curriculum = read_curriculum(self, languages)
        entry = None if curriculum is None else [curriculum.entry[code] for code in languages]
        return LanguageMix(packed.blocks, self.temperature, entry, self.groups_of_languages(languages, model_config))
