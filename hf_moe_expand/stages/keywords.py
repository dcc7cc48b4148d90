"""A stage's keywords: `TrainingArguments` with fields of its own, checked in Python and in YAML."""

import copy
import math
import os
import re
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Self, Union

import torch
from accelerate import ParallelismConfig
from pydantic import AllowInfNan, BeforeValidator, Field, GetCoreSchemaHandler, PlainValidator
from pydantic_core import core_schema, to_jsonable_python
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import trainer_log_levels

from ..core.errors import InputError, library_errors_at
from ..core.extensions import extensions
from ..core.jsonfile import parse_json
from ..core.schema import (
    Coefficient,
    Count,
    Flag,
    Number,
    Positive,
    Schema,
    Text,
    Whole,
    check_keys,
    check_seed,
    check_types,
    read,
)
from ..trainers.bfloat16 import NO_BFLOAT16, has_bfloat16
from ..trainers.router_losses import CHECKPOINTING, CHECKPOINTING_NAMES
from .distributed import SHARDING, check_sharding

_STRICT = {int: Whole, float: Annotated[Number, AllowInfNan(False)], bool: Flag, str: Text, type(None): type(None)}
# What a run sets itself, with the arguments on which the losses rely.
_SET: dict[str, Any] = {
    "output_dir": str | os.PathLike | None, "seed": int, "data_seed": int | None, "remove_unused_columns": bool,
    "label_names": list[str] | None,
}  # fmt: skip
_SCORED = ("eval_strategy", "do_eval", "eval_on_start", "load_best_model_at_end")
_PUBLISHED = ("push_to_hub", "hub_token", "hub_model_id", "hub_strategy", "hub_private_repo")  # a token is a secret
_CHECKPOINTING = re.compile(f"^({'|'.join(CHECKPOINTING_NAMES)})(?=$|_kwargs$)")
_ALIASES = [f"{name}{end}" for name in CHECKPOINTING_NAMES if name != CHECKPOINTING for end in ("", "_kwargs")]
# The context of a reading of fields that are at hand, in which no object is made.
_FIELDS = {"unset_ok": True}


def from_json(value: Any) -> Any:
    """Reads a mapping that a command line gave as JSON."""
    if not (isinstance(value, str) and value.startswith("{")):
        return value
    with library_errors_at(repr(value), ValueError):
        return parse_json(value)


# The library's fields with bounds that its training loop needs, or that its types do not say.
BOUNDED: dict[str, Any] = {
    "gradient_accumulation_steps": Count,
    "dataloader_num_workers": Annotated[Whole, Field(ge=0)] | None,
    "max_grad_norm": Coefficient,
    "weight_decay": Coefficient,
    "save_steps": Positive,
    "logging_steps": Positive,
    "max_steps": Annotated[Whole, Field(ge=-1)],
    "warmup_steps": Coefficient,
    **dict.fromkeys(
        (f"{CHECKPOINTING}_kwargs", "lr_scheduler_kwargs", "liger_kernel_config"),
        Annotated[dict | None, BeforeValidator(from_json)],
    ),
    **dict.fromkeys(("log_level", "log_level_replica"), Literal[tuple(trainer_log_levels)]),  # type: ignore[misc]
}
# The library's fields that take more than their types say; in Python, it replaces those of `_REPLACED` by objects.
LOOSE: dict[str, Any] = {"fsdp": Flag | Text | list[Text] | None}
_REPLACED = (*LOOSE, "accelerator_config", "debug")


class Help(str):
    """The description of a field that a stage declares with `setting`."""


def setting(default: Any, help: str) -> Any:
    """A field of a stage: its default, and its description for documentation and `--help`. A stage trains on the losses
    that the types of its fields name: `Annotated[Coefficient, BalanceLoss]`."""
    kind = "default_factory" if isinstance(default, type) else "default"
    return field(**{kind: default}, metadata={"help": Help(help)})


def mapping(cls: type[Schema]) -> Any:
    """Marks the type of a field that holds settings of a class, read from a mapping or from JSON:
    `Annotated[Masking | str | None, mapping(Masking)]`."""

    def checked(value: Any) -> Any:
        value = from_json(value)
        return value if value is None or isinstance(value, cls) else read(cls, value)

    return PlainValidator(checked, json_schema_input_type=cls | None)


def known_losses(value: Any) -> dict[str, float]:
    """The weights of registered losses, by name."""
    weights = from_json(value or {})
    if not isinstance(weights, Mapping):
        raise InputError(f"must hold `name: weight` lines, found {weights!r}.")
    check_keys(weights, extensions("losses"))
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise InputError(f"{name} is {weight!r}: must be a number of at least 0.")
    return dict(weights)


def strict(hint: Any) -> Any:
    """A field's type for YAML, which has numbers of its own: text is no number. Members of an enumeration are read by
    their values."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if isinstance(option, type) and issubclass(option, Enum):
            values = Literal[tuple(member.value for member in option)]  # type: ignore[valid-type]
            return Annotated[values, BeforeValidator(lambda value: "no" if value is False else value)]  # in YAML 1.1
    if all(option in _STRICT for option in options):
        return Union[tuple(_STRICT[option] for option in options)]  # type: ignore[return-value]  # noqa: UP007
    return Any if ParallelismConfig in options else hint


def default_value(f: Any) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def plain(value: Any) -> Any:
    """Members of enumerations as their values."""
    return value.value if isinstance(value, Enum) else value


def as_json(value: Any) -> Any:
    """Settings and other objects as mappings, members of enumerations as their values, and numbers that JSON does not
    have as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return to_jsonable_python(value, fallback=lambda one: one.item() if hasattr(one, "item") else str(one))


def flat(keywords: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A stage's keywords, without the `training` under which version 0.1 had the library's."""
    if "training" not in keywords:
        return keywords
    others = {name: value for name, value in keywords.items() if name != "training"}
    nested = keywords["training"]
    if not isinstance(nested, Mapping) or set(nested) & set(others):
        raise InputError(f"training: expected keys that are not given beside it too, found {nested!r}.")
    shown = ", ".join(f"{name}: {value}" for name, value in nested.items())
    said = f"a stage's `training:` is read, but no longer needed: write its keys beside the others ({shown})."
    warnings.warn(said, FutureWarning, stacklevel=2)
    return {**others, **nested}


@dataclass
class CheckedArguments(TrainingArguments):
    """`TrainingArguments` whose values are checked, in Python and in YAML, with fields of a subclass's own."""

    _VALID_DICT_FIELDS = (*TrainingArguments._VALID_DICT_FIELDS, SHARDING)  # type: ignore[assignment]

    distributed_config: dict | str | None = field(
        default=None, metadata={"help": "how transformers itself splits the model over ranks, such as {fsdp_size: 8}"}
    )

    def __post_init__(self) -> None:
        cls = type(self)
        for name in cls._VALID_DICT_FIELDS:
            if isinstance(value := from_json(getattr(self, name)), dict):
                setattr(self, name, dict(value))  # the library adds keys to its own
        check_types(vars(self), {**_SET, "parallelism_config": ParallelismConfig | None})  # which no YAML can hold
        others = [name for name in self._unlike("") if name in cls.keyword_types() and name not in _REPLACED]
        values = {name: plain(getattr(self, name)) for name in (*own_fields(cls), *BOUNDED, *others)}
        checked: Any = read(cls, values, context=_FIELDS)
        vars(self).update(checked)
        self.report_to = "none" if self.report_to is None else self.report_to
        self.data_seed = self.seed if self.data_seed is None else self.data_seed
        self.use_cpu = not torch.accelerator.is_available() if self.use_cpu is None else self.use_cpu
        check_seed(self.seed)
        check_seed(self.data_seed, "data_seed")
        self._check_arguments()
        self.distributed_state = None  # until a device is asked for
        here = {name: getattr(self, name) for name in ("deepspeed", "tf32", "use_cpu", "dataloader_pin_memory")}
        vars(self).update(deepspeed=None, tf32=None, use_cpu=True, _setup_devices=torch.device("cpu"))
        self._as_the_library_has_it()
        vars(self).update(here)
        del vars(self)["_setup_devices"]
        if self.use_cpu:
            self.dataloader_pin_memory = False

    def _as_the_library_has_it(self) -> None:
        """Has the library check the arguments, and fill in its own defaults."""
        workers = self.dataloader_num_workers
        self.dataloader_num_workers = workers or 0
        with library_errors_at("TrainingArguments"):
            TrainingArguments.__post_init__(self)
        self.dataloader_num_workers = workers

    def _check_arguments(self) -> None:
        """Refuses arguments that contradict one another, or give no step."""
        if self.distributed_config is not None:
            check_sharding(self.distributed_config, self._unlike("save_") if plain(self.save_strategy) != "no" else ())
            self.save_strategy = "no"
        if self.max_steps == 0 or (self.max_steps < 0 and not self.num_train_epochs):
            raise InputError("max_steps and num_train_epochs give no step: set one of them above 0.")

    def _unlike(self, *starts: str) -> list[str]:
        """The fields with other values than their defaults, of those whose names start so."""
        changed = (f.name for f in fields(self) if f.init and getattr(self, f.name) != default_value(f))
        return [name for name in changed if name.startswith(starts)]

    def begun(self, **changes: Any) -> Self:
        """A copy, with these changes, that is set up for this machine: its devices, its types and DeepSpeed."""
        made = copy.copy(self)
        vars(made).update(changes)
        made.accelerator_config = copy.copy(self.accelerator_config)  # the library takes fields out of it
        made._as_the_library_has_it()
        if made.bf16 and not has_bfloat16():
            warnings.warn(f"{NO_BFLOAT16}leave `bf16: true` out here, or give `fp16: true` on a GPU.", stacklevel=3)
        return made

    def check_alone(self) -> None:
        """Refuses keywords for what a run does itself, where no Trainer is at hand that could do it."""
        for name in self._unlike(*_SCORED):
            if plain(getattr(self, name)) != "no":
                raise InputError(f"leave `{name}` out; held-out text is scored by `validation`.")
        for name in self._unlike(*_PUBLISHED):
            if plain(getattr(self, name)) != plain(default_value(self.__dataclass_fields__[name])):
                raise InputError(f"leave `{name}` out; `hf-moe-expand push` publishes the finished checkpoint.")
        if self.save_strategy == SaveStrategy.BEST:
            raise InputError("save_strategy is 'best', but a stage scores no checkpoints: leave it out.")
        if self.save_only_model:
            raise InputError("leave `save_only_model` out; an interrupted run could not resume exactly.")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """In YAML: a mapping of keywords."""
        own, keys = own_fields(cls), {}
        for name, hint in cls.keyword_types().items():
            f = cls.__dataclass_fields__[name]
            shown = {"default": plain(f.default)} if name in own and f.default is not MISSING else {}
            about = f.metadata.get("help", "an argument of transformers.TrainingArguments").partition(". ")[0]
            hint = Annotated[hint, Field(description=about, json_schema_extra=shown)]
            keys[name] = core_schema.typed_dict_field(handler.generate_schema(hint), required=False)
        return core_schema.with_info_wrap_validator_function(
            cls._read,
            core_schema.typed_dict_schema(keys, extra_behavior="forbid"),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda stage: stage.keywords()),
        )

    @classmethod
    def _read(cls, value: Any, handler: Callable[[Any], dict[str, Any]], info: Any) -> Any:
        if isinstance(value, cls):
            return value
        if info.context is _FIELDS:
            return handler(value)
        if isinstance(value, Mapping):
            value = flat(value)
            if name := next((name for name in _SET if name in value), None):
                raise InputError(f"`{name}` is set by hf-moe-expand; leave it out.")
            names = {key: _CHECKPOINTING.sub(CHECKPOINTING, str(key)) for key in value}
            if both := [key for key, name in names.items() if name != key and name in value]:
                raise InputError(f"`{both[0]}` is another name of `{names[both[0]]}`, which is given too.")
            value = {name: value[key] for key, name in names.items()}
            check_keys(value, cls.keyword_types(), len(own_fields(cls)), " and those of transformers.TrainingArguments")
        made = cls(**handler(value))
        made.check_alone()
        return made

    @classmethod
    @cache
    def keyword_types(cls) -> dict[str, Any]:
        """The type of each keyword in YAML, the stage's own first."""
        hints, own = typing.get_type_hints(cls, include_extras=True), own_fields(cls)
        others = [f.name for f in fields(cls) if f.init and f.name not in (*own, *_SET)]
        return {name: BOUNDED.get(name) or LOOSE.get(name) or strict(hints[name]) for name in (*own, *others)}

    def changes(self) -> dict[str, Any]:
        """The fields that have other values than those of a configuration without keywords."""
        names = [f.name for f in fields(self) if f.init and f.name not in _ALIASES]
        usual = type(self)()
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(usual, name)}

    @property
    def says_when_to_save(self) -> bool:
        """Whether training checkpoints are saved by `save_steps` or `save_strategy`, and not by the clock."""
        return bool(self._unlike("save_steps")) or plain(self.save_strategy) != "steps"

    def keywords(self) -> dict[str, Any]:
        """The keywords of YAML that make the same configuration, as JSON."""
        return {name: as_json(value) for name, value in self.changes().items() if name not in _SET}

    def recorded(self) -> dict[str, Any]:
        """The stage's settings for its history, JSON: its declared fields, and all others that are not as usual."""
        left_out = ("output_dir", "seed", "data_seed", *_PUBLISHED)  # places and secrets; the seed has its own place
        settings = {**self.changes(), **self._own()}
        return {name: as_json(value) for name, value in settings.items() if name not in left_out}

    def to_dict(self) -> dict[str, Any]:
        """As `TrainingArguments.to_dict`, with the stage's own fields: JSON."""
        return {**super().to_dict(), **{name: as_json(value) for name, value in self._own().items()}}

    def _own(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in own_fields(type(self))}


def own_fields(cls: Any) -> dict[str, Any]:
    """The fields that a stage declares with `setting`, by name; those of the library last."""
    declared = [f for f in fields(cls) if isinstance(f.metadata.get("help"), Help)]
    return {f.name: f for f in sorted(declared, key=lambda f: f.name in TrainingArguments.__dataclass_fields__)}
