"""The verbs, by what a person wants. The module of a verb is imported when the verb runs: `--help` imports none."""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..core.errors import InputError

# The module of each verb, in the order of `--help`.
_VERBS = {
    "A recipe, from its check to its page": {
        **dict.fromkeys(("run", "validate", "report", "recipes"), "verbs_recipes"),
    },
    "Models, step by step": {
        "plan": "verbs_planning",
        **dict.fromkeys(("expand", "grow", "join", "graft", "merge", "export", "gates"), "verbs_making"),
        "train": "verbs_training",
    },
    "What models do": {
        "evaluate": "verbs_scoring",
        **dict.fromkeys(("chat", "sample"), "verbs_writing"),
        "analyze": "verbs_measuring",
        "curriculum": "verbs_planning",
        **dict.fromkeys(("inspect", "diff"), "verbs_measuring"),
    },
    "For others": dict.fromkeys(("card", "push"), "verbs_sharing"),
    "To see it work": {"demo": "verbs_recipes"},
}
_MODULES = {name: module for verbs in _VERBS.values() for name, module in verbs.items()}
# What to write in place of verbs of earlier releases.
_GONE = {
    "analyze fertility": "validate RECIPE, whose line `tokens a byte` has each text",
    "analyze separability": "gates MODEL OUT --data LANGUAGE=FILE, which says what share of each language passes",
    "evaluate-translation": "evaluate MODEL... --pairs all --data LANGUAGE=FILE --out FILE, or with --pairs en-el",
    "expand-branches": "expand BRANCH OUT --branches BRANCH2 --plan FILE",
    "expand-depth": "expand BASE OUT --blocks N",
    "from-peft": "expand BASE OUT --adapter LANGUAGE=ADAPTER",
    "generate": "chat MODEL --prompt TEXT, or with --plain",
}


class Verbs(TyperGroup):
    """Verbs; one that is gone is refused with its new form."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        words = cmd_name if ctx.parent is None else f"{ctx.info_name} {cmd_name}"
        if words in _GONE:
            raise InputError(f"`{words}` is gone. Its new form: hf-moe-expand {_GONE[words]}.")
        return super().get_command(ctx, cmd_name)


class _AllVerbs(Verbs):
    """The verbs and groups, imported when they run."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.commands: dict[str, Any] = {**dict.fromkeys(_MODULES), **self.commands}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _MODULES and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _imported(cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, verbs in _VERBS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, _summary(module, name)) for name, module in verbs.items()])


def _imported(name: str) -> Any:
    found = getattr(import_module(f"{__package__}.{_MODULES[name]}"), name)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    add(alone, found, name)
    return typer.main.get_command(alone)


@cache
def _summary(module: str, name: str) -> str:
    """The first sentence of a verb's docstring, from the source."""
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    text = " ".join((ast.get_docstring(found) or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].removesuffix(".") + "."


def add(group: typer.Typer, verb: Callable[..., None], name: str, fixed: Any = (), **keywords: Any) -> None:
    """Adds a verb to a group, its options made from its signature but for `fixed` parameters."""
    from .signature import as_command, help_text

    group.command(name, **{"help": help_text(verb), **keywords})(as_command(verb, dict(fixed)))


def group(function: Callable[[], None]) -> typer.Typer:
    """A group of verbs, with the function's name and docstring."""
    name = function.__name__
    return typer.Typer(cls=Verbs, name=name, help=function.__doc__, no_args_is_help=True, rich_markup_mode=None)


def verb(group: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the function below it to a group."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        add(group, function, name)
        return function

    return decorate


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


app = typer.Typer(
    cls=_AllVerbs,
    help="Teach a dense language model new languages by growing its feed-forward layers into mixtures of experts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _main(
    show: Annotated[
        bool,
        typer.Option("--version", callback=_show_versions, is_eager=True, help="Print the versions of the packages."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; after any verb, too.")
    ] = False,
) -> None: ...
