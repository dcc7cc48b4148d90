"""Stages whose languages may be sampled with a temperature or scheduled by a curriculum."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ..core.errors import InputError, errors_at
from ..core.recipe_paths import Located
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


@dataclass
class MixedConfig(StageConfig):
    """Fields of the stages whose languages may be weighted or scheduled."""

    tokens_per_language: Count | None = setting(None, "tokens of each language to train on; all of its text by default")
    curriculum: Located | None = setting(None, "file with the step at which each language enters")
    temperature: Annotated[Number, Field(gt=0)] = setting(
        1.0,
        "languages are drawn in proportion to `blocks ** (1 / temperature)`: 1 keeps the data's proportions, higher is "
        "more uniform",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_mixed(self) and (self.ignore_data_skip or self.accelerator_config.split_batches):  # type: ignore
            raise InputError(
                "ignore_data_skip, split_batches: a curriculum and a temperature have an order: leave them out."
            )

    def order(self, languages: Sequence[str]) -> Curriculum | None:
        """The curriculum; refuses one for other languages, or for another number of steps."""
        if self.curriculum is None:
            return None
        curriculum = Curriculum.load(self.curriculum)
        with errors_at(self.curriculum):
            curriculum.check_languages(languages)
        if self.num_train_epochs != 1 or self.max_steps not in (-1, curriculum.steps):
            raise InputError(f"{self.curriculum} is for {curriculum.steps} steps: leave other lengths out.")
        return curriculum

    def check_exclusive(self, model: Any, *losses: str) -> None:
        """Refuses masking, and coefficients of these losses of routers, with exclusive experts."""
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
                f"Languages share blocks, but are drawn on their own: pass groups=[{each}] to `pack_texts`."
            )
        curriculum = self.order(languages)
        entry = None if curriculum is None else [curriculum.entry[code] for code in languages]
        return LanguageMix(packed.blocks, self.temperature, entry, self.groups_of_languages(languages, model_config))
