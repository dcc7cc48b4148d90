"""The keywords of a stage: their types in YAML, which has numbers of its own, and their form in a history."""

import math
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, field
from enum import Enum
from typing import Annotated, Any, Literal, Union

from accelerate import ParallelismConfig
from pydantic import AllowInfNan, BeforeValidator, Field, PlainValidator
from pydantic_core import to_jsonable_python
from transformers.training_args import trainer_log_levels

from ..core.errors import InputError
from ..core.extensions import extensions
from ..core.jsonfile import parse_json
from ..core.schema import Coefficient, Count, Flag, Number, Positive, Schema, Text, Whole, read, unknown_key
from ..trainers.router_losses import CHECKPOINTING


def from_json(value: Any) -> Any:
    """Reads a mapping that a command line gave as JSON."""
    if not (isinstance(value, str) and value.startswith("{")):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise InputError(f"{value!r}: not a JSON object ({error}).") from None


_OPTIONS = (f"{CHECKPOINTING}_kwargs", "lr_scheduler_kwargs", "liger_kernel_config")
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
    **dict.fromkeys(_OPTIONS, Annotated[dict | None, BeforeValidator(from_json)]),
    **dict.fromkeys(("log_level", "log_level_replica"), Literal[tuple(trainer_log_levels)]),  # type: ignore[misc]
}
# The library's fields that take more than their types say.
LOOSE: dict[str, Any] = {"fsdp": Flag | Text | list[Text] | None}
_STRICT = {int: Whole, float: Annotated[Number, AllowInfNan(False)], bool: Flag, str: Text, type(None): type(None)}


class Help(str):
    """The description of a field that a stage declares with `setting`."""


def setting(default: Any, help: str) -> Any:
    """A field of a stage: its default, and its description for documentation and `--help`.

    A stage trains on the losses that the types of its fields name: `Annotated[Coefficient, BalanceLoss]`.
    """
    kind = "default_factory" if isinstance(default, type) else "default"
    return field(**{kind: default}, metadata={"help": Help(help)})


def mapping(cls: type[Schema]) -> Any:
    """Marks the type of a field that holds settings of a class: they are read from a mapping, or from a command line's
    JSON. `Annotated[Masking | str | None, mapping(Masking)]`."""

    def checked(value: Any) -> Any:
        value = from_json(value)
        return value if value is None or isinstance(value, cls) else read(cls, value)

    return PlainValidator(checked, json_schema_input_type=cls | None)


def known_losses(value: Any) -> dict[str, float]:
    """The weights of registered losses, by name; refuses other names."""
    weights, known = from_json(value or {}), extensions("losses")
    if not isinstance(weights, Mapping):
        raise InputError(f"must hold `name: weight` lines, found {weights!r}.")
    for name, weight in weights.items():
        if name not in known:
            raise InputError(unknown_key(name, known) if known else f"{name!r}: no package registers a loss.")
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
    if any(option is dict or typing.get_origin(option) is dict for option in options):
        return Annotated[Any, BeforeValidator(_text_or_mapping)]
    return Any if ParallelismConfig in options else hint


def _text_or_mapping(value: Any) -> Any:
    if not isinstance(value, str | Mapping | None):
        raise InputError(f"{value!r} is neither a file nor a mapping; give one of these.")
    return value


def flat(keywords: dict[str, Any], nested: Any) -> dict[str, Any]:
    """A stage whose training arguments stand under `training`, as earlier releases wrote it."""
    if not isinstance(nested, Mapping):
        raise InputError(f"training: expected `key: value` lines, found {nested!r}.")
    if both := sorted(set(keywords) & set(nested)):
        raise InputError(f"`{both[0]}` is given twice, under `training` too: leave one out.")
    shown = ", ".join(f"{name}: {value}" for name, value in nested.items())
    warnings.warn(
        f"a stage's `training:` is read, but no longer needed: write its keys beside the others ({shown}).",
        FutureWarning, stacklevel=2,
    )  # fmt: skip
    return {**keywords, **nested}


@contextmanager
def refused_by_the_library(where: str = "") -> Iterator[None]:
    """Turns the errors of `TrainingArguments` and its like into an InputError."""
    try:
        yield
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{where}{error} is not a known value of its key.") from None
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, AttributeError) as error:
        raise InputError(f"{where}{error}") from None


def default_of(f: Any) -> dict[str, Any]:
    """The default of a dataclass's field, as an argument of `field`."""
    return {"default": f.default} if f.default_factory is MISSING else {"default_factory": f.default_factory}


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
