"""The kinds of new experts, by their settings.

`ffn` are FFNs of the backbone's class, `lora` expert 0 with low-rank updates on its linear layers, and `added` expert 0
with a small FFN beside it, which a base that is a mixture of experts takes too.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True)
class ExpertKind:
    """FFNs of the backbone's class, copies of expert 0 at first.

    Attributes:
        name: `expert_kind` in a configuration.
        names: fields of a configuration, one for each field of the kind.
        has_ffn: whether the experts are FFNs of the backbone's own; else they have tensors that no dense model has.
    """

    name: ClassVar[str] = "ffn"
    names: ClassVar[tuple[str, ...]] = ()
    has_ffn: ClassVar[bool] = True

    @classmethod
    def of(cls, config: Any) -> "ExpertKind":
        """The kind with the settings of a configuration."""
        return cls(*(getattr(config, name) for name in cls.names))

    @property
    def settings(self) -> list[float] | None:
        """Its settings as a list; None if it has none."""
        return list(astuple(self)) or None

    @property
    def words(self) -> str:
        """The kind of the experts, in words."""
        return "FFNs"

    def problem(self) -> str | None:
        """Why its settings do not fit; None if they do."""
        return None


@dataclass(frozen=True)
class LoraKind(ExpertKind):
    """Expert 0 with updates of rank `rank`, which are scaled by `alpha / rank`."""

    rank: int
    alpha: float
    name: ClassVar[str] = "lora"
    names: ClassVar[tuple[str, ...]] = ("lora_rank", "lora_alpha")
    has_ffn: ClassVar[bool] = False

    @property
    def words(self) -> str:
        return f"expert 0 with updates of rank {self.rank}, alpha {self.alpha:g}"

    def problem(self) -> str | None:
        if (self.rank or 0) >= 1 and (self.alpha or 0) > 0:
            return None
        return (
            f"lora_rank is {self.rank} and lora_alpha {self.alpha}: LoRA experts need a rank of at least 1 and an "
            "alpha above 0."
        )


@dataclass(frozen=True)
class AddedKind(ExpertKind):
    """Expert 0 and an FFN of width `width` beside it."""

    width: int
    name: ClassVar[str] = "added"
    names: ClassVar[tuple[str, ...]] = ("expert_width",)
    has_ffn: ClassVar[bool] = False

    @property
    def words(self) -> str:
        return f"expert 0 with an added FFN of width {self.width}"

    def problem(self) -> str | None:
        if (self.width or 0) >= 1:
            return None
        return f"expert_width is {self.width}: added experts need a width of at least 1."


KINDS: dict[str, type[ExpertKind]] = {kind.name: kind for kind in (ExpertKind, LoraKind, AddedKind)}


def kind_of_settings(settings: Sequence[float] | None) -> ExpertKind:
    """The kind with these settings, as in `updates_of_packs`: rank and alpha, a width, or None for FFNs.

    Raises:
        ValueError: no kind has so many settings, or their values do not fit.
    """
    numbers = list(settings or [])
    for kind in KINDS.values():
        if len(fields(kind)) == len(numbers):
            made = kind(*([int(numbers[0]), *numbers[1:]] if numbers else []))
            if problem := made.problem():
                raise ValueError(problem)
            return made
    raise ValueError(f"{numbers} are settings of no kind of experts: known are rank and alpha, or a width.")
