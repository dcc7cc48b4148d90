"""DMoE: one expert for each group of similar languages, in the layers that deviate most."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from ...errors import InputError
from ...languages import LanguageCode
from ...results import DeviationResult
from ...schema import Count, Number, Text
from ..layers import select_layers
from ..plan import check_groups
from .allocation import Allocation, Target
from .base import Option, plan_method

DEFAULT_RATIO = 0.4


def _by_hand(text: str) -> list[list[str]]:
    """Parses groups such as `en,de;fr,es`."""
    return [[code.strip() for code in group.split(",") if code.strip()] for group in text.split(";")]


@plan_method("dmoe", title="DMoE", card="dmoe", tag="dmoe", needs="deviation", grows=False, makes_groups=True)
def dmoe(
    target: Target,
    *,
    groups: Annotated[
        Count | list[list[LanguageCode]],
        Field(description="Number of language groups, or the groups themselves: `[[en, de], [fr, es]]`."),
        Option("--groups", int, "Number of language groups, each with its own expert."),
        Option("--by-hand", str, 'The groups themselves, e.g. "en,de;fr,es".', _by_hand),
    ],
    grouping: Annotated[
        Text,
        Field(description="Similarity for the groups: `deviation`, `random`, or a file of linguistic vectors."),
        Option("--random", bool, "Random groups of equal size (ablation).", lambda _: "random"),
        Option("--vectors", Path, "Groups by linguistic vectors (ablation): a .json or .csv file.", str),
    ] = "deviation",
    ratio: Annotated[
        Number | None,
        Field(gt=0, le=1, description=f"Share of layers to expand, those that deviate most (default {DEFAULT_RATIO})."),
    ] = None,
    threshold: Annotated[
        Number | None, Field(description="Least deviation of layers to expand, scaled to 0..1, instead of a ratio.")
    ] = None,
) -> Allocation:
    """One expert for each group of similar languages, in the layers that deviate most (DMoE).

    Example: hf-moe-expand plan dmoe --deviation deviation.json --groups 6 --ratio 0.4 --out plan.json
    """
    found = target.deviation
    if isinstance(groups, int):
        made = find_groups(groups, grouping, found, target.seed)
    elif grouping == "deviation":
        made = given_groups(groups, found)
    else:
        raise InputError(f"groups: the groups are given by hand, so leave out grouping `{Path(grouping).name}`.")
    if len(made) < 2:
        raise InputError("groups: a mixture needs at least 2 experts, one for each group; give 2 groups or more.")
    share = DEFAULT_RATIO if ratio is None and threshold is None else ratio
    chosen = select_layers(found.deviation, share, threshold)
    details = {
        "ratio": share, "threshold": threshold, "deviation": found.deviation,
        # Only the file's name: a plan may be published.
        "grouping": "by hand" if isinstance(groups, list) else Path(grouping).name,
    }  # fmt: skip
    counts = [len(made) if layer in chosen else 1 for layer in range(len(found.deviation))]
    return Allocation(counts, details, made, drawn=grouping == "random")


def given_groups(groups: list[list[str]], found: DeviationResult) -> list[list[str]]:
    """Checks and returns the given groups.

    Raises:
        InputError: a group is empty, or a language is in two groups, in none, or was not measured.
    """
    check_groups(groups)
    named = [language for group in groups for language in group]
    if missing := sorted(set(found.languages) - set(named)):
        raise InputError(f"groups: {', '.join(missing)} is in no group; add each language to one.")
    if unknown := sorted(set(named) - set(found.languages)):
        raise InputError(f"groups: {', '.join(unknown)} was not measured; known: {', '.join(found.languages)}.")
    return groups


def find_groups(number: int, grouping: str, found: DeviationResult, seed: int) -> list[list[str]]:
    """Groups by the similarity of the languages' changes, at random, or by linguistic vectors.

    Raises:
        InputError: there are more groups than languages, or the file of vectors is wrong.
    """
    from ..grouping import group_languages, random_groups, vector_similarity  # numpy

    if grouping == "random":
        return random_groups(found.languages, number, seed)
    similarity = found.similarity if grouping == "deviation" else vector_similarity(grouping, found.languages)
    return group_languages(similarity, found.languages, number)
