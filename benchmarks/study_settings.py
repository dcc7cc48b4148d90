"""Reads a settings file of the study: `inherits` names another file beside it, whose keys it changes."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.yamlfile import read_yaml
from hf_moe_expand.data.anchors import shipped_sentences

# Keys that decide nothing of a row's figures, and those that alone decide the base's.
_PRESENTED = ("claims", "curves", "generation", "keep_gigabytes", "ladders", "lengths", "rows", "seeds")
_SCORED = ("old", "new", "evaluation", "pairs", "document_sentences")


def read_settings(path: Path) -> dict[str, Any]:
    """The settings, with the inherited ones. `rows` may be a list: the inherited rows with these names.

    Raises:
        InputError: the file is no YAML, lacks a key, names a row that it does not inherit, or would judge the sweep on
            a language of the test.
    """
    settings = _with_inherited(path)
    judges, tested = settings.get("tuning_unnamed", []), [*_old(settings), *settings["new"]]
    if both := [code for code in judges if code in tested]:
        raise InputError(f"{path}: tuning_unnamed: {both[0]} is a language of the test; the sweep takes others.")
    if bare := [code for code in judges if not shipped_sentences(code)]:
        raise InputError(f"{path}: tuning_unnamed: {bare[0]} is not among the package's anchors, whose text it takes.")
    for tokens, ladders in settings.get("ladders", {}).items():
        if tokens not in settings.get("lengths", []):
            raise InputError(f"{path}: ladders: {tokens} is not among the lengths.")
        if unknown := [name for name in ladders if name not in settings["rows"]]:
            raise InputError(f"{path}: ladders: {tokens}: {unknown[0]!r} is not a row.")
    return settings


def _with_inherited(path: Path) -> dict[str, Any]:
    own = read_yaml(path)
    if "inherits" not in own:
        if missing := [key for key in ("old", "new", "rows") if key not in own]:
            raise InputError(f"{path}: no key `{missing[0]}`: give it, or inherit it (`inherits: study.yaml`).")
        return own
    inherited = _with_inherited(path.parent / own.pop("inherits"))
    if isinstance(named := own.get("rows"), list):
        if unknown := [name for name in named if name not in inherited["rows"]]:
            raise InputError(f"{path}: rows: {unknown[0]!r} is not a row of the inherited file.")
        own["rows"] = {name: inherited["rows"][name] for name in named}
    return {**inherited, **own}


def _old(settings: Mapping[str, Any]) -> list[str]:
    return [code for codes in settings["old"].values() for code in codes]


def lengths_of(settings: Mapping[str, Any]) -> list[int | None]:
    """The lengths of the study's runs in tokens, the shortest first; None alone where `steps` says the only one."""
    return sorted(settings["lengths"]) if settings.get("lengths") else [None]


def at_length(settings: Mapping[str, Any], tokens: int | None) -> dict[str, Any]:
    """The settings of the runs of one length: its own number of steps, as near to `tokens` as whole steps come, the
    same share of them for reviews, and the rates that `ladders` gives its rows."""
    if tokens is None:
        return dict(settings)
    ladders = settings.get("ladders", {}).get(tokens, {})
    rows = {name: {**row, **ladders.get(name, {})} for name, row in settings["rows"].items()}
    steps = max(1, round(tokens / (settings["block_size"] * settings["batch_size"])))
    review_steps = max(1, round(steps * settings["review_steps"] / settings["steps"]))
    return {**settings, "steps": steps, "review_steps": review_steps, "rows": rows}


def trained_tokens(settings: Mapping[str, Any]) -> int:
    """The tokens that every row trains on."""
    return settings["steps"] * settings["block_size"] * settings["batch_size"]


def row_digest(settings: Mapping[str, Any], name: str) -> str:
    """The hash of all settings that decide a row's figures."""
    row = settings["rows"][name]
    keys = [key for key in settings if key not in _PRESENTED] if row else [key for key in _SCORED if key in settings]
    decides = {"row": row, **{key: settings[key] for key in keys}}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
