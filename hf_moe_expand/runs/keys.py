"""Refuses a misspelt key of a recipe, or of a stage's file, before torch is imported: that takes seconds.

The names of the keys are read from the source of the classes that declare them. Their values, and the keys inside a
stage's own mappings, wait for the classes themselves.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..core.errors import InputError, errors_at
from ..core.extensions import extension_points
from ..core.schema import unknown_key
from ..stages import kinds, stage_files
from .recipes import WholeRecipe

_HERE = Path(__file__)


def check_recipe_keys(path: str | Path) -> None:
    """Refuses a recipe, or one that it inherits, that is no YAML mapping or has a key that no recipe has."""
    WholeRecipe.load(path, lambda _: True).checked(lambda mapping: _check_recipe(mapping, str(path)))


def check_stage_keys(key: str, mapping: Mapping[str, Any], where: str) -> None:
    """Refuses a key that the stage `key` does not have; messages call the mapping `where`."""
    if key not in stage_files():  # of another package
        return
    fields, own = _stage_fields(key)
    inner = mapping.get("training") if own else None  # the library's arguments, in recipes of earlier releases
    names = [*mapping, *(inner if isinstance(inner, Mapping) else ())]
    for name in (str(name) for name in names):
        is_known = name in fields or (own and (name == "training" or "checkpointing" in name))  # which has two names
        if not is_known:
            shown = (own, " and those of transformers.TrainingArguments") if own else ()
            raise InputError(f"{where}: {unknown_key(name, fields, *shown)}")


def _check_recipe(mapping: Mapping[str, Any], where: str) -> None:
    steps = {**_fields(_HERE.with_name("recipe.py"), "_Expansion"), **dict.fromkeys(_recipe_stages())}
    _check(mapping, {**steps, **_fields(_HERE.with_name("recipe.py"), "Recipe")}, where)
    expansions = mapping.get("expansions")
    for number, expansion in enumerate(expansions if isinstance(expansions, list) else ()):
        if isinstance(expansion, Mapping):
            _check(expansion, steps, f"{where}: expansions[{number}]", ".")


def _check(mapping: Mapping[str, Any], known: Mapping[str, Any], where: str, glue: str = ": ") -> None:
    """Checks the keys of a recipe or an expansion, and those of the mappings under them."""
    unknown = next((str(key) for key in mapping if key not in known), None)
    if unknown is not None and not extension_points("stages"):  # which may add keys
        raise InputError(f"{where}: {unknown_key(unknown, known)}")
    for key, value in mapping.items():
        if not isinstance(value, Mapping):
            continue
        place = f"{where}{glue}{key}"
        if key == "plan":
            from ..planning.methods import read_plan_settings

            with errors_at(place):
                read_plan_settings(value)
        elif key in stage_files():
            check_stage_keys(key, value, place)
        elif classes := [name for name in _names(known.get(key)) if name.endswith("Settings")]:
            fields = _fields(_HERE.with_name("recipe.py"), classes[0])
            if wrong := [str(name) for name in value if name not in fields]:
                raise InputError(f"{place}: {unknown_key(wrong[0], fields)}")


def _recipe_stages() -> list[str]:
    """The keys of the stages that stand in recipes."""
    places = {key: next(iter(_assigned(_stage(key), "place")), None) for key in stage_files()}
    return [key for key, place in places.items() if place is not None]


def _stage_fields(key: str) -> tuple[Collection[str], int]:
    """The keys of a stage, its own first, and the number of these where the others are `TrainingArguments`'s."""
    file = Path(kinds.__path__[0]) / f"{key}.py"
    stage = _stage(key)
    for settings in _assigned(stage, "settings"):
        return _fields(file, settings.id), 0  # type: ignore[attr-defined]
    fields = _fields(file, stage.name)
    own = [name for name, node in fields.items() if _is_setting(node)]
    return dict.fromkeys((*own, *fields)), len(own)


@cache
def _stage(key: str) -> ast.ClassDef:
    """The class of a stage in its file: the one with a key."""
    body = _tree(Path(kinds.__path__[0]) / f"{key}.py").body
    return next(node for node in body if isinstance(node, ast.ClassDef) and [*_assigned(node, "key")])


def _assigned(node: ast.ClassDef, name: str) -> Iterator[ast.expr]:
    """What the body of a class assigns to a name."""
    for line in node.body:
        if isinstance(line, ast.Assign) and [*_names(line.targets[0])] == [name]:
            yield line.value


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def _fields(file: Path, name: str) -> dict[str, ast.AnnAssign]:
    """The declarations of the fields of a class that a file defines or imports, those of its bases first."""
    for node in _tree(file).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields: dict[str, ast.AnnAssign] = {}
            for base in node.bases:
                fields |= _fields(file, base.id) if isinstance(base, ast.Name) else {}
            for line in node.body:
                field = line.target.id if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) else "_"
                if not field.startswith("_") and "ClassVar" not in _names(line):
                    fields[field] = line  # type: ignore[assignment]
            return fields
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            if node.level:
                inside = (node.module or "").split(".")
                return _fields(file.parents[node.level - 1].joinpath(*inside).with_suffix(".py"), name)
            if name == "TrainingArguments":
                library = str(find_spec("transformers").origin)  # type: ignore[union-attr]
                return _fields(Path(library).with_name("training_args.py"), name)
    return {}


def _is_setting(node: ast.AnnAssign) -> bool:
    """Whether `setting` declares the field: a stage's own, or one of the library that we describe."""
    return isinstance(node.value, ast.Call) and "setting" in _names(node.value.func)


def _names(node: Any) -> Iterator[str]:
    """The names in an expression; none of a missing one."""
    inside = node.annotation if isinstance(node, ast.AnnAssign) else node
    return (part.id for part in ast.walk(inside) if isinstance(part, ast.Name)) if inside is not None else iter(())
