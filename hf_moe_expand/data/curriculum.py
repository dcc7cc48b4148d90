"""When each language enters training: the curricula of Elbayad et al. (2022, section 3.4). Numbers in, numbers out.

Languages with little text over-fit when they train from the start, so they enter late.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..jsonfile import read_json, write_json
from ..schema import read

# Count-based, as in the paper: examples that put a language into each bin but the last, and the part of the training
# that each bin takes part in (k = 100k, 40k and 20k of U = 100k steps).
THRESHOLDS = (5_000_000, 800_000)
SHARES = (1.0, 0.4, 0.2)


@dataclass(frozen=True)
class Curriculum:
    """When each language enters.

    Attributes:
        steps: of the training (U).
        entry: for each language the step at which it enters, 0 for the start.

    Raises:
        InputError: no steps, a step that is none of the training's, or no language at the start.
    """

    steps: int
    entry: dict[str, int]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"curriculum: steps is {self.steps}: must be at least 1.")
        for language, step in self.entry.items():
            if not isinstance(step, int) or not 0 <= step < self.steps:
                raise InputError(
                    f"curriculum: {language!r} enters at step {step!r}, but the training has the steps 0 to "
                    f"{self.steps - 1}."
                )
        if 0 not in self.entry.values():
            first = min(self.entry.values(), default=None)
            raise InputError(
                f"curriculum: no language trains from the start (the first enters at step {first}): let one enter at 0."
            )

    @classmethod
    def load(cls, path: str | Path) -> "Curriculum":
        """Reads the JSON file.

        Raises:
            InputError: the file is missing or wrong.
        """
        try:
            return read(cls, read_json(path, "a curriculum"), "")
        except InputError as error:
            message = str(error).removeprefix(": ")
            raise InputError(message if message.startswith(str(path)) else f"{path}: {message}") from None

    def save(self, path: str | Path) -> None:
        """Writes the JSON file."""
        write_json(path, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """As in the JSON file."""
        return asdict(self)

    def check_languages(self, languages: Collection[str]) -> None:
        """Refuses a curriculum of other languages than those that train.

        Raises:
            InputError: it names another one, or lacks one.
        """
        if unknown := sorted(set(self.entry) - set(languages)):
            raise InputError(
                f"curriculum: {', '.join(unknown)} is no language that trains here (those are {', '.join(languages)})."
            )
        if missing := [code for code in languages if code not in self.entry]:
            raise InputError(f"curriculum: does not say when {', '.join(missing)} enters; 0 is from the start.")


def count_based(
    counts: Mapping[str, float],
    steps: int,
    thresholds: Sequence[float] = THRESHOLDS,
    shares: Sequence[float] = SHARES,
) -> Curriculum:
    """Languages by how much text they have: bin `i` enters at step `U - k_i`, `k_i = shares[i] * U`.

    The first bin that holds a language trains from the start, whatever its share.

    Args:
        counts: examples (documents, say) of each language.
        steps: U.
        thresholds: from large to small; a language with at least `thresholds[i]` examples is in bin `i`, one with
            fewer than all of them in the last.
        shares: of each bin, one more than thresholds; from large to small.

    Raises:
        InputError: the numbers do not fit together.
    """
    if len(shares) != len(thresholds) + 1:
        raise InputError(
            f"{len(thresholds)} thresholds make {len(thresholds) + 1} bins, but {len(shares)} shares were given."
        )
    for language, count in counts.items():
        if not 0 <= count < inf:
            raise InputError(f"{language!r} has {count:g} examples: must be a number of at least 0.")
    for name, values in (("thresholds", thresholds), ("shares", shares)):
        if not all(isfinite(value) for value in values):
            raise InputError(f"{name} {', '.join(f'{value:g}' for value in values)}: must be finite numbers.")
        if list(values) != sorted(values, reverse=True):
            raise InputError(f"{name} {', '.join(f'{value:g}' for value in values)}: must go from large to small.")
    if not all(0 < share <= 1 for share in shares):
        raise InputError(f"shares {', '.join(f'{share:g}' for share in shares)}: each is a part of the training.")
    bins: list[list[str]] = [[] for _ in shares]
    for language, count in counts.items():
        bins[next((i for i, least in enumerate(thresholds) if count >= least), len(thresholds))].append(language)
    return _curriculum(bins, [share * steps for share in shares], steps)


def step_based(
    best_steps: Mapping[str, int], bins: int, steps: int, merge_first: int = 1, new_steps: int | None = None
) -> Curriculum:
    """Algorithm 1: languages by the step of a first run at which they began to over-fit.

    `bins` characteristic steps `k_i = s_max - (i - 1) (s_max - s_min) / (bins - 1)`; each language joins the bin whose
    `k_i` is nearest to its best step (the larger `k_i` of two), and enters at step `U - k_i`. The first bin trains from
    the start, also where `k_1 = s_max` is less than U: nothing else would train before.

    Args:
        best_steps: of each language the step with the best validation loss (the last of several).
        bins: n.
        steps: U, the first run's.
        merge_first: make one bin, with the characteristic step of the first, of so many; the paper takes 3 of 5.
        new_steps: of the training that is to follow, if not U; all steps are scaled to it.

    Raises:
        InputError: a number is out of its range.
    """
    if not best_steps:
        raise InputError("No language has a best step.")
    if bins < 1 or not 1 <= merge_first <= bins:
        raise InputError(
            f"bins {bins}, merge_first {merge_first}: at least one bin, and no more to merge than there are."
        )
    for language, step in best_steps.items():
        if not 1 <= step <= steps:
            raise InputError(f"The best step of {language!r} is {step}, but the run had the steps 1 to {steps}.")
    largest, smallest = max(best_steps.values()), min(best_steps.values())
    gaps = max(bins - 1, 1)
    scaled = [gaps * largest - i * (largest - smallest) for i in range(bins)]  # k_i times gaps: whole numbers
    members: list[list[str]] = [[] for _ in range(bins)]
    for language, step in best_steps.items():
        members[min(range(bins), key=lambda i: abs(gaps * step - scaled[i]))].append(language)
    merged = [[code for group in members[:merge_first] for code in group], *members[merge_first:]]
    kept = [scaled[0], *scaled[merge_first:]]
    new_steps = steps if new_steps is None else new_steps
    return _curriculum(merged, [k * new_steps / steps / gaps for k in kept], new_steps)


def _curriculum(bins: Sequence[Sequence[str]], trained_steps: Sequence[float], steps: int) -> Curriculum:
    """Bin `i` enters at step `U - k_i`, for one step at least; the first that is not empty at step 0."""
    entry: dict[str, int] = {}
    for languages, k in zip(bins, trained_steps, strict=True):
        entry |= dict.fromkeys(languages, steps - max(1, round(k)) if entry else 0)
    return Curriculum(steps, entry)
