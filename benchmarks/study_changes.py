"""The study's kept results, and their changes against the base."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from study_settings import at_length, lengths_of, row_digest

from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.jsonfile import read_json

Results = dict[str, list[dict[str, Any]]]  # of each row, one a seed
DOMAINS = ("help", "flores")


def row_folder(settings: Mapping[str, Any], out: Path, tokens: int | None, name: str) -> Path:
    """The folder of a row's sweep and results at one length; the base is the same at each."""
    return out if tokens is None or not settings["rows"][name] else out / str(tokens)


def read_results(settings: Mapping[str, Any], out: Path, tokens: int | None = None) -> Results:
    """The finished rows of one length, in the order of the settings."""
    found = {name: _paths(settings, out, tokens, name) for name in settings["rows"]}
    return {name: [read_json(path, "a result") for path in paths] for name, paths in found.items() if paths}


def kept_results(settings: Mapping[str, Any], out: Path) -> list[dict[str, Any]]:
    """All results of the settings' rows, of all lengths.

    Raises:
        InputError: a result was made with other settings than the row has now, or names none while others do.
    """
    found: dict[Path, tuple[str, dict[str, Any]]] = {}
    for tokens in lengths_of(settings):
        of_length = at_length(settings, tokens)
        for name in settings["rows"]:
            digest = row_digest(of_length, name)
            found |= {path: (digest, read_json(path, "a result")) for path in _paths(settings, out, tokens, name)}
    named = any("settings" in result for _, result in found.values())
    for path, (digest, result) in found.items():
        if named and result.get("settings") != digest:
            told = "was made with other settings" if "settings" in result else "names no settings, as others do"
            raise InputError(
                f"{path}: {told}; rows of different settings are not mixed: remove it, name its own settings file, or "
                "give another --out."
            )
    return [result for _, result in found.values()]


def _paths(settings: Mapping[str, Any], out: Path, tokens: int | None, name: str) -> list[Path]:
    return sorted(row_folder(settings, out, tokens, name).glob(f"results/{file_name(name)}.[0-9]*.json"))


def file_name(row: str) -> str:
    """A row's name as a file's."""
    return "".join(letter if letter.isalnum() else "-" for letter in row)


def groups(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """The languages of each group: the old ones by what rows read of them, the new ones, and all old ones."""
    old = settings["old"]
    return {**old, "new": settings["new"], "old": [code for codes in old.values() for code in codes]}


def change(one: Mapping[str, Any], base: Mapping[str, Any], domain: str, codes: Sequence[str]) -> float:
    """Change of the mean bits per byte against the base, in percent; a row of another training of the base keeps that
    one's scores under `base`."""
    now, then = (mean(found["scores"][domain][code] for code in codes) for found in (one, one.get("base", base)))
    return 100 * (now / then - 1)


def spread(values: Sequence[float], form: str) -> str:
    """Mean, and standard deviation where there are several values."""
    said = form.format(mean(values))
    digits = form.replace("+", "").removesuffix(" %")
    return said if len(values) < 2 else f"{said} ± {digits.format(stdev(values))}"
