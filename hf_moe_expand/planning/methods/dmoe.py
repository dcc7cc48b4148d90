"""DMoE: one expert for each group of similar languages, in the layers that deviate most."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ...core.errors import InputError
from ...core.languages import LanguageCode
from ...core.schema import Count, Number, Text
from ..grouping import check_groups, group_languages, random_groups, vector_similarity
from ..layers import select_layers
from .base import Allocation, Option, PlanSettings, Target

DEFAULT_RATIO = 0.4


def _by_hand(text: str) -> list[list[str]]:
    """Parses groups such as `en,de;fr,es`."""
    return [[code.strip() for code in group.split(",") if code.strip()] for group in text.split(";")]


class DMoEPlan(PlanSettings):
    """One expert for each group of similar languages, in the layers that deviate most (DMoE).

    Example: hf-moe-expand plan dmoe --deviation deviation.json --groups 6 --ratio 0.4 --out plan.json
    """

    title = "DMoE"
    card = "dmoe"
    tag = "dmoe"
    analysis = "deviation"
    grows = False
    makes_groups = True

    method: Literal["dmoe"] = Field(description="DMoE")
    groups: Annotated[
        Count | list[list[LanguageCode]],
        Field(description="Number of language groups, or the groups themselves: `[[en, de], [fr, es]]`."),
        Option("--groups", int, "Number of language groups, each with its own expert."),
        Option("--by-hand", str, 'The groups themselves, e.g. "en,de;fr,es".', _by_hand),
    ]
    grouping: Annotated[
        Text,
        Field(description="Similarity for the groups: `deviation`, `random`, or a file of linguistic vectors."),
        Option("--random", bool, "Random groups of equal size (ablation).", lambda _: "random"),
        Option("--vectors", Path, "Groups by linguistic vectors (ablation): a .json or .csv file.", str),
    ] = "deviation"
    ratio: Number | None = Field(
        None, gt=0, le=1, description=f"Share of layers to expand, those that deviate most (default {DEFAULT_RATIO})."
    )
    threshold: Number | None = Field(
        None, description="Least deviation of layers to expand, scaled to 0..1, instead of a ratio."
    )

    def allocate(self, target: Target) -> Allocation:
        deviation = target.deviation
        languages, by_deviation = deviation.languages, self.grouping == "deviation"
        if isinstance(self.groups, int) and self.grouping == "random":
            made = random_groups(languages, self.groups, target.seed)
        elif isinstance(self.groups, int):
            similarity = deviation.similarity if by_deviation else vector_similarity(self.grouping, languages)
            made = group_languages(similarity, languages, self.groups)
        elif by_deviation:
            made = _given_groups(self.groups, languages)
        else:
            name = Path(self.grouping).name
            raise InputError(f"groups: the groups are given by hand, so leave out grouping `{name}`.")
        if len(made) < 2:
            raise InputError("groups: a mixture needs at least 2 experts, one for each group; give 2 groups or more.")
        share = DEFAULT_RATIO if self.ratio is None and self.threshold is None else self.ratio
        chosen = select_layers(deviation.deviation, share, self.threshold)
        details = {
            "ratio": share, "threshold": self.threshold, "deviation": deviation.deviation,
            # Only the file's name: a plan may be published.
            "grouping": "by hand" if isinstance(self.groups, list) else Path(self.grouping).name,
        }  # fmt: skip
        counts = [len(made) if layer in chosen else 1 for layer in range(len(deviation.deviation))]
        return Allocation(counts, details, made, drawn=self.grouping == "random")


def _given_groups(groups: list[list[str]], languages: list[str]) -> list[list[str]]:
    """The groups themselves, if they hold each language once, and no other."""
    check_groups(groups)
    named = {language for group in groups for language in group}
    if missing := sorted(set(languages) - named):
        raise InputError(f"groups: {', '.join(missing)} is in no group; add each language to one.")
    if unknown := sorted(named - set(languages)):
        raise InputError(f"groups: {', '.join(unknown)} was not measured; known: {', '.join(languages)}.")
    return groups
