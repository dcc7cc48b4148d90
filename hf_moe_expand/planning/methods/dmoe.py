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
    """`en,de;fr,es` from a command line."""
    return [[code.strip() for code in group.split(",") if code.strip()] for group in text.split(";")]


@plan_method("dmoe", title="DMoE", card="dmoe", tag="dmoe", needs="deviation", grows=False, makes_groups=True)
def dmoe(
    target: Target,
    *,
    groups: Annotated[
        Count | list[list[LanguageCode]],
        Field(description="Number of language groups, or the groups themselves: `[[en, de], [fr, es]]`."),
        Option("--groups", int, "Number of language groups, each with its expert."),
        Option("--by-hand", str, 'The groups themselves, e.g. "en,de;fr,es".', _by_hand),
    ],
    grouping: Annotated[
        Text,
        Field(description="How groups are made: `deviation`, `random`, or a file of linguistic vectors."),
        Option("--random", bool, "Random groups of equal size (ablation).", lambda _: "random"),
        Option("--vectors", Path, "Groups by linguistic vectors (ablation): .json or .csv, language and numbers.", str),
    ] = "deviation",
    ratio: Annotated[
        Number | None,
        Field(gt=0, le=1, description=f"Share of layers, those that deviate most (default {DEFAULT_RATIO})."),
    ] = None,
    threshold: Annotated[
        Number | None, Field(description="Instead: layers of at least this deviation, scaled to 0..1.")
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
        raise InputError(f"groups: they are given by hand, so grouping `{Path(grouping).name}` must be left out.")
    if len(made) < 2:
        raise InputError("One group of languages: a mixture needs at least 2 experts, one a group.")
    share = DEFAULT_RATIO if ratio is None and threshold is None else ratio
    chosen = select_layers(found.deviation, share, threshold)
    details = {
        "ratio": share, "threshold": threshold, "deviation": found.deviation,
        # The file's name alone: a plan may travel.
        "grouping": "by hand" if isinstance(groups, list) else Path(grouping).name,
    }  # fmt: skip
    counts = [len(made) if layer in chosen else 1 for layer in range(len(found.deviation))]
    return Allocation(counts, details, made, drawn=grouping == "random")


def given_groups(groups: list[list[str]], found: DeviationResult) -> list[list[str]]:
    """The groups themselves.

    Raises:
        InputError: a group is empty, or a language is in two groups, in none, or was not measured.
    """
    check_groups(groups)
    named = [language for group in groups for language in group]
    if missing := sorted(set(found.languages) - set(named)):
        raise InputError(f"groups: {', '.join(missing)} is in no group; every language needs one.")
    if unknown := sorted(set(named) - set(found.languages)):
        raise InputError(f"groups: {', '.join(unknown)} was not measured; known: {', '.join(found.languages)}.")
    return groups


def find_groups(number: int, grouping: str, found: DeviationResult, seed: int) -> list[list[str]]:
    """Groups by similarity of the languages' deviation, at random, or by linguistic vectors.

    Raises:
        InputError: there are more groups than languages, or the file of vectors is wrong.
    """
    from ..grouping import group_languages, random_groups, vector_similarity  # numpy

    if grouping == "random":
        return random_groups(found.languages, number, seed)
    similarity = found.similarity if grouping == "deviation" else vector_similarity(grouping, found.languages)
    return group_languages(similarity, found.languages, number)
