"""The stages of a recipe, one file each.

A stage is a class: its fields are its settings, whose types name its losses, and it says what trains, which languages
it reads, and what to check before anything runs. Its Trainer stands below it. A new stage is a new file and its name in
one of the tuples below. This module imports them when they are asked for, since transformers' Trainer takes seconds.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..trainers.freezing import Trained
    from .base import Stage, TrainingStage

# The stages of a recipe, in the order in which they run; each recipe runs those of its kind of model.
RECIPE_STAGES = ("post_pretrain", "group", "joint", "graft", "gates", "review")
# Those that are commands alone.
OTHER_STAGES = ("adapt", "dense")


def stage_of(key: str) -> "type[Stage]":
    """The stage with this key, such as `post_pretrain`."""
    from .base import Stage

    import_module(f"{__name__}.{key}")
    return Stage.by_key[key]


@cache
def stages_for(family: str) -> "tuple[type[Stage], ...]":
    """The stages that a recipe may have, in order.

    Args:
        family: `layer_moe` or `dmoe`, the model type of the recipe's plan.
    """
    return tuple(stage for stage in map(stage_of, RECIPE_STAGES) if family in stage.families)


@cache
def training_stages() -> "tuple[type[TrainingStage], ...]":
    """Every stage that trains an expanded model."""
    from .base import TrainingStage

    stages = map(stage_of, (*RECIPE_STAGES, *OTHER_STAGES))
    return tuple(stage for stage in stages if issubclass(stage, TrainingStage) and stage.families)


def trained_parts(stage: str) -> "Trained | None":
    """The parts of a model that a stage trains, by the stage's name in a history; None for a step that is no stage."""
    from ..trainers.freezing import EVERYTHING

    if stage == "everything":
        return EVERYTHING
    return next((known.trains for known in training_stages() if stage == known.name), None)


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

    trained = trained_parts(stage) if isinstance(stage, str) else stage
    if trained is None:
        names = ", ".join([*(known.name for known in training_stages()), "everything"])
        raise InputError(f"{stage!r} is not a stage that trains an expanded model; known: {names}.")
    return freezing.freeze(model, trained, stage if isinstance(stage, str) else "training")
