"""Chooses a row's learning rate, its review's, and its weight in the average with the base."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.jsonfile import read_json, write_json


@dataclass(frozen=True)
class Choice:
    """The numbers of a row that are tuned; None where a row has no such number.

    Attributes:
        rate: learning rate of the main stage.
        review_rate: learning rate of the review.
        weight: the trained model's weight in the average with the base.
    """

    rate: float
    review_rate: float | None = None
    weight: float | None = None


class Tried:
    """The choices of a row that were scored, in a file that holds them after each.

    Args:
        path: the file.
        digest: hash of the settings; see `row_digest`.
        score: the score of a choice; lower is better.

    Raises:
        InputError: the file belongs to other settings.
    """

    def __init__(self, path: Path, digest: str, score: Callable[[Choice], float]) -> None:
        self.path, self.digest, self._score = path, digest, score
        found = read_json(path, "a sweep") if path.exists() else {"settings": digest, "tried": []}
        if found.get("settings") != digest:
            raise InputError(f"{path}: was made with other settings; remove it, or give another --out.")
        self.scores = {_choice(one): one["score"] for one in found["tried"]}

    def score(self, choice: Choice) -> float:
        if choice not in self.scores:
            self.scores[choice] = self._score(choice)
            tried = [{**asdict(one), "score": score} for one, score in self.scores.items()]
            write_json(self.path, {"settings": self.digest, "tried": tried})
        return self.scores[choice]


def _choice(one: Mapping[str, Any]) -> Choice:
    return Choice(one["rate"], one["review_rate"], one["weight"])


def tune(row: Mapping[str, Any], settings: Mapping[str, Any], tried: Tried) -> Choice:
    """The best choice of a row: the rate first, with the middle one of the review rates; then the review rate.

    Each rate is judged with its best weight, as averaging trains nothing.
    """
    rates, reviews = ladder(row, settings, "rates"), [None]
    if row.get("review") is not None:
        reviews = ladder(row, settings, "review_rates")
    weights = row.get("average", [None])

    def best(rate: float, review_rate: float | None) -> Choice:
        choices = [Choice(rate, review_rate, weight) for weight in weights]
        return min(choices, key=tried.score) if len(choices) > 1 else choices[0]

    start = reviews[len(reviews) // 2]
    rate = sweep(rates, lambda rate: tried.score(best(rate, start)))
    review_rate = sweep(reviews, lambda review: tried.score(best(rate, review)))
    return best(rate, review_rate)


def ladder(row: Mapping[str, Any], settings: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The `rates` or `review_rates` that the sweep tries for a row: its own, or those of all rows."""
    return row.get(key, settings[key])


def sweep(ladder: Sequence[Any], score: Callable[[Any], float]) -> Any:
    """The best of the middle three of `ladder`, and of the next one outwards while the best is at an end. A ladder of
    one is not scored."""
    if len(ladder) == 1:
        return ladder[0]
    first = max(0, (len(ladder) - 3) // 2)
    last = min(first + 3, len(ladder))
    scores = [score(step) for step in ladder[first:last]]
    while True:
        best = scores.index(min(scores))
        if best == 0 and first > 0:
            first -= 1
            scores.insert(0, score(ladder[first]))
        elif best == len(scores) - 1 and last < len(ladder):
            scores.append(score(ladder[last]))
            last += 1
        else:
            return ladder[first + best]


def at_an_end(settings: Mapping[str, Any], key: str, chosen: float) -> bool:
    """Whether a row's rate is an end of its ladder, so that a further one may be better."""
    ladder = settings.get({"rate": "rates", "review_rate": "review_rates"}.get(key, ""), [])
    return len(ladder) > 1 and chosen in (ladder[0], ladder[-1])
