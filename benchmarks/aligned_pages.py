"""Pairs of paragraphs from pages that exist in two languages, some of whose paragraphs are missing.

Pages with equally many paragraphs are taken paragraph by paragraph. In other pages, paragraphs are aligned in order by
their lengths and by the words in Latin letters and numbers that they share; only pairs that share some are kept.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_SHARED = re.compile(r"[A-Za-z]{2,}|\d+")
_FAR = 0.45  # the most that the logarithm of the ratio of lengths differs from the languages' own


def aligned(folder: Path, split: str, pivot: str, other: str) -> list[tuple[str, str]]:
    """The paragraphs of `LANGUAGE.SPLIT.jsonl` (objects with `id` and `text`) in both languages."""
    left, right = (pages(folder / f"{code}.{split}.jsonl") for code in (pivot, other))
    both = [(left[name], right[name]) for name in sorted(set(left) & set(right))]
    equal = [pair for pair in both if len(pair[0]) == len(pair[1])]
    usual = sum(map(_letters, (b for _, b in equal))) / sum(map(_letters, (a for a, _ in equal)))
    found = []
    for a, b in both:
        if len(a) == len(b):
            found += [pair for pair in zip(a, b, strict=True) if _near(*pair, usual)]
        else:
            found += [pair for pair in in_order(a, b, usual) if _near(*pair, usual) and _shares(*pair)]
    return [pair for pair in dict.fromkeys(found) if pair[0] != pair[1]]


def pages(file: Path) -> dict[str, list[str]]:
    """The paragraphs of each page."""
    rows = map(json.loads, file.read_text("utf-8").splitlines())
    return {row["id"]: [" ".join(line.split()) for line in row["text"].split("\n") if line.strip()] for row in rows}


def in_order(left: Sequence[str], right: Sequence[str], usual: float) -> Iterator[tuple[str, str]]:
    """The alignment with the best sum of scores; paragraphs of either side may stay alone."""
    best = [[0.0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, a in enumerate(left, start=1):
        for j, b in enumerate(right, start=1):
            best[i][j] = max(best[i - 1][j], best[i][j - 1], best[i - 1][j - 1] + _score(a, b, usual))
    i, j, found = len(left), len(right), []
    while i and j:
        if best[i][j] == best[i - 1][j]:
            i -= 1
        elif best[i][j] == best[i][j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            found.append((left[i], right[j]))
    yield from reversed(found)


def _score(a: str, b: str, usual: float) -> float:
    shared, there = set(_SHARED.findall(a)), set(_SHARED.findall(b))
    common = 1.5 * (2 * len(shared & there) / len(there) - 1) if there else 0.0
    return 0.6 + common - 1.5 * _distance(a, b, usual)


def _near(a: str, b: str, usual: float) -> bool:
    return _distance(a, b, usual) < _FAR


def _distance(a: str, b: str, usual: float) -> float:
    return abs(math.log(len(b) / len(a) / usual))


def _shares(a: str, b: str) -> bool:
    """Whether every word in Latin letters and every number of `b`, at least one, stands in `a`."""
    there = set(_SHARED.findall(b))
    return bool(there) and there <= set(_SHARED.findall(a))


def _letters(paragraphs: Sequence[str]) -> int:
    return sum(map(len, paragraphs))
