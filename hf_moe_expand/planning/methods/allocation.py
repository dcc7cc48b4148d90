"""Argument and result of a method's function: the target model and the allocation of experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InputError
from ...results import DeviationResult, SeparabilityResult, SimilarityResult


@dataclass(frozen=True)
class Target:
    """The model that a plan is for.

    Attributes:
        num_layers: number of its layers.
        seed: random seed of all choices.
        measured_similarity, measured_deviation, measured_separability: its analyses; None for an analysis that was not
            made.
        grows_from: experts of each layer of an expanded model; empty for a dense one.
    """

    num_layers: int
    seed: int = 0
    measured_similarity: SimilarityResult | None = None
    measured_deviation: DeviationResult | None = None
    grows_from: Sequence[int] = ()
    measured_separability: SeparabilityResult | None = None

    @property
    def least(self) -> int:
        """Minimum of experts in a layer: 2, expert 0 and a new one; 1, a new one, for an expanded model."""
        return 1 if self.grows_from else 2

    @property
    def similarity(self) -> SimilarityResult:
        """The similarity of the languages in each layer.

        Raises:
            InputError: the similarity was not measured.
        """
        if self.measured_similarity is None:
            raise InputError("The plan needs an analysis of the languages' similarity: run `analyze similarity` first.")
        return self.measured_similarity

    @property
    def deviation(self) -> DeviationResult:
        """The deviation of each layer.

        Raises:
            InputError: the deviation was not measured.
        """
        if self.measured_deviation is None:
            raise InputError("The plan needs the deviation of each layer: run `analyze deviation` first.")
        return self.measured_deviation

    @property
    def separability(self) -> SeparabilityResult:
        """How well each layer tells old text from new.

        Raises:
            InputError: the separability was not measured.
        """
        if self.measured_separability is None:
            raise InputError("The plan needs the separability of old and new text: run `analyze separability` first.")
        return self.measured_separability


@dataclass(frozen=True)
class Allocation:
    """The result of a method.

    Attributes:
        counts: experts of each layer, expert 0 counted; only new experts for a model that grows.
        details: inputs of the counts, which become the plan's `settings`.
        groups: the languages of each expert, if the method makes a DMoE model.
        drawn: whether the result depends on the seed.
    """

    counts: list[int]
    details: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Sequence[str]] = ()
    drawn: bool = False


def check_total(total: int, num_layers: int, minimum: int, others: int = 0) -> None:
    """Checks that a total gives every layer its minimum.

    Args:
        others: the experts that the total counts in layers that stay dense.

    Raises:
        InputError: the total is too small.
    """
    if total < num_layers * minimum + others:
        dense = f", and {others} of dense layers," if others else ""
        raise InputError(
            f"{total} experts in total are too few: {num_layers} layers with at least {minimum} each (the original FFN "
            f"counts as one){dense} need {num_layers * minimum + others} or more."
        )
