"""Fills environment variables into a recipe's paths."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import InputError


def unset_variable(text: str) -> str | None:
    """The first environment variable in `text` that is not set."""
    unset = re.search(r"\$\{?\w+\}?", os.path.expandvars(text))
    return unset.group() if unset else None


def filled_in(source: Any, where: str, unset_ok: bool) -> str:
    """A path or source with the values of its variables.

    Raises:
        InputError: `source` is not a text, or a variable is not set and `unset_ok` is false.
    """
    if not isinstance(source, str):
        raise InputError(f"{where}: {source!r} is not a file, a folder or hub:NAME.")
    if not unset_ok and (unset := unset_variable(source)):
        raise InputError(f"{where}: the environment variable {unset} is not set; set it, or write the path itself.")
    return os.path.expandvars(source)


def fill_sources(mapping: dict[str, Any], kind: str, where: str, unset_ok: bool) -> None:
    """Fills in variables in the texts of languages under the key `kind`."""
    if isinstance(mapping.get(kind), Mapping):
        for code in mapping[kind]:
            if not isinstance(code, str):
                raise InputError(f"{where}: {kind}: {code!r} is no language code.")
        mapping[kind] = {
            code: filled_in(source, f"{where}: {kind}.{code}", unset_ok) for code, source in mapping[kind].items()
        }


def fill_packs(mapping: dict[str, Any], where: str, unset_ok: bool) -> None:
    """Fills in variables in the names of a join's packs."""
    join = mapping.get("join")
    if isinstance(join, dict) and isinstance(join.get("packs"), list):
        join["packs"] = [
            filled_in(pack, f"{where}: join.packs[{number}]", unset_ok) for number, pack in enumerate(join["packs"])
        ]


def fill_stages(mapping: dict[str, Any], stages: Iterable[str], where: str, unset_ok: bool) -> None:
    """Fills in variables in the files that stages name: a graft's model, curricula and held-out text."""
    for key in stages:
        stage = mapping.get(key)
        if not isinstance(stage, dict):
            continue
        for name in ("instruct", "curriculum"):
            if isinstance(stage.get(name), str):
                stage[name] = filled_in(stage[name], f"{where}: {key}.{name}", unset_ok)
        if isinstance(stage.get("validation"), dict):
            fill_sources(stage["validation"], "texts", f"{where}: {key}.validation", unset_ok)
