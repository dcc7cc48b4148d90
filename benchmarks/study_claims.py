"""The papers' claims, judged by a rule that the settings fix before any row is trained.

A claim says that one row is better than another in a group of languages. It holds, or its opposite does, in a domain
where a paired t test over the seeds finds a difference at the level of 5 %.
"""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from scipy.stats import ttest_1samp
from study_changes import DOMAINS, Results, change, groups, spread
from tables import markdown_table

_LEVEL = 0.05


def claims_table(settings: Mapping[str, Any], results: Results) -> str:
    """Each claim whose rows are there: what was measured on help pages and on FLORES, and the verdict; empty if none.

    Args:
        settings: `claims` holds, by paper, lists of the claim's words, the group of languages, the row that should be
            better, and the other.
    """
    rows = []
    for paper, claims in settings.get("claims", {}).items():
        for words, group, better, other in claims:
            if better in results and other in results:
                found = [differences(settings, results, domain, group, better, other) for domain in DOMAINS]
                said = [spread(values, "{:+.1f}") for values in found]
                rows.append([paper, words, f"{better} against {other}, {group}", *said, verdict(found)])
    head = ["", "claim", "rows, languages", *(f"{domain}, points" for domain in DOMAINS), "verdict"]
    return markdown_table(head, rows) if rows else ""


def differences(
    settings: Mapping[str, Any], results: Results, domain: str, group: str, better: str, other: str
) -> list[float]:
    """The change of bits per byte of `better` less that of `other`, in percent of the base, of each seed that both
    have. Negative where the claim is right."""
    base = results["base"][0]
    codes = [code for code in groups(settings)[group] if code in base["scores"][domain]]
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
