"""What a method's function is given, and what it gives: numbers in, numbers out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError
from ...results import DeviationResult, SimilarityResult


@dataclass(frozen=True)
class Target:
    """The model that a plan is for.

    Attributes:
        num_layers: its layers.
        seed: of every random choice.
        measured_similarity, measured_deviation: analyses of it; None for one that was not made.
        grows_from: experts of each layer of an expanded model; empty for a dense one.
    """

    num_layers: int
    seed: int = 0
    measured_similarity: SimilarityResult | None = None
    measured_deviation: DeviationResult | None = None
    grows_from: Sequence[int] = ()

    @property
    def least(self) -> int:
        """Least experts that a layer is given: expert 0 and a new one; of an expanded model one new one."""
        return 1 if self.grows_from else 2

    @property
    def similarity(self) -> SimilarityResult:
        """How alike the languages are in each layer.

        Raises:
            InputError: it was not measured.
        """
        if self.measured_similarity is None:
            raise InputError("The plan needs an analysis of the languages' similarity: run `analyze similarity` first.")
        return self.measured_similarity

    @property
    def deviation(self) -> DeviationResult:
        """How far each language moves each layer.

        Raises:
            InputError: it was not measured.
        """
        if self.measured_deviation is None:
            raise InputError("The plan needs the deviation of each layer: run `analyze deviation` first.")
        return self.measured_deviation


@dataclass(frozen=True)
class Allocation:
    """What a method decides.

    Attributes:
        counts: experts of each layer, expert 0 counted; for a model that grows, new experts alone.
        details: what the counts were made from; they become the plan's `settings`.
        groups: the languages of each expert, of a method that makes a DMoE model.
        drawn: whether the seed decided anything.
    """

    counts: list[int]
    details: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Sequence[str]] = ()
    drawn: bool = False


def check_total(total: int, num_layers: int, minimum: int) -> None:
    """Checks that a total gives every layer its minimum.

    Raises:
        InputError: it is too small.
    """
    if total < num_layers * minimum:
        raise InputError(
            f"{total} experts in total are too few: {num_layers} layers with at least {minimum} each (the original FFN "
            f"counts as one) need {num_layers * minimum} or more."
        )
