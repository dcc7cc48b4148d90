"""The papers' claims, judged by a rule that the settings fix before any row is trained.

A claim says that one row is better than another in a group of languages. It holds, or its opposite does, in a domain
where a paired t test over the seeds finds a difference at the level of 5 %. It is judged at the longest length.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from scipy.stats import ttest_1samp
from study_changes import DOMAINS, Results, change, groups, spread
from tables import markdown_table

ByLength = Mapping[int, Results]  # by the tokens that its rows trained on
_LEVEL = 0.05


@dataclass(frozen=True)
class Judged:
    """A claim at one length.

    Attributes:
        differences: of each domain, one a seed; see `differences`.
    """

    tokens: int
    differences: list[list[float]]

    @property
    def verdict(self) -> str:
        return verdict(self.differences)

    @property
    def seeds(self) -> int:
        return max(map(len, self.differences))

    def said(self) -> list[str]:
        """What was measured in each domain."""
        return [spread(values, "{:+.1f}") if values else "no text" for values in self.differences]


def claims_table(settings: Mapping[str, Any], results: ByLength) -> str:
    """Each claim whose rows are there, at the longest length that has both: the length, the number of seeds, what was
    measured on help pages and on FLORES, and the verdict; empty if none.

    Args:
        settings: `claims` holds, by paper, lists of the claim's words, the group of languages, the row that should be
            better, and the other.
        results: the finished rows by the tokens that they trained on.
    """
    rows = [
        [paper, words, about, f"{longest.tokens:,}", str(longest.seeds), *longest.said(), longest.verdict]
        for paper, words, about, (*_, longest) in _judged_claims(settings, results)
    ]
    measured = [f"{domain}, points" for domain in DOMAINS]
    return (
        markdown_table(["", "claim", "rows, languages", "tokens", "seeds", *measured, "verdict"], rows) if rows else ""
    )


def turned_table(settings: Mapping[str, Any], results: ByLength) -> str:
    """The claims whose verdict at the longest length is another than at a shorter one, with the figures of both; empty
    if none."""
    rows = []
    for _, words, about, (*shorter, longest) in _judged_claims(settings, results):
        for one in shorter:
            if one.verdict != longest.verdict:
                told = [f"{found.tokens:,} ({found.seeds})" for found in (one, longest)]
                measured = [f"{then}, then {now}" for then, now in zip(one.said(), longest.said(), strict=True)]
                rows.append([words, about, *told, *measured, f"{one.verdict}, then {longest.verdict}"])
    head = ["claim that turned", "rows, languages", "tokens (seeds)", "then", *(f"{one}, points" for one in DOMAINS)]
    return markdown_table([*head, "verdict"], rows) if rows else ""


def _judged_claims(settings: Mapping[str, Any], results: ByLength) -> Iterator[tuple[str, str, str, list[Judged]]]:
    """Paper, words, rows and languages of each claim, and its judgement at each length that has its rows, in order."""
    for paper, claims in settings.get("claims", {}).items():
        for words, group, better, other in claims:
            judged = [
                Judged(tokens, [differences(settings, found, domain, group, better, other) for domain in DOMAINS])
                for tokens, found in sorted(results.items())
                if better in found and other in found
            ]
            if judged:
                yield paper, words, f"{better} against {other}, {group}", judged


def differences(
    settings: Mapping[str, Any], results: Results, domain: str, group: str, better: str, other: str
) -> list[float]:
    """The change of bits per byte of `better` less that of `other`, in percent of the base, of each seed that both
    have. Negative where the claim is right; empty if the domain has none of the languages."""
    base = results["base"][0]
    codes = [code for code in groups(settings)[group] if code in base["scores"][domain]]
    if not codes:
        return []
    pairs = zip(results[better], results[other], strict=False)
    return [change(one, base, domain, codes) - change(two, base, domain, codes) for one, two in pairs]


def verdict(found: Sequence[Sequence[float]]) -> str:
    """`holds`, `does not hold` (its opposite does), `cannot tell`, or what each domain says where they differ."""
    said = [_judged(values) for values in found]
    told = [word for word in dict.fromkeys(said) if word != "cannot tell"]
    if not told:
        return "cannot tell"
    if len({*said}) == 1:
        return told[0]
    return "; ".join(f"{domain}: {word}" for domain, word in zip(DOMAINS, said, strict=True))


def _judged(values: Sequence[float]) -> str:
    if len(values) < 2 or ttest_1samp(values, 0.0).pvalue >= _LEVEL:
        return "cannot tell"
    return "holds" if mean(values) < 0 else "does not hold"
