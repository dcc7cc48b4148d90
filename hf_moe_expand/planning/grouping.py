"""Groups languages that share an expert: balanced groups of similar ones (DMoE Algorithm 1), and its ablations."""

import random
from collections.abc import Sequence
from itertools import combinations
from math import comb, inf
from pathlib import Path
from typing import Annotated

from pydantic import AllowInfNan

from ..core.errors import InputError, errors_at
from ..core.jsonfile import read_json
from ..core.languages import check_named_once
from ..core.schema import Number, Schema, Text, checked, read

# Up to this number of candidate sets, all are compared (C(18, 9) is 48,620).
MOST_SETS = 1_000_000


@checked
def group_languages(
    similarity: Sequence[Sequence[float]], languages: Sequence[str], num_groups: int
) -> list[list[str]]:
    """Balanced groups of similar languages (DMoE Eq. 2, Algorithm 1).

    While languages remain, the next group is the set of `ceil(remaining languages / remaining groups)` languages whose
    least similar pair is most similar; on a tie, the first set in the alphabetical order of language names. Hence sizes
    differ by at most one, larger groups first. If the remaining languages form at most `MOST_SETS` sets, all sets are
    compared; otherwise the set grows from the most similar pair, each time by the language whose least similarity to
    the set is largest.

    Args:
        similarity: `[n, n]`, symmetric; the diagonal is ignored.
        languages: the `n` languages' names.

    Returns:
        The groups in the order found, the languages of each in alphabetical order.

    Raises:
        InputError: the matrix does not fit the languages, one is named twice, or `num_groups` exceeds their number.
    """
    import numpy as np  # --help of `plan` need not wait for it

    _check_number(languages, num_groups)
    matrix = np.asarray(similarity, dtype=np.float64)
    if matrix.shape != (len(languages), len(languages)):
        raise InputError(
            f"The similarities have shape {list(matrix.shape)}, but {len(languages)} languages need "
            f"{[len(languages)] * 2}."
        )
    if not np.isfinite(matrix).all() or not np.allclose(matrix, matrix.T, rtol=0, atol=1e-6):
        raise InputError("The similarities must be a symmetric matrix of finite numbers.")
    order = sorted(range(len(languages)), key=lambda i: languages[i])
    rows = matrix[np.ix_(order, order)].tolist()
    remaining, groups = list(range(len(order))), []
    for size in _sizes(len(order), num_groups):
        find = _best_set if comb(len(remaining), size) <= MOST_SETS else _grown_set
        group = find(rows, remaining, size)
        remaining = [i for i in remaining if i not in group]
        groups.append([languages[order[i]] for i in group])
    return groups


def random_groups(languages: Sequence[str], num_groups: int, seed: int = 0) -> list[list[str]]:
    """Balanced groups at random (DMoE's ablation), with the sizes of `group_languages`."""
    _check_number(languages, num_groups)
    shuffled = sorted(languages)
    random.Random(seed).shuffle(shuffled)
    return [sorted(shuffled.pop() for _ in range(size)) for size in _sizes(len(languages), num_groups)]


def vector_similarity(path: str | Path, languages: Sequence[str]) -> list[list[float]]:
    """Cosines of linguistic vectors, such as lang2vec's, of a JSON file (`{"el": [0.1, ...]}`): `[n, n]`."""
    import numpy as np

    vectors = read(_Vectors, {"vectors": read_json(path, "linguistic vectors")}, str(path)).vectors
    if missing := [language for language in languages if language not in vectors]:
        raise InputError(f"{path}: has no vector for {', '.join(missing)}; add one for each language.")
    lengths = {language: len(vectors[language]) for language in languages}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{language} has {length}" for language, length in lengths.items())
        raise InputError(f"{path}: the vectors differ in length: {listed}; give all the same length.")
    matrix = np.array([vectors[language] for language in languages], dtype=np.float64)
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    if zeros := [language for language, norm in zip(languages, norms[:, 0], strict=True) if norm == 0]:
        raise InputError(f"{path}: the vector of {zeros[0]} is all zeros, so it has no cosine; correct it.")
    units = matrix / norms
    cosines = units @ units.T
    return ((cosines + cosines.T) / 2).tolist()


def _sizes(num_languages: int, num_groups: int) -> list[int]:
    # Larger groups first: the name alone would decide which language is in a group of one that is taken first.
    smaller, larger = divmod(num_languages, num_groups)
    return [smaller + (group < larger) for group in range(num_groups)]


def _best_set(rows: list[list[float]], remaining: list[int], size: int) -> list[int]:
    """The set whose smallest similarity is largest, the first one on a tie; skips sets that cannot beat the best."""
    best: list[int] = remaining[:size]
    best_least = -inf

    def extend(chosen: list[int], least: float, start: int) -> None:
        nonlocal best, best_least
        if len(chosen) == size:
            best, best_least = chosen, least
            return
        for position in range(start, len(remaining) - (size - len(chosen)) + 1):
            language = remaining[position]
            row = rows[language]
            lowest = min([least, *(row[other] for other in chosen)])
            if lowest > best_least:
                extend([*chosen, language], lowest, position + 1)

    extend([], inf, 0)
    return best


def _grown_set(rows: list[list[float]], remaining: list[int], size: int) -> list[int]:
    """Starts from the most similar pair, and adds the language whose smallest similarity to the set is largest."""
    chosen = [*max(combinations(remaining, 2), key=lambda pair: rows[pair[0]][pair[1]])]
    while len(chosen) < size:
        others = (i for i in remaining if i not in chosen)
        chosen.append(max(others, key=lambda i: min(rows[i][j] for j in chosen)))
    return sorted(chosen)


def _check_number(languages: Sequence[str], num_groups: int) -> None:
    refuse_twice(languages)
    if not 1 <= num_groups <= len(languages):
        raise InputError(f"groups is {num_groups}: must be from 1 to {len(languages)}, the number of languages.")


class _Vectors(Schema):
    vectors: dict[Text, list[Annotated[Number, AllowInfNan(False)]]]


def check_groups(groups: list[list[str]]) -> None:
    """Refuses empty groups, and a language that is named twice."""
    if not groups or not all(groups):
        raise InputError("groups: a group is empty; every group needs a language.")
    refuse_twice([language for group in groups for language in group])


def refuse_twice(languages: Sequence[str]) -> None:
    """Refuses a language that is named twice in groups."""
    if twice := sorted({language for language in languages if list(languages).count(language) > 1}):
        raise InputError(f"groups: {', '.join(twice)} is named twice; a language must be in one group.")
    with errors_at("groups"):
        check_named_once(languages)
