"""The configuration of a training stage: `transformers.TrainingArguments` with the stage's own fields.

A subclass declares its fields once, for the checks, the keys of a stage in a recipe, the arguments of
`HfArgumentParser`, the table in docs/settings.md and the JSON schema.
"""

import json
import math
import typing
import warnings
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, ClassVar

import pydantic
import torch
from pydantic import Field
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from ..errors import InputError, errors_at
from ..memory import has_bfloat16
from ..recipe_paths import Place
from ..schema import Count, Declared, Text, Whole, check_seed, read
from ..trainers.losses import RouterLoss
from .arguments import PUBLISHED, accepted_arguments, check_training_arguments, refused_by_the_library

NO_BFLOAT16 = (
    "bf16: this machine has no instructions for bfloat16 and emulates it, up to thirty times slower than float32: "
    "leave `bf16: true` out here, or give `fp16: true` on a GPU."
)
BlockSize = Annotated[Whole, Field(ge=2)]


def setting(default: Any, help: str) -> Any:
    """A field of a stage: its default, and its description for documentation and `--help`.

    A stage trains on the losses that the types of its fields name: `Annotated[Coefficient, BalanceLoss]`.
    """
    if isinstance(default, type):
        return field(default_factory=default, metadata={"help": help})
    return field(default=default, metadata={"help": help})


class ValidationSettings(Declared):
    """Held-out text that is scored during a stage."""

    texts: dict[Text, Place] = Field(default_factory=dict, description="language: held-out text")
    every: Count = Field(50, description="steps between two scores; the model is scored at the end too")
    max_tokens: Annotated[Whole, Field(ge=2)] | None = Field(
        20_000, description="maximum of tokens to score of each language"
    )


@dataclass
class StageConfig(TrainingArguments):
    """Fields common to every training stage.

    Every argument of `TrainingArguments` works. Six have other defaults: `num_train_epochs` 1, `lr_scheduler_type`
    cosine, `logging_steps` 10, `save_total_limit` 1, `report_to` none, `seed` 0.

    Raises:
        InputError: a field has another type, is out of range, or contradicts another field.
    """

    _VALID_DICT_FIELDS = (*TrainingArguments._VALID_DICT_FIELDS, "distributed_config")  # type: ignore[assignment]

    num_train_epochs: float = 1.0
    lr_scheduler_type: SchedulerType | str = "cosine"
    logging_steps: float = 10
    save_total_limit: int | None = 1
    report_to: None | str | list[str] = "none"  # noqa: RUF036 (HfArgumentParser reads this order alone)
    seed: int = 0
    use_cpu: bool | None = None  # type: ignore[assignment]  # where no accelerator is available
    distributed_config: dict | str | None = field(
        default=None, metadata={"help": "how transformers itself splits the model over ranks, such as {fsdp_size: 8}"}
    )
    block_size: BlockSize = setting(1024, "tokens in a block")

    def __post_init__(self) -> None:
        # The given arguments, which the history records, before TrainingArguments adds the others.
        self.given = {name: getattr(self, name) for name in _argument_names() if self._was_given(name)}
        own = {name: _from_json(getattr(self, name)) for name in own_fields(type(self))}
        checked = read(settings_of(type(self)), own)  # type: ignore[arg-type]
        for name in own:
            setattr(self, name, getattr(checked, name))
        for name in ("seed", "data_seed"):
            check_seed(getattr(self, name), name)
        if self.use_cpu is None:
            self.use_cpu = not torch.accelerator.is_available()
        if self.data_seed is None:
            self.data_seed = self.seed
        if self.distributed_config is not None and "save_strategy" not in self.given:
            self.save_strategy = "no"
        with refused_by_the_library("training"):
            super().__post_init__()
            self.get_process_log_level()
        accepted_arguments(self)
        if self.bf16 and not has_bfloat16():
            warnings.warn(NO_BFLOAT16, stacklevel=3)
        self._made = {name: getattr(self, name) for name in _argument_names()}

    def _was_given(self, name: str) -> bool:
        value, default = getattr(self, name), _default(name)
        # The library's "no" is false: HfArgumentParser passes it so.
        return value != default and any(setting and setting != "no" for setting in (value, default))

    def to_dict(self) -> dict[str, Any]:
        """As `TrainingArguments.to_dict`, with the stage's own fields: JSON."""
        own = self.recorded()
        return {**super().to_dict(), **{name: own[name] for name in own_fields(type(self))}}

    def chosen(self) -> dict[str, Any]:
        """The training arguments that were given, or set afterwards."""
        changed = {name: getattr(self, name) for name, value in self._made.items() if getattr(self, name) != value}
        return {**self.given, **changed}

    def recorded(self) -> dict[str, Any]:
        """The stage's settings for its history: its own fields, the chosen training arguments and `STATED`."""
        own = {name: getattr(self, name) for name in own_fields(type(self))}
        training = {name: getattr(self, name) for name in STATED} | self.chosen()
        return {name: _json(value) for name, value in own.items()} | {
            "training": {name: _json(value) for name, value in training.items()}
        }


# The training arguments that a history records whether they were given or not.
STATED = ("num_train_epochs", "per_device_train_batch_size", "learning_rate", "lr_scheduler_type")


class StageSettings(Declared):
    """A stage in a recipe or in a file of its own: the fields of its configuration, and under `training` the arguments
    of `TrainingArguments`."""

    config_class: ClassVar[type[StageConfig]]

    training: dict[Text, Any] = Field(
        {},
        description="arguments of `transformers.TrainingArguments`; by default "
        + ", ".join(f"`{name}: {StageConfig.__dataclass_fields__[name].default}`" for name in STATED),
    )

    def config(self, output_dir: Any, seed: int, where: str = "") -> StageConfig:
        """The stage's configuration; refuses training arguments that are unknown, set by this package, or wrong."""
        prefix = f"{where}." if where else ""
        training = check_training_arguments(self.training, f"{prefix}training")
        own = {name: getattr(self, name) for name in own_fields(self.config_class)}
        with errors_at(where):
            config = self.config_class(output_dir=str(output_dir), seed=seed, data_seed=seed, **own, **training)
        config.given = dict(self.training)
        return config


def own_fields(cls: type[StageConfig]) -> dict[str, Any]:
    """The fields that a stage adds to `TrainingArguments`, and their types."""
    library = {f.name for f in fields(TrainingArguments)} | {"distributed_config"}
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: _without_json(hints[f.name]) for f in fields(cls) if f.name not in library}


def declared_losses(cls: type[StageConfig], values: Any) -> list[RouterLoss]:
    """The losses whose coefficients are fields of a stage's configuration, in the order of the fields.

    Args:
        values: the configuration or the settings that hold the fields' values. A field of the loss itself, such as
            `GateBudgetLoss.gate_budget`, takes the value of the stage's field of this name, if there is one.
    """
    hints = own_fields(cls)
    losses = []
    for name, hint in hints.items():
        for loss in getattr(hint, "__metadata__", ()):
            if not (isinstance(loss, type) and issubclass(loss, RouterLoss)):
                continue
            coef = getattr(values, name)
            if coef or loss.logged_at_zero:
                others = {f.name: getattr(values, f.name) for f in fields(loss) if f.name != "coef" and f.name in hints}
                losses.append(loss(coef, **others))
    return losses


def _without_json(hint: Any) -> Any:
    """The type of a field without the text that a command line's JSON is; `_from_json` has read it."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is not Annotated and any(
        isinstance(option, type) and issubclass(option, Declared) for option in options
    ):
        return typing.Union[tuple(option for option in options if option is not str)]  # noqa: UP007
    return hint


@cache
def settings_of(cls: type[StageConfig]) -> type[StageSettings]:
    """The class of a stage's settings in YAML, made from its configuration's own fields."""
    declared = {f.name: f for f in fields(cls)}
    keys: dict[str, Any] = {}
    for name, hint in own_fields(cls).items():
        f = declared[name]
        default = {"default": f.default} if f.default is not MISSING else {"default_factory": f.default_factory}
        keys[name] = (hint, Field(**default, description=f.metadata["help"]))
    made = pydantic.create_model(cls.__name__.replace("Config", "Settings"), __base__=StageSettings, **keys)
    made.__doc__ = cls.__doc__
    made.config_class = cls
    return made


@cache
def _argument_names() -> tuple[str, ...]:
    """The training arguments that a history records."""
    others = ("block_size", "output_dir", "seed", "data_seed", *PUBLISHED)  # a token is never recorded
    return tuple(f.name for f in fields(StageConfig) if f.init and f.name not in others)


@cache
def _default(name: str) -> Any:
    f = StageConfig.__dataclass_fields__[name]
    return f.default if f.default_factory is MISSING else f.default_factory()


def _from_json(value: Any) -> Any:
    """Reads a mapping that the command line gave as JSON."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise InputError(f"{value!r}: not a JSON object ({error.msg}).") from None
    return value.model_dump() if isinstance(value, Declared) else value


def _json(value: Any) -> Any:
    """Converts settings to mappings, and members of enumerations to their values."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    return value.model_dump() if isinstance(value, Declared) else getattr(value, "value", value)
