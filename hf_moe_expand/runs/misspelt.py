"""Refuses a misspelt key of a recipe before torch is imported, which takes seconds. `recipes/keys.json` has the keys
that the classes declare; the classes themselves check all else."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..core.errors import errors_at
from ..core.extensions import extension_points
from ..core.schema import check_keys
from ..planning.methods import read_plan_settings
from .recipes import WholeRecipe

KEYS = Path(__file__).parent / "recipes" / "keys.json"


def check_keys_of(recipe: str | Path) -> None:
    """Checks the keys of a recipe's file, and of those that it inherits; those inside a stage's own mappings wait for
    the classes."""
    if extension_points("stages"):  # which may add keys
        return
    known = json.loads(KEYS.read_text("utf-8"))

    def check(mapping: Mapping[str, Any], keys: Iterable[str], where: str, glue: str) -> None:
        _refuse(mapping, keys, where)
        for key, inner in mapping.items():
            if key == "plan" and isinstance(inner, Mapping):
                with errors_at(f"{where}{glue}{key}"):
                    read_plan_settings(inner)
            if isinstance(inner, Mapping) and (fields := known["inside"].get(key)) is not None:
                library = _library() if key in known["train"] else ()
                is_known = [*fields, *library, *(name for name in inner if "checkpointing" in str(name))]
                _refuse(inner, is_known, f"{where}{glue}{key}", len(fields) if library else None)

    whole = WholeRecipe.load(recipe, lambda _: True)
    check(whole.mapping, [*known["expansion"], *known["recipe"]], whole.where, ": ")
    expansions = whole.mapping.get("expansions")
    for number, expansion in enumerate(expansions if isinstance(expansions, list) else ()):
        if isinstance(expansion, Mapping):
            check(expansion, known["expansion"], f"{whole.where}: expansions[{number}]", ".")


def _refuse(mapping: Mapping[str, Any], known: Iterable[str], where: str, shown: int | None = None) -> None:
    with errors_at(where):
        check_keys(mapping, known, shown, " and those of transformers.TrainingArguments" if shown else "")


def _library() -> Collection[str]:
    """The names that transformers' file of training arguments declares, and `training`, the key of earlier releases."""
    folder = Path(find_spec("transformers").origin or "").parent  # type: ignore[union-attr]
    return [*re.findall(r"^    (\w+):", (folder / "training_args.py").read_text("utf-8"), re.M), "training"]
