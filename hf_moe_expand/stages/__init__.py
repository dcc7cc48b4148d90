"""The stages of a recipe, one file each.

A stage's file defines its name, its configuration, the modules that it trains, its losses, its languages, its check
before anything runs, and its trainer. A new stage is a new file and its name in one of the tuples below. This module
does not import them: the command line's help only reads their source.
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..trainers.freezing import Trained
    from .base import Stage, TrainingStage

# The stages of a recipe, in the order in which they run; each recipe runs those of its kind of model.
ROAD = ("post_pretrain", "group", "joint", "graft", "gates", "review")
BESIDE = ("adapt", "dense")


def stage_of(key: str) -> "Stage":
    """The stage with this key, such as `post_pretrain`."""
    return import_module(f"{__name__}.{key}").STAGE


@cache
def road(family: str) -> "tuple[Stage, ...]":
    """The stages that a recipe may have, in order.

    Args:
        family: `layer_moe` or `dmoe`, the model type of the recipe's plan.
    """
    return tuple(stage for stage in map(stage_of, ROAD) if family in stage.families)


@cache
def training_stages() -> "tuple[TrainingStage, ...]":
    """Every stage that trains an expanded model."""
    from .base import TrainingStage

    found = (stage_of(key) for key in (*ROAD, *BESIDE))
    return tuple(stage for stage in found if isinstance(stage, TrainingStage) and stage.families)


def words_of(key: str) -> str:
    """The docstring of a stage's file, read without importing it."""
    return ast.get_docstring(_parsed(key)) or ""


def help_of(key: str) -> str:
    """The `--help` text of a training stage: its file's docstring and the keys of its configuration."""
    config = next(c for c in _parsed(key).body if isinstance(c, ast.ClassDef) and c.name.endswith("Config"))
    keys = dict(_declared(config))
    width = max(map(len, keys))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in keys.items()]
    # The first character keeps typer from joining the lines.
    return f"{words_of(key)}\n\n\b\nKeys of --config, besides `training`:\n" + "\n".join(lines)


def _parsed(module: str) -> ast.Module:
    return ast.parse((files(__name__) / f"{module}.py").read_text(encoding="utf-8"))


def _declared(config: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Name and help of each key of a configuration class, the keys of its bases first."""
    homes = {"MixedConfig": "mixing", "StageConfig": "config"}
    for base in config.bases:
        if isinstance(base, ast.Name) and base.id in homes:
            tree = _parsed(homes[base.id])
            yield from _declared(next(c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == base.id))
    for field in config.body:
        if isinstance(field, ast.AnnAssign) and isinstance(call := field.value, ast.Call):
            if ast.unparse(call.func) != "key":
                continue
            default, text = call.args
            shown = ast.unparse(default).strip("'")
            said = "" if shown == "None" or shown[0].isupper() else f" ({shown})"
            yield ast.unparse(field.target), ast.literal_eval(text) + said


def trained_parts(family: str) -> "dict[str, Trained]":
    """The parts of a model that each training stage trains, by the stage's name in a history: read from the stages'
    files, whose import takes seconds.

    Args:
        family: `layer_moe` or `dmoe`, the model's type.
    """
    from ..trainers import freezing

    found: dict[str, Trained] = {}
    for key in (*ROAD, *BESIDE):
        for stage in (part for part in _parsed(key).body if isinstance(part, ast.ClassDef)):
            facts = _assigned(stage)
            families = ast.literal_eval(facts["families"]) if "families" in facts else ("layer_moe",)
            if "trains" in facts and family in families:
                trains: Any = facts["trains"]
                if isinstance(trains, ast.Name):
                    trained = getattr(freezing, trains.id)
                else:
                    trained = freezing.Trained(**{k.arg: ast.literal_eval(k.value) for k in trains.keywords})
                found[ast.literal_eval(facts["name"])] = trained
    return found


def _assigned(body: ast.ClassDef) -> dict[str, ast.expr]:
    """The values that the body of a class assigns to names."""
    found: dict[str, ast.expr] = {}
    for line in body.body:
        if isinstance(line, ast.Assign):
            (target,) = line.targets
            several = isinstance(target, ast.Tuple) and isinstance(line.value, ast.Tuple)
            pairs = zip(target.elts, line.value.elts, strict=True) if several else [(target, line.value)]  # type: ignore[attr-defined]
            found |= {ast.unparse(name): value for name, value in pairs}
    return found


def trained_in(name: str) -> Any:
    """The `Trained` of a stage, by the stage's name in a history; None for a step that is not a stage."""
    from ..trainers.freezing import EVERYTHING

    if name == "everything":
        return EVERYTHING
    return next((stage.trains for stage in training_stages() if name == stage.name), None)


def freeze(model: Any, stage: Any) -> Any:
    """Sets `requires_grad` of an expanded model's parameters as a stage does.

    Args:
        model: expanded model, after loading.
        stage: a stage's name (`post-pretrain`, `review`, `group`, `joint`, `adapt`, or `everything`), or a `Trained`.

    Returns:
        A `FreezeReport`: the number of trained parameters, by part.

    Raises:
        ValueError: the model has a PEFT adapter.
        InputError: `stage` is not the name of a stage.
    """
    from ..errors import InputError
    from ..trainers import freezing

    trained = trained_in(stage) if isinstance(stage, str) else stage
    if trained is None:
        known = ", ".join([*(known.name for known in training_stages()), "everything"])
        raise InputError(f"{stage!r} is not a stage that trains an expanded model; known: {known}.")
    return freezing.freeze(model, trained, stage if isinstance(stage, str) else "training")
