"""Makes typer's commands from functions: a signature is the arguments and options, a docstring the help.

Parameters before `*` are arguments, those after it options: `max_tokens` is `--max-tokens`, `json_` is `--json`, a bool
a switch. A parameter that is a settings class is an option for each key of the class. The help of an option stands
under `Args:` of the docstring, or comes with the parameter's type.
"""

import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from ..core.errors import InputError
from ..core.schema import MOST, Schema, read

Verb = Callable[..., None]
Parameters = dict[str, tuple[Any, Any]]  # type and default by name
# A parameter of this type gets the names of the options that the command line has.
Given = NewType("Given", frozenset[str])
_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class Kind:
    """What a type says of its parameters.

    Attributes:
        help: where the docstring has none.
        read: makes the parameter's value of what the command line gives, and of all of its values by name.
        given: the type on the command line, where it is another.
        metavar: the argument's name in the help.
    """

    help: str = ""
    read: Callable[[Any, Mapping[str, Any]], Any] | None = None
    given: Any = None
    metavar: str | None = None


@dataclass(frozen=True)
class Keys:
    """Of a settings class: keys without an option, and defaults in place of the class's own."""

    without: Collection[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _at_most(value: int, name: str) -> int:
    if abs(value) > MOST:
        raise InputError(f"{flag(name)} is {value}: must be at most {MOST:,}.")
    return value


def flag(name: str) -> str:
    return f"--{name.strip('_').replace('_', '-')}"


def as_command(verb: Verb, fixed: Mapping[str, Any] = {}) -> Verb:
    """The function that typer makes a command of.

    Args:
        fixed: values of parameters that are no options.
    """
    helps = described(verb)
    kinds: dict[str, tuple[Any, Kind]] = {}
    settings: dict[str, tuple[Any, Keys]] = {}
    parameters: Parameters = {}
    signature = inspect.signature(verb, eval_str=True).parameters
    for name, one in signature.items():
        hint, extra = _opened(one.annotation)
        if hint is Given or name in fixed:
            continue
        if isinstance(hint, type) and issubclass(hint, Schema):
            keys = extra if isinstance(extra, Keys) else Keys()
            settings[name] = (hint, keys)
            shown = {key: about for key, about in hint.model_fields.items() if key not in keys.without}
            parameters |= key_options(shown, keys.defaults, helps)
            continue
        kind = extra if isinstance(extra, Kind) else Kind()
        kinds[name] = (hint, kind)
        parameters[name] = _parameter(name, one, kind.given or hint, kind, helps.get(name) or kind.help)

    def command(context: typer.Context, **values: Any) -> None:
        arguments = {name: read(cls, _keys(cls, keys, values)) for name, (cls, keys) in settings.items()}
        for name, (hint, kind) in kinds.items():
            value = values[name]
            if value is None and signature[name].default is not _EMPTY:
                continue  # the function's own default
            if hint is int:
                _at_most(value, name)
            arguments[name] = kind.read(value, values) if kind.read else value
        seen = {name: given_options(context) for name, one in signature.items() if one.annotation is Given}
        verb(**arguments, **seen, **fixed)

    return with_parameters(command, parameters)


def _keys(cls: Any, keys: Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    return {**keys.defaults, **{key: values[key] for key in cls.model_fields if key not in keys.without}}


def given_options(context: typer.Context) -> frozenset[str]:
    """The names of the options and arguments that a command line has."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def described(verb: Verb) -> dict[str, str]:
    """The help of each parameter that the docstring describes."""
    _, _, arguments = (inspect.getdoc(verb) or "").partition("\n\nArgs:\n")
    return {
        name: sentence(text) for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    }


def sentence(text: str) -> str:
    """A description as a help: with a capital and a full stop."""
    text = " ".join(text.split()).removesuffix(".")
    is_file = "." in text.partition(" ")[0]
    return f"{text[:1] if is_file else text[:1].upper()}{text[1:]}."


def help_text(verb: Verb) -> str:
    return (inspect.getdoc(verb) or "").partition("\n\nArgs:\n")[0]


def _opened(hint: Any) -> tuple[Any, Any]:
    """A type without `Annotated` and without None, and what it is annotated with."""
    if get_origin(hint) in (types.UnionType, Union) and type(None) in get_args(hint):
        inner, *more = [part for part in get_args(hint) if part is not type(None)]
        return (hint, None) if more else (*_opened(inner)[:1], _opened(inner)[1])
    if get_origin(hint) is Annotated:
        return get_args(hint)[0], get_args(hint)[1]
    return hint, None


def _parameter(name: str, one: inspect.Parameter, hint: Any, kind: Kind, help: str) -> tuple[Any, Any]:
    """The type and the default of a parameter, for typer."""
    default = one.default
    if default is None or (default is not _EMPTY and (kind.given or get_origin(hint) is list)):
        hint, default = (hint | None), None
    if one.kind is not inspect.Parameter.KEYWORD_ONLY:
        return Annotated[hint, typer.Argument(metavar=kind.metavar, help=help)], default
    flags = f"{flag(name)}/--no{flag(name)[1:]}" if default is None and bool in get_args(hint) else flag(name)
    return Annotated[hint, typer.Option(flags, help=help)], default


def key_options(
    keys: Mapping[str, FieldInfo],
    defaults: Mapping[str, Any] = {},
    helps: Mapping[str, str] = {},
) -> Parameters:
    """The option `--key VALUE` for each key of a settings class, with a type that has no bounds: the class checks."""
    options: Parameters = {}
    for name, key in keys.items():
        default = _EMPTY if key.is_required() else key.default
        option = typer.Option(flag(name), help=helps.get(name) or sentence(key.description or ""))
        options[name] = (Annotated[_plain(key.annotation), option], defaults.get(name, default))
    return options


def _plain(hint: Any) -> Any:
    """The type for the command line, without bounds."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is list:  # an option that is repeated
        return list[_plain(get_args(hint)[0])]  # type: ignore[misc]
    if get_origin(hint) in (types.UnionType, Union):
        return Union[tuple(_plain(part) for part in get_args(hint))]  # noqa: UP007
    return hint


def with_parameters(command: Verb, parameters: Parameters) -> Verb:
    """The function with a context and these parameters, of which typer makes arguments and options."""
    hints = {"context": typer.Context, **{name: hint for name, (hint, _) in parameters.items()}}
    defaults = {name: default for name, (_, default) in parameters.items()}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=defaults.get(name, _EMPTY))
            for name, hint in hints.items()
        ]
    )
    command.__annotations__ = hints
    return command


def without_effect(given: Given, beside: str, *taken: str) -> None:
    """Refuses options of the command line that have no effect beside the option `beside`.

    Args:
        taken: names of the options and arguments that have one.
    """
    if idle := sorted(given - {*taken}):
        raise InputError(f"{flag(idle[0])} has no effect beside {beside}: leave it out.")


def belongs(given: Given, to: str, *names: str) -> None:
    """Refuses options of the command line whose owner, the option `to`, it does not have."""
    if to not in given and (idle := [name for name in names if name in given]):
        raise InputError(f"{flag(idle[0])} belongs to {flag(to)}, which is not given.")
