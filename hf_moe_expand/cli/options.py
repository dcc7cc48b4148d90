"""The command groups that verbs belong to, the options and arguments that several verbs share, and the options that
follow from a settings class."""

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from ..core.errors import InputError
from ..core.schema import MOST, check_seed, read

app = typer.Typer(
    help="Teach a dense language model new languages by growing its feed-forward layers into mixtures of experts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def versions() -> str:
    """The versions that a report of an error needs, in one line."""
    found = []
    for package in ("hf-moe-expand", "torch", "transformers", "datasets", "peft", "trl"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package}: not installed")
    return f"{', '.join(found)}, Python {sys.version.split()[0]}"


def _show_versions(wanted: bool) -> None:
    if wanted:
        print(versions())
        raise typer.Exit


@app.callback()
def _main(
    show: Annotated[
        bool,
        typer.Option("--version", callback=_show_versions, is_eager=True, help="Print the versions of the packages."),
    ] = False,
) -> None: ...


def _group(name: str, about: str) -> typer.Typer:
    group = typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


analyze_app = _group("analyze", "Measure a model on text.")
plan_app = _group("plan", "Decide which layer gets how many experts.")
train_app = _group("train", "Train one stage.")
merge_app = _group("merge", "Merge checkpoints tensor by tensor.")
recipes_app = _group("recipes", "The recipes of published settings.")
curriculum_app = _group("curriculum", "Decide which language enters training when.")


def whole_number(help: str) -> Any:
    """An option for a whole number of at most `MOST`."""
    return typer.Option(help=help, callback=_check_whole)


def _check_whole(param: typer.CallbackParam, value: int | None) -> int | None:
    if value is not None and abs(value) > MOST:
        raise InputError(f"--{str(param.name).replace('_', '-')} is {value}: must be at most {MOST:,}.")
    return value


def _check_seed(value: int) -> int:
    check_seed(value)
    return value


Model = Annotated[str, typer.Argument(help="Folder or hub id of a checkpoint.")]
New = Annotated[list[str], typer.Option("--new", help="LANGUAGE=FILE of a new language; repeat.")]
Data = Annotated[list[str], typer.Option("--data", help="LANGUAGE=FILE; repeat for each language.")]
Validation = Annotated[
    list[str] | None,
    typer.Option("--validation", help="LANGUAGE=FILE of held-out text to score while it trains; repeat."),
]
OldCodes = Annotated[str, typer.Option("--old", help="Codes of the old languages, e.g. en,es,zh.")]
NewCodes = Annotated[str, typer.Option("--new", help="Codes of the new languages, e.g. el,hu,tr.")]
Out = Annotated[Path, typer.Option("--out", help="File to write.")]
Revision = Annotated[str | None, typer.Option(help="Revision of a hub id.")]
Seed = Annotated[int, typer.Option(help="Random seed.", callback=_check_seed)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]
AllowLostText = Annotated[
    bool,
    typer.Option("--allow-lost-text", help="Take text of which the tokenizer loses more than 2 % of the bytes, too."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="YAML file with the stage's settings; without it, one epoch at the papers' rate (5e-5; 2e-5 in "
        "DMoE's stages; cosine): a small base wants more (docs/choose.md#learning-rates)."
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers", help="Number of layers (6+6: an encoder's and its decoder's), or the checkpoint to count them in."
    ),
]
GrowsFrom = Annotated[
    str | None,
    typer.Option("--from", help="Expanded checkpoint that the plan grows; numbers of experts then count new ones."),
]
OutFolder = Annotated[Path, typer.Argument(help="Folder to write.")]
Base = Annotated[str, typer.Option("--base", help="The dense model from which both were made.")]
ShardSize = Annotated[str, typer.Option(help="Size of the largest weight file.")]
Evaluated = Annotated[Path | None, typer.Option(help="evaluation.json, for the card's results.")]
EvaluatedAs = Annotated[str | None, typer.Option(help="Name of this model in the evaluation.")]
License = Annotated[str | None, typer.Option(help="License for the card; by default that of the base model's card.")]
BaseId = Annotated[
    str | None,
    typer.Option("--base", help="Hub id of the base, if it was a local folder: card and config.json name it."),
]

Verb = Callable[..., None]
Parameters = dict[str, tuple[Any, Any]]  # type and default by name


def with_settings(*left_out: str, **defaults: Any) -> Callable[[Verb], Verb]:
    """Gives a verb an option for each key of the settings class that its parameter `settings` is of.

    Args:
        left_out: keys without an option.
        defaults: values of keys that are not given, in place of the class's own.
    """

    def decorate(verb: Verb) -> Verb:
        given = {name: (one.annotation, one.default) for name, one in inspect.signature(verb).parameters.items()}
        cls, _ = given["settings"]
        keys = {name: key for name, key in cls.model_fields.items() if name not in left_out}

        @wraps(verb)
        def with_options(**arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in keys}
            verb(settings=read(cls, {**defaults, **values}), **arguments)

        parameters: Parameters = {}
        for name, of_verb in given.items():
            parameters |= key_options(keys, defaults) if name == "settings" else {name: of_verb}
        return with_parameters(with_options, parameters)

    return decorate


def key_options(keys: Mapping[str, FieldInfo], defaults: Mapping[str, Any]) -> Parameters:
    """The option `--key VALUE` for each key of a settings class, with a type that has no bounds: the class checks."""
    options: Parameters = {}
    for name, key in keys.items():
        text = (key.description or "").removesuffix(".")
        option = typer.Option(f"--{name.replace('_', '-')}", help=f"{text[:1].upper()}{text[1:]}.")
        default = inspect.Parameter.empty if key.is_required() else key.default
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


def with_parameters(verb: Verb, parameters: Parameters) -> Verb:
    """The verb with these parameters, of which Typer makes arguments and options."""
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in parameters.items()
    ]
    verb.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    verb.__annotations__ = {name: annotation for name, (annotation, _) in parameters.items()}
    return verb
