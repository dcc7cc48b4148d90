"""Reads a settings file of the study: `inherits` names another file beside it, whose keys it changes."""

from pathlib import Path
from typing import Any

from hf_moe_expand.errors import InputError
from hf_moe_expand.yamlfile import read_yaml


def read_settings(path: Path) -> dict[str, Any]:
    """The settings, with the inherited ones. `rows` may be a list: the inherited rows with these names.

    Raises:
        InputError: the file is no YAML, lacks a key, or names a row that it does not inherit.
    """
    own = read_yaml(path)
    if "inherits" not in own:
        if missing := [key for key in ("old", "new", "rows") if key not in own]:
            raise InputError(f"{path}: no key `{missing[0]}`: give it, or inherit it (`inherits: study.yaml`).")
        return own
    inherited = read_settings(path.parent / own.pop("inherits"))
    if isinstance(named := own.get("rows"), list):
        if unknown := [name for name in named if name not in inherited["rows"]]:
            raise InputError(f"{path}: rows: {unknown[0]!r} is not a row of the inherited file.")
        own["rows"] = {name: inherited["rows"][name] for name in named}
    return {**inherited, **own}
