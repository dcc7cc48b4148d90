"""What a similarity analysis found: numbers and a JSON file; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from ..errors import InputError
from ..jsonfile import read_json, write_json


@dataclass(frozen=True)
class SimilarityResult:
    """Similarities per layer; every list has one entry a layer.

    Attributes:
        pairs: `"el-en"` to the mean cosine over all pairs of their hidden states; pairs of two new languages and of
            a new and an old one.
        new_new: mean over pairs of new languages; None with a single new language.
        new_old: mean over pairs of a new and an old language.
        similarity: `(new_old + new_new) / 2`, or `new_old` where there is no new_new.
    """

    old: list[str]
    new: list[str]
    tokens: int
    pairs: dict[str, list[float]]
    new_new: list[float] | None
    new_old: list[float]
    similarity: list[float]

    @classmethod
    def from_pairs(
        cls, pairs: Mapping[str, Sequence[float]], old: Sequence[str], new: Sequence[str], tokens: int
    ) -> "SimilarityResult":
        """Layer similarities from pair similarities (LayerMoE Eq. 9, plain means as in the authors' own sheet)."""

        def mean(names: list[str]) -> list[float]:
            return [sum(values) / len(names) for values in zip(*(pairs[name] for name in names), strict=True)]

        new_old = mean([f"{a}-{b}" for a in new for b in old])
        new_new = mean([f"{a}-{b}" for a, b in combinations(new, 2)]) if len(new) > 1 else None
        both = new_old if new_new is None else [(a + b) / 2 for a, b in zip(new_old, new_new, strict=True)]
        return cls(list(old), list(new), tokens, {k: list(v) for k, v in pairs.items()}, new_new, new_old, both)

    def to_json(self, path: str | Path) -> None:
        write_json(path, self.__dict__)

    @classmethod
    def from_json(cls, path: str | Path) -> "SimilarityResult":
        """Reads `analysis.json`.

        Raises:
            InputError: the file is missing or is no similarity analysis.
        """
        value = read_json(path, "a similarity analysis")
        if missing := sorted(set(cls.__dataclass_fields__) - set(value)):
            raise InputError(f"{path}: not a similarity analysis: {', '.join(missing)} is missing.")
        return cls(**{name: value[name] for name in cls.__dataclass_fields__})
