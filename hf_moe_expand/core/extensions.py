"""What other packages add: stages, plan methods and losses.

A package names them by entry points, which the command line knows without an import; a script registers them itself,
before it reads a recipe.

    [project.entry-points."hf_moe_expand.stages"]
    warm_up = "my_package:WarmUpConfig"
    [project.entry-points."hf_moe_expand.plan_methods"]
    ends = "my_package:EndsPlan"
    [project.entry-points."hf_moe_expand.losses"]
    router_entropy = "my_package:RouterEntropyLoss"
"""

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from .errors import InputError, library_errors_at
from .schema import checked

T = TypeVar("T", bound=type)

_REGISTERED: dict[str, dict[str, Any]] = {"stages": {}, "plan_methods": {}, "losses": {}}


@checked
def register_stage(stage: T) -> T:
    """Makes a stage known: a key of recipes. Use it as a decorator, before a recipe is read."""
    if "hf_moe_expand.runs.recipe" in sys.modules:
        raise InputError(f"{stage.__name__}: recipes are read already: register a stage first.")
    return _register("stages", "key", stage)


@checked
def register_plan_method(method: T) -> T:
    """Makes a method of planning known, by the name that its field `method` allows. Use it as a decorator."""
    return method


@checked
def register_loss(loss: T) -> T:
    """Makes a loss known: a stage takes it by its name, as `losses: {router_entropy: 0.1}`. Use it as a decorator."""
    return _register("losses", "name", loss)


def _register(kind: str, attribute: str, value: T) -> T:
    name = getattr(value, attribute, None)
    if not isinstance(name, str):
        raise InputError(f"{value.__name__}: its `{attribute}` is {name!r}: must be text, by which it is known.")
    _REGISTERED[kind][name] = value
    return value


@cache  # it reads a file of each package that is installed
def extension_points(kind: str) -> dict[str, EntryPoint]:
    """The entry points of other packages of a kind (`stages`, `plan_methods`, `losses`), by name; imports none."""
    return {point.name: point for point in entry_points(group=f"hf_moe_expand.{kind}")}


def extensions(kind: str) -> dict[str, Any]:
    """What was registered, and what entry points name; an InputError says which of them cannot be imported."""
    found = {}
    for name, point in extension_points(kind).items():
        with library_errors_at(f"{point.module}: adds {name!r} to hf-moe-expand, but cannot be imported"):
            found[name] = point.load()
    return found | _REGISTERED[kind]
