"""Decides when each language enters training: the curricula of Elbayad et al. (2022, section 3.4), from numbers alone.

Languages with little text over-fit when they train from the start, so they enter late.
"""

from collections.abc import Collection, Mapping, Sequence
from math import inf, isfinite
from typing import Any

from ..core.errors import InputError
from ..core.schema import Count, Text, Whole
from ..planning.results import JsonFile

# Defaults of the count-based curriculum, as in the paper: the minimum of examples for each bin but the last, and the
# share of the training steps in which each bin trains (k = 100k, 40k and 20k of U = 100k steps).
THRESHOLDS = (5_000_000, 800_000)
SHARES = (1.0, 0.4, 0.2)


class Curriculum(JsonFile):
    """The step at which each language enters training.

    Attributes:
        steps: number of training steps (U).
        entry: the step at which each language enters; 0 is the start.

    Raises:
        InputError: `steps` is below 1, an entry is outside the training, or no language enters at the start.
    """

    kind = "a curriculum"

    steps: Count
    entry: dict[Text, Whole]

    def model_post_init(self, _: Any) -> None:
        for language, step in self.entry.items():
            if not 0 <= step < self.steps:
                raise InputError(
                    f"curriculum: {language!r} enters at step {step!r}, but the training has only the steps 0 to "
                    f"{self.steps - 1}."
                )
        if 0 not in self.entry.values():
            raise InputError("curriculum: no language trains from the start: let one enter at step 0.")

    def check_languages(self, languages: Collection[str]) -> None:
        """Refuses a curriculum that names a language that does not train, or lacks one that does."""
        if unknown := sorted(set(self.entry) - set(languages)):
            raise InputError(f"curriculum: {', '.join(unknown)} does not train here; known: {', '.join(languages)}.")
        if missing := [code for code in languages if code not in self.entry]:
            raise InputError(f"curriculum: the step at which {', '.join(missing)} enters is missing; 0 is the start.")


def count_based(
    counts: Mapping[str, float], steps: int, thresholds: Sequence[float] = THRESHOLDS, shares: Sequence[float] = SHARES
) -> Curriculum:
    """Groups languages by their amount of text: bin `i` enters at step `U - k_i`, `k_i = shares[i] * U`.

    The first bin that holds a language trains from the start, whatever its share.

    Args:
        counts: examples (such as documents) of each language.
        steps: U, the training steps.
        thresholds: minimum of examples for each bin but the last, from large to small.
        shares: share of the training steps for each bin, from large to small; one more than thresholds.
    """
    if len(shares) != len(thresholds) + 1:
        raise InputError(
            f"{len(thresholds)} thresholds make {len(thresholds) + 1} bins, but {len(shares)} shares were given."
        )
    for language, count in counts.items():
        if not 0 <= count < inf:
            raise InputError(f"{language!r} has {count:g} examples: the number must be at least 0.")
    for name, values, fits in (("thresholds", thresholds, isfinite), ("shares", shares, lambda share: 0 < share <= 1)):
        if list(values) != sorted(values, reverse=True) or not all(map(fits, values)):
            given, bounds = ", ".join(f"{value:g}" for value in values), " above 0 and at most 1" * (values is shares)
            raise InputError(f"{name} {given}: must be finite numbers{bounds}, from large to small.")
    bins: list[list[str]] = [[] for _ in shares]
    for language, count in counts.items():
        bins[next((i for i, least in enumerate(thresholds) if count >= least), len(thresholds))].append(language)
    return _curriculum(bins, [share * steps for share in shares], steps)


def step_based(
    best_steps: Mapping[str, int], bins: int, steps: int, merge_first: int = 1, new_steps: int | None = None
) -> Curriculum:
    """Groups languages by the step of a first run at which they began to over-fit (Elbayad et al. Algorithm 1).

    The `bins` characteristic steps are `k_i = s_max - (i - 1) (s_max - s_min) / (bins - 1)`. Each language joins the
    bin whose `k_i` is nearest to its best step (on a tie, the larger `k_i`), and enters at step `U - k_i`. The first
    bin trains from the start even if `k_1 = s_max` is less than U, since no other language would train before it.

    Args:
        best_steps: the step with the best validation loss of each language (the last of several).
        bins: number of bins (n).
        steps: steps of the first run (U).
        merge_first: number of first bins to merge into one, with the characteristic step of the first; the paper
            merges 3 of 5.
        new_steps: steps of the next training, if not U; all steps are scaled to it.
    """
    if not best_steps:
        raise InputError("No language has a best step.")
    if bins < 1 or not 1 <= merge_first <= bins:
        raise InputError(
            f"bins is {bins} and merge_first is {merge_first}: both must be at least 1, and merge_first at most bins."
        )
    for language, step in best_steps.items():
        if not 1 <= step <= steps:
            raise InputError(f"The best step of {language!r} is {step}, but the run had only the steps 1 to {steps}.")
    largest, smallest = max(best_steps.values()), min(best_steps.values())
    gaps = max(bins - 1, 1)
    scaled = [gaps * largest - i * (largest - smallest) for i in range(bins)]  # k_i times gaps, which are integers
    members: list[list[str]] = [[] for _ in range(bins)]
    for language, step in best_steps.items():
        members[min(range(bins), key=lambda i: abs(gaps * step - scaled[i]))].append(language)
    merged = [[code for group in members[:merge_first] for code in group], *members[merge_first:]]
    merged_steps = [scaled[0], *scaled[merge_first:]]
    new_steps = steps if new_steps is None else new_steps
    return _curriculum(merged, [k * new_steps / steps / gaps for k in merged_steps], new_steps)


def _curriculum(bins: Sequence[Sequence[str]], trained_steps: Sequence[float], steps: int) -> Curriculum:
    """Bin `i` enters at step `U - k_i`, at the latest at the last step; the first bin with a language enters at 0."""
    entry: dict[str, int] = {}
    for languages, k in zip(bins, trained_steps, strict=True):
        entry |= dict.fromkeys(languages, steps - max(1, round(k)) if entry else 0)
    return Curriculum(steps=steps, entry=entry)
