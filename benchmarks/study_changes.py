"""The study's kept results, and their changes against the base."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hf_moe_expand.jsonfile import read_json

Results = dict[str, list[dict[str, Any]]]  # of each row, one a seed
DOMAINS = ("help", "flores")


def read_results(settings: Mapping[str, Any], out: Path) -> Results:
    """The finished rows, in the order of the settings."""
    found = {}
    for name in settings["rows"]:
        kept = sorted(out.glob(f"results/{file_name(name)}.[0-9]*.json"))
        if kept:
            found[name] = [read_json(path, "a result") for path in kept]
    return found


def file_name(row: str) -> str:
    """A row's name as a file's."""
    return "".join(letter if letter.isalnum() else "-" for letter in row)


def groups(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """The languages of each group."""
    reviewed, others = settings["old"]["reviewed"], settings["old"]["not reviewed"]
    return {"reviewed": reviewed, "not reviewed": others, "new": settings["new"], "old": [*reviewed, *others]}


def change(one: Mapping[str, Any], base: Mapping[str, Any], domain: str, codes: Sequence[str]) -> float:
    """Change of the mean bits per byte against the base, in percent."""
    now, then = (mean(found["scores"][domain][code] for code in codes) for found in (one, base))
    return 100 * (now / then - 1)


def spread(values: Sequence[float], form: str) -> str:
    """Mean, and standard deviation where there are several values."""
    said = form.format(mean(values))
    digits = form.replace("+", "").removesuffix(" %")
    return said if len(values) < 2 else f"{said} ± {digits.format(stdev(values))}"
