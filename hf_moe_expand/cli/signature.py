"""Makes typer's commands from functions: a signature is the arguments and options, a docstring the help.

Parameters before `*` are arguments, those after it options: `max_tokens` is `--max-tokens`, `json_` is `--json`, a bool
a switch. A parameter that is a settings class is an option for each key of the class. The help of an option stands
under `Args:` of the docstring, or comes with the parameter's type.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from ..core.errors import InputError
from ..core.schema import MOST, Schema, check_seed, read
from ..core.verbs import Given, Keys, Kind, Verb, flag

# The help of parameters that many verbs have.
_COMMON = {
    "allow_lost_text": "Take text of which the tokenizer loses more than 2 % of the bytes, too.",
    "overwrite": "Replace the output if it exists.",
    "revision": "Revision of a hub id.",
    "seed": "Random seed.",
}
_EMPTY = inspect.Parameter.empty


def as_command(verb: Verb, fixed: Mapping[str, Any] = {}, types: Mapping[str, Any] = {}) -> Verb:
    """The function that typer makes a command of.

    Args:
        fixed: values of parameters that are no options.
        types: of parameters, in place of those that the verb states.
    """
    helps = _COMMON | described(verb)
    signature = inspect.signature(verb, eval_str=True).parameters
    kinds: dict[str, tuple[Any, Kind]] = {}
    settings: dict[str, tuple[type[Schema], Keys]] = {}
    options = [_parameter("context", typer.Context)]
    for name, one in signature.items():
        hint, extra = _opened(types.get(name, one.annotation))
        if hint is Given or name in fixed:
            continue
        if isinstance(hint, type) and issubclass(hint, Schema):
            settings[name] = hint, extra or Keys()
            options += _key_options(*settings[name], helps)
        else:
            kinds[name] = hint, extra or Kind()
            options.append(_option(one, *kinds[name], helps))
    if any(kind.is_file for _, kind in kinds.values()) and "overwrite" not in signature:
        options.append(_parameter("overwrite", bool, typer.Option("--overwrite", help=helps["overwrite"]), False))

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
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")
        seen = {name: given for name, one in signature.items() if one.annotation is Given}
        verb(**arguments, **seen, **fixed)

    by_name = {one.name: one for one in options}  # a key's own option may answer a parameter, too
    command.__signature__ = inspect.Signature([*by_name.values()])  # type: ignore[attr-defined]
    return command


def described(verb: Verb) -> dict[str, str]:
    """The help of each parameter that the docstring describes."""
    _, _, arguments = (inspect.getdoc(verb) or "").partition("\n\nArgs:\n")
    return {
        name: _sentence(text) for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    }


def help_text(verb: Verb) -> str:
    """The docstring without its `Args:`."""
    return (inspect.getdoc(verb) or "").partition("\n\nArgs:\n")[0]


def _sentence(text: str) -> str:
    """A description as a help: with a capital and a full stop."""
    text = " ".join(text.split()).removesuffix(".")
    is_file = "." in text.partition(" ")[0]
    return f"{text[:1] if is_file else text[:1].upper()}{text[1:]}."


def _parameter(name: str, hint: Any, info: Any = None, default: Any = _EMPTY) -> inspect.Parameter:
    """A parameter for typer; `info` is its argument or option."""
    hint = hint if info is None else Annotated[hint, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)


def _opened(hint: Any) -> tuple[Any, Any]:
    """A type without `Annotated` and without None, and the `Kind` or `Keys` that it is annotated with."""
    if get_origin(hint) in (UnionType, Union) and type(None) in get_args(hint):
        inner, *more = [part for part in get_args(hint) if part is not type(None)]
        return (hint, None) if more else _opened(inner)
    if get_origin(hint) is Annotated:
        return get_args(hint)[:2]
    return list[get_args(hint)] if get_origin(hint) is Sequence else hint, None  # type: ignore[misc]


def _option(one: inspect.Parameter, hint: Any, kind: Kind, helps: Mapping[str, str]) -> inspect.Parameter:
    """The argument or option of a verb's parameter."""
    hint, default, help = kind.given or hint, one.default, helps.get(one.name) or kind.help
    if default is None or (default is not _EMPTY and (kind.given or get_origin(hint) is list)):
        hint, default = (hint | None), None
    if one.kind is not inspect.Parameter.KEYWORD_ONLY:
        return _parameter(one.name, hint, typer.Argument(metavar=kind.metavar, help=help), default)
    name = flag(one.name)
    name += f"/--no{name[1:]}" if default is None and bool in get_args(hint) else ""
    return _parameter(one.name, hint, typer.Option(name, help=help), default)


def _own_options(key: FieldInfo) -> list[Any]:
    """The options of a key that `--key VALUE` does not suit (`planning.methods.Option`)."""
    return [part for part in key.metadata if hasattr(part, "flag")]


def _name(option: Any) -> str:
    return option.flag.removeprefix("--").replace("-", "_")


def _key_options(cls: type[Schema], keys: Keys, helps: Mapping[str, str]) -> Iterator[inspect.Parameter]:
    """The option `--key VALUE` of each key, with a type that has no bounds: the class checks; or the key's own ones."""
    for name, key in cls.model_fields.items():
        if name in keys.without:
            continue
        for own in _own_options(key):
            hint, unset = (bool, False) if own.kind is bool else (own.kind | None, None)
            yield _parameter(_name(own), hint, typer.Option(own.flag, help=own.help), unset)
        if not _own_options(key):
            default = keys.defaults.get(name, _EMPTY if key.is_required() else key.default)
            option = typer.Option(flag(name), help=helps.get(name) or _sentence(key.description or ""))
            yield _parameter(name, _plain(key.annotation), option, default)


def _plain(hint: Any) -> Any:
    """A key's type for the command line, without bounds."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _plain(inner[0])
    if origin is list:  # an option that is repeated
        return list[_plain(inner[0])]  # type: ignore[misc]
    if origin in (UnionType, Union):
        return Union[tuple(map(_plain, inner))]  # noqa: UP007
    return str if origin is Literal else hint


def _keys(cls: type[Schema], keys: Keys, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a settings class, from the options' values."""
    given = dict(keys.defaults)
    for name, key in cls.model_fields.items():
        if name in keys.without:
            continue
        if not (options := _own_options(key)):
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
