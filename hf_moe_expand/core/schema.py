"""Declares settings once: the annotations of a `Schema` model, or of a function that is `checked`, are the check, the
JSON schema and the documentation."""

import difflib
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, wraps
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, model_validator

from .errors import InputError, errors_at

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

T = TypeVar("T")
D = TypeVar("D", bound="Schema")
F = TypeVar("F", bound=Callable[..., Any])


def _whole(value: Any) -> Any:
    """Converts whole floats such as YAML's `1e5` to integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


MOST = 10**15  # of every count and amount: larger ones overflow what takes them, if they fit any machine at all
Whole = Annotated[int, Strict(), Field(le=MOST), BeforeValidator(_whole)]
Number = Annotated[float, Strict()]
Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Count = Annotated[Whole, Field(ge=1)]
Coefficient = Annotated[Number, Field(ge=0), AllowInfNan(False)]
Positive = Annotated[Number, Field(gt=0), AllowInfNan(False)]
Times = Annotated[Number, Field(gt=0, le=MOST), AllowInfNan(False)]
Share = Annotated[Number, Field(ge=0, le=1)]
Probability = Annotated[Number, Field(ge=0, lt=1)]


class _Checked(ModelMetaclass):
    """Lets a model's constructor take positions, in the order of its fields, and raise InputError, as `read` does."""

    model_fields: dict[str, Any]

    def __call__(cls, *args: Any, **values: Any) -> Any:
        names = list(cls.model_fields)
        if len(args) > len(names):
            raise TypeError(f"{cls.__name__} takes at most {len(names)} arguments, but {len(args)} were given.")
        placed = dict(zip(names, args, strict=False))
        try:
            return super().__call__(**placed, **values)
        except pydantic.ValidationError as error:
            raise InputError(_explained(error, placed | values)) from None


class Schema(BaseModel, metaclass=_Checked):
    """A frozen pydantic model whose errors are InputErrors."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _with_known_keys(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and cls.model_config.get("extra") == "forbid":
            check_keys(value, cls.model_fields)
        return value


def changed(value: D, **changes: Any) -> D:
    """A copy of settings with some fields changed, checked again; a field that was not given stays so."""
    return type(value)(**{**{name: inner for name, inner in value if name in value.model_fields_set}, **changes})


def read(cls: type[T], mapping: Any, where: str = "", context: Mapping[str, Any] | None = None) -> T:
    """An instance of a settings class from a mapping, all of it checked. Messages begin with `where`: a file or a key.
    The validators of types may ask for the `context`."""
    if not isinstance(mapping, Mapping):
        raise InputError(f"{_place(where)}must hold `key: value` lines, found {_found(mapping)}.")
    try:
        return _adapter(cls).validate_python(dict(mapping), context=context)  # type: ignore[arg-type]
    except pydantic.ValidationError as error:
        raise InputError(_explained(error, mapping, where)) from None


def checked(function: F, keywords: type[BaseModel] | None = None) -> F:
    """Lets a public function, a class method, or a class's constructor, refuse an argument of another type than the
    annotated one. `keywords` are settings whose keys the function takes, too."""
    called = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    signature = inspect.signature(called)
    if keywords is not None:
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        keys = keywords.model_fields.items()
        kind = inspect.Parameter.KEYWORD_ONLY
        further = [inspect.Parameter(n, kind, default=k.get_default(), annotation=k.annotation) for n, k in keys]
        signature = signature.replace(parameters=[*own, *further])
    named = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
    hints = cache(lambda: typing.get_type_hints(called, include_extras=True))

    @wraps(called)
    def call(*args: Any, **given_keywords: Any) -> Any:
        given = signature.bind(*args, **given_keywords).arguments
        owner = args[0].__name__ + "." if "cls" in named else ""
        with errors_at(type(args[0]).__name__ if "self" in named else owner + function.__name__):
            check_types({name: given[name] for name in named if name in given}, hints())
        return called(*args, **given_keywords)

    call.__signature__ = signature  # type: ignore[attr-defined]
    if not isinstance(function, type):
        return call  # type: ignore[return-value]
    function.__init__ = call  # type: ignore[misc]
    return function


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Refuses a value that is not of the type of its name."""
    for name, hint in hints.items():
        if name in values and not _fits(values[name], hint):
            raise InputError(f"{name} is {shown_value(values[name])}: must be {_in_words(hint)}.")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type. Numbers of numpy count; a text is no sequence of texts; iterators stay unread."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, TypeVar):
        return _fits(value, hint.__bound__ or Any)
    if hint is Any:
        return True
    if origin is Annotated:
        return _fits(value, inner[0])
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    if origin in (Collection, Iterable, Sequence) and (isinstance(value, str) or hasattr(value, "__array__")):
        return not isinstance(value, str)
    if not isinstance(value, origin or hint):
        return False
    if isinstance(value, Mapping) and len(inner) == 2:
        return all(_fits(key, inner[0]) and _fits(one, inner[1]) for key, one in value.items())
    if isinstance(value, list | tuple | set) and inner:
        of_each = inner if origin is tuple and ... not in inner else inner[:1] * len(value)
        return len(of_each) == len(value) and all(map(_fits, value, of_each))
    if isinstance(value, Iterable) and inner and iter(value) is not value:  # such as a column of a data set
        return all(_fits(one, inner[0]) for one in islice(value, 1))
    return True


def shown_value(value: Any) -> str:
    """A wrong value in a message: a short one itself, any other's type."""
    is_short = value is None or isinstance(value, str | numbers.Number | list | tuple | set | dict | PathLike)
    return _short(repr(value)) if is_short else f"of type {type(value).__name__}"


def _in_words(hint: Any) -> str:
    """A type as its annotation, without the names of modules."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union, Literal):
        return " or ".join(map(_in_words, typing.get_args(hint)))
    words = repr(hint) if isinstance(hint, str) else inspect.formatannotation(hint)
    return "None" if hint is type(None) else re.sub(r"[a-z_]\w*\.", "", words)


def check_seed(seed: int | None, name: str = "seed") -> None:
    """Refuses a seed that the generators of random numbers do not take."""
    if seed is not None and not 0 <= seed < 2**32:
        raise InputError(f"{name} is {seed}: must be at least 0 and below 2 ** 32.")


def json_schema(cls: type) -> dict[str, Any]:
    """The JSON schema of a settings class, for editors."""
    return _in_json_words(_adapter(cls).json_schema())


_JSON_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def _in_json_words(value: Any) -> Any:
    """Bounds of numbers under JSON schema's names: pydantic keeps its own names if a validator runs first."""
    if isinstance(value, dict):
        bounded = value.get("type") in ("integer", "number")
        return {_JSON_BOUNDS.get(k, k) if bounded else k: _in_json_words(v) for k, v in value.items()}
    return [_in_json_words(item) for item in value] if isinstance(value, list) else value


def loosened(schema: Any) -> Any:
    """A JSON schema for values that are merged into others: no key must be given, and null stands for any key."""
    if isinstance(schema, list):
        return [loosened(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    loose = {word: loosened(part) for word, part in schema.items() if word not in ("required", "discriminator")}
    if "oneOf" in loose:  # without its tag a value may be any of them
        loose["anyOf"] = loose.pop("oneOf")
    keys = loose.get("properties", {})
    loose |= {"properties": {key: _or_null(part) for key, part in keys.items()}} if keys else {}
    if isinstance(loose.get("additionalProperties"), dict):
        loose["additionalProperties"] = _or_null(loose["additionalProperties"])
    elif any("const" in part for part in keys.values()):
        loose["additionalProperties"] = {"type": "null"}  # which takes out the keys of another tag
    return loose


def _or_null(part: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key that may be null; a tag may not."""
    about: dict[str, Any] = {word: part[word] for word in ("description", "default") if word in part}
    return part if "const" in part else {**about, "anyOf": [part, {"type": "null"}]}


def check_keys(mapping: Mapping[Any, Any], known: Iterable[str], shown: int | None = None, others: str = "") -> None:
    """Refuses an unknown key, with the nearest known one, or the first `shown` of them and what the `others` are."""
    known = list(known)
    for key in (str(key) for key in mapping if key not in known):
        near = difflib.get_close_matches(key, known[:shown], 1) or difflib.get_close_matches(key, known, 1)
        hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known[:shown])}{others}."
        raise InputError(f"unknown key `{key}`; {hint}")


@cache
def _adapter(cls: type) -> TypeAdapter:
    return TypeAdapter(cls)


def settings_in(hint: Any) -> list[type]:
    """The settings classes among the types that a hint allows."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Annotated, types.UnionType, typing.Union):
        return [cls for part in (inner[:1] if origin is Annotated else inner) for cls in settings_in(part)]
    return [hint] if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, BaseModel)) else []


def _explained(error: pydantic.ValidationError, given: Mapping[str, Any], where: str = "") -> str:
    """pydantic's words on the mistake that lies deepest, in one sentence; for a union, on each of its types."""
    found = [(_path_in(given, entry), entry) for entry in error.errors(include_url=False)]
    path, first = max(found, key=lambda one: len(one[0]))
    if first["type"] == "value_error":
        return f"{_place(where, path)}{first['ctx']['error']}"
    words = dict.fromkeys(entry["msg"] for place, entry in found if place == path)
    wanted = " or ".join(words).replace(" or Input should be ", " or ")
    shown = "" if first["type"] == "missing" else f", found {_found(first['input'])}"
    return f"{_place(where, path)}{wanted}{shown}."


def _path_in(given: Any, entry: Any) -> tuple[Any, ...]:
    """The keys of an error's location, without the names of types and validators that pydantic inserts."""
    path: list[Any] = []
    for part in entry["loc"]:
        if (isinstance(given, Mapping) and part in given) or (isinstance(given, list) and isinstance(part, int)):
            path, given = [*path, part], given[part]
    return (*path, entry["loc"][-1]) if entry["type"] == "missing" else tuple(path)


def _found(value: Any) -> str:
    return type(value).__name__ if isinstance(value, Mapping | list) else _short(repr(value))


def _short(shown: str) -> str:
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def _place(where: str, path: Sequence[Any] = ()) -> str:
    """The prefix of a message: file and key."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    glue = ": " if "/" in where or "." in where else "."
    return f"{glue.join(filter(None, (where, key)))}: " if where or key else ""
