"""DMoE: one expert for each group of similar languages, in the layers that deviate most."""

import random
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ...core.errors import InputError
from ...core.languages import LanguageCode
from ...core.schema import Count, Number, Text
from ..grouping import check_groups, group_languages, random_groups, vector_similarity
from ..layers import select_layers
from .base import Allocation, Needs, Option, PlanSettings, Target

DEFAULT_RATIO = 0.4


def _by_hand(text: str) -> list[list[str]]:
    """Parses groups such as `en,de;fr,es`."""
    return [[code.strip() for code in group.split(",") if code.strip()] for group in text.split(";")]


class DMoEPlan(PlanSettings):
    """One expert for each group of similar languages, in the layers that deviate most (DMoE).

    Example: hf-moe-expand plan dmoe --deviation deviation.json --groups 6 --ratio 0.4 --out plan.json

    Where a training for each language costs too much, one pass over text takes its place (--analysis in place of
    --deviation): groups of languages with similar hidden states, in the layers where languages are least similar.
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
        Field(
            description="Similarity for the groups: `deviation`; `similarity`, that of hidden states, by which layers "
            "are chosen too (one pass over text in place of a training for each language); `random`; or a file of "
            "linguistic vectors."
        ),
        Option(
            "--analysis",
            Path,
            "analysis.json of `analyze similarity`, in place of --deviation.",
            lambda _: "similarity",
        ),
        Option("--random", bool, "Random groups of equal size (ablation).", lambda _: "random"),
        Option("--vectors", Path, "Groups by linguistic vectors (ablation): a JSON file.", str),
    ] = "deviation"
    ratio: Number | None = Field(
        None, gt=0, le=1, description=f"Share of layers to expand, those that deviate most (default {DEFAULT_RATIO})."
    )
    threshold: Number | None = Field(
        None, description="Least deviation of layers to expand, scaled to 0..1, instead of a ratio."
    )
    layers_by: Literal["deviation", "random"] = Field(
        "deviation", description="Choice of the layers: `deviation`, or `random` ones, as many (ablation)."
    )

    @property
    def needs(self) -> Needs | None:
        return "similarity" if self.grouping == "similarity" else self.analysis

    def largest(self, target: Target) -> Allocation:
        languages, layers = list(target.languages), target.num_layers
        apart = [[float(a == b) for b in languages] for a in languages]
        made, share = self._groups(languages, apart, target.seed), self._share
        chosen = range(layers) if share is None else select_layers([1.0] * layers, share)
        return Allocation([len(made) if layer in chosen else 1 for layer in range(layers)], groups=made)

    @property
    def _share(self) -> float | None:
        """The share of the layers that become mixtures; None where a threshold chooses them."""
        return DEFAULT_RATIO if self.ratio is None and self.threshold is None else self.ratio

    def _groups(self, languages: list[str], alike: list[list[float]], seed: int) -> list[list[str]]:
        """The groups of languages, `alike` by the analysis."""
        by_analysis = self.grouping in ("deviation", "similarity")
        if isinstance(self.groups, list):
            if not by_analysis:
                name = Path(self.grouping).name
                raise InputError(f"groups: the groups are given by hand, so leave out grouping `{name}`.")
            made = _given_groups(self.groups, languages)
        elif self.grouping == "random":
            made = random_groups(languages, self.groups, seed)
        else:
            alike = alike if by_analysis else vector_similarity(self.grouping, languages)
            made = group_languages(alike, languages, self.groups)
        if len(made) < 2:
            raise InputError("groups: a mixture needs at least 2 experts, one for each group; give 2 groups or more.")
        return made

    def allocate(self, target: Target) -> Allocation:
        languages, alike, moves, measured = _measured(target, self.needs)
        made, share = self._groups(languages, alike, target.seed), self._share
        chosen = select_layers(moves, share, self.threshold)
        if self.layers_by == "random":
            chosen = random.Random(target.seed).sample(range(len(moves)), len(chosen))
        details = {
            "ratio": share, "threshold": self.threshold, **measured, "layers_by": self.layers_by,
            # Only the file's name: a plan may be published.
            "grouping": "by hand" if isinstance(self.groups, list) else Path(self.grouping).name,
        }  # fmt: skip
        counts = [len(made) if layer in chosen else 1 for layer in range(len(moves))]
        return Allocation(counts, details, made, drawn="random" in (self.grouping, self.layers_by))


def _measured(target: Target, needs: Needs | None) -> tuple[list[str], list[list[float]], list[float], dict[str, Any]]:
    """The languages, how similar they are, how much each layer is their own, and the analysis for the plan's details:
    by their deviation or, with `similarity`, by their hidden states."""
    if needs == "similarity":
        similarity = target.measured("similarity")
        languages = [*similarity.old, *similarity.new]
        own = [-value for value in similarity.similarity]
        return languages, similarity.between(languages), own, {"similarity": similarity.similarity}
    deviation = target.measured("deviation")
    return deviation.languages, deviation.similarity, deviation.deviation, {"deviation": deviation.deviation}


def _given_groups(groups: list[list[str]], languages: list[str]) -> list[list[str]]:
    """The groups themselves, if they hold each language once, and no other."""
    check_groups(groups)
    named = {language for group in groups for language in group}
    if missing := sorted(set(languages) - named):
        raise InputError(f"groups: {', '.join(missing)} is in no group; add each language to one.")
    if unknown := sorted(named - set(languages)):
        raise InputError(f"groups: {', '.join(unknown)} was not measured; known: {', '.join(languages)}.")
    return groups
