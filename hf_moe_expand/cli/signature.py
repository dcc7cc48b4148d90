"""Makes typer's commands from functions: a signature is the arguments and options, a docstring the help.

Parameters before `*` are arguments, those after it options: `max_tokens` is `--max-tokens`, `json_` is `--json`, a bool
a switch. A parameter that is a settings class is an option for each key of the class. The help of an option stands
under `Args:` of the docstring, or comes with the parameter's type.
"""

import inspect
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from ..core.errors import InputError
from ..core.schema import MOST, Schema, check_seed, read
from ..core.verbs import Given, Keys, Kind, Verb, flag

# The help of parameters that many verbs have.
_COMMON = {
    "allow_lost_text": "Take text of which the tokenizer loses more than 2 % of the bytes, too.",
    "max_shard_size": "Size of the largest weight file.",
    "overwrite": "Replace the output if it exists.",
    "revision": "Revision of a hub id.",
    "seed": "Random seed.",
}
Parameters = dict[str, tuple[Any, Any]]  # type and default by name
_EMPTY = inspect.Parameter.empty


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
        about = helps.get(name) or kind.help or _COMMON.get(name, "")
        parameters[name] = _parameter(name, one, kind.given or hint, kind, about)
    if any(kind.is_file for _, kind in kinds.values()) and "overwrite" not in parameters:
        parameters["overwrite"] = (Annotated[bool, typer.Option("--overwrite", help=_COMMON["overwrite"])], False)

    def command(context: typer.Context, **values: Any) -> None:
        arguments = {name: read(cls, _keys(cls, keys, values)) for name, (cls, keys) in settings.items()}
        for name, (hint, kind) in kinds.items():
            value = values[name]
            if value is None and signature[name].default is not _EMPTY:
                continue  # the function's own default
            if name == "seed":
                check_seed(value)
            elif hint is int and abs(value) > MOST:
                raise InputError(f"{flag(name)} is {value}: must be at most {MOST:,}.")
            arguments[name] = kind.read(value, values) if kind.read else value
        seen = {name: given_options(context) for name, one in signature.items() if one.annotation is Given}
        verb(**arguments, **seen, **fixed)

    return with_parameters(command, parameters)


def _keys(cls: Any, keys: Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a settings class, from the options."""
    given = dict(keys.defaults)
    for name, key in cls.model_fields.items():
        if name in keys.without:
            continue
        if not (options := _options(key)):
            given[name] = values[name]
            continue
        flags = [option.flag for option in options]
        answers = [(option, values[_name(option)]) for option in options]
        chosen = [option.value(value) for option, value in answers if value is not None and value is not False]
        if len(chosen) > 1:
            raise InputError(f"{' and '.join(flags)}: give only one of them.")
        if chosen:
            given[name] = chosen[0]
        elif key.is_required():
            raise InputError(f"Give {' or '.join(flags)}.")
    return given


def _options(key: FieldInfo) -> list[Any]:
    """The options of a key that `--key VALUE` does not suit (`planning.methods.Option`)."""
    return [part for part in key.metadata if hasattr(part, "flag")]


def _name(option: Any) -> str:
    return option.flag.removeprefix("--").replace("-", "_")


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
    return list[get_args(hint)] if get_origin(hint) is Sequence else hint, None  # type: ignore[misc]


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
    """The option `--key VALUE` for each key of a settings class, with a type that has no bounds: the class checks; or
    the key's own options."""
    options: Parameters = {}
    for name, key in keys.items():
        for own in _options(key):
            hint, unset = (bool, False) if own.kind is bool else (own.kind | None, None)
            options[_name(own)] = (Annotated[hint, typer.Option(own.flag, help=own.help)], unset)
        if _options(key):
            continue
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
