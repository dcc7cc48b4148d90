"""The stages of training, a class in each file of `kinds`, which are imported when they are asked for: transformers'
Trainer takes seconds."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError
from ..core.extensions import extensions
from ..core.schema import checked
from . import kinds

if TYPE_CHECKING:
    from ..trainers.freezing import Trained
    from .config import StageConfig
    from .kind import Stage


def stage_files() -> list[str]:
    """The keys of the package's own stages, such as `post_pretrain`, from A to Z; imports none."""
    return [file.name for file in iter_modules(kinds.__path__)]


@cache
def all_stages() -> "dict[str, type[Stage]]":
    """Every stage by its key: those of a recipe in the order in which they run, then those that are commands alone."""
    from .kind import Stage

    for key in stage_files():
        import_module(f"{kinds.__name__}.{key}")
    known = {key: Stage.by_key[key] for key in stage_files()}
    for key, stage in extensions("stages").items():
        if key in known or not (isinstance(stage, type) and issubclass(stage, Stage) and stage.key == key):
            raise InputError(f"{key!r}: a registered stage must be a Stage with this key, which no other stage has.")
        known[key] = stage
    stages = sorted(known.values(), key=lambda stage: (not stage.place, stage.place))
    return {stage.key: stage for stage in stages}


@cache
def recipe_stages() -> "dict[str, type[Stage]]":
    """The stages that a recipe may have, by key, in the order in which they run."""
    return {key: stage for key, stage in all_stages().items() if stage.place}


def stages_for(family: str) -> "list[type[Stage]]":
    """The stages that a recipe may have, in order; `family` is the model type of its plan, `layer_moe` or `dmoe`."""
    return [stage for stage in recipe_stages().values() if family in stage.families]


@cache
def training_stages() -> "tuple[type[StageConfig], ...]":
    """Every stage that trains an expanded model."""
    from .config import StageConfig

    return tuple(stage for stage in all_stages().values() if issubclass(stage, StageConfig) and stage.families)


def trained_parts(stage: str) -> "Trained | None":
    """The parts of a model that a stage trains, by the stage's name in a history; None for a step that is no stage."""
    from ..trainers.freezing import EVERYTHING

    if stage == "everything":
        return EVERYTHING
    return next((known.trains for known in training_stages() if stage == known.name), None)


@checked
def freeze(model: Any, stage: Any) -> Any:
    """Sets `requires_grad` of an expanded model's parameters as a stage does; whole routers train, also in `adapt`.

    Args:
        stage: a stage's name (`post-pretrain`, `review`, `group`, `joint`, `adapt`, or `everything`), or a `Trained`.

    Returns:
        A `FreezeReport`: the number of trained parameters, by part.

    Raises:
        InputError: the model is not expanded, or has a PEFT adapter; `stage` is not the name of a stage.
    """
    from ..trainers import freezing

    trained = trained_parts(stage) if isinstance(stage, str) else stage
    if not isinstance(trained, freezing.Trained):
        names = ", ".join([*(known.name for known in training_stages()), "everything"])
        raise InputError(f"{stage!r} is not a stage that trains an expanded model; known: {names}.")
    return freezing.freeze(model, trained, stage if isinstance(stage, str) else "training")
