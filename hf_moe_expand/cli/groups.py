"""The verbs, by what a person wants. The module of a verb is imported when it is named."""

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..core.errors import InputError
from ..core.verbs import Group, Verb

# The module of each verb, in the order of `--help`.
_VERBS = {
    "A recipe, from its check to its page": {
        **dict.fromkeys(("run", "validate"), "runs.verbs_recipes"),
        "report": "report.verbs_showing",
        "recipes": "runs.verbs_recipes",
    },
    "Models, step by step": {
        "plan": "cli.verbs_planning",
        **dict.fromkeys(("expand", "grow", "join", "graft", "merge", "export", "gates"), "cli.verbs_making"),
        "train": "runs.verbs_training",
    },
    "What models do": {
        "evaluate": "cli.verbs_scoring",
        **dict.fromkeys(("chat", "sample"), "inference.verbs_writing"),
        "analyze": "analysis.verbs_measuring",
        "curriculum": "cli.verbs_planning",
        **dict.fromkeys(("inspect", "diff"), "report.verbs_showing"),
    },
    "For others": dict.fromkeys(("card", "push"), "hub.verbs_sharing"),
    "To see it work": {"demo": "demo.verbs_trying"},
}
_MODULES = {name: module for verbs in _VERBS.values() for name, module in verbs.items()}
# What to write in place of verbs of earlier releases.
_GONE = {
    "analyze fertility": "validate RECIPE, whose line `tokens a byte` has each text",
    "analyze separability": "gates MODEL OUT --data LANGUAGE=FILE, which says what share of each language passes",
    "evaluate-translation": "evaluate MODEL... --pairs all --data LANGUAGE=FILE --out FILE, or with --pairs en-el",
    "expand-branches": "expand BRANCH OUT --branches BRANCH2 --plan FILE",
    "expand-depth": "expand BASE OUT --blocks N",
    "from-peft": "expand BASE OUT --tuned LANGUAGE=ADAPTER",
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
    """The verbs and groups, imported when they are named; a verb does so with torch, and its like, when it runs."""

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
                formatter.write_dl([(name, self._summary(ctx, name)) for name in verbs])

    def _summary(self, ctx: Any, name: str) -> str:
        try:
            return self.get_command(ctx, name).get_short_help_str(300)
        except InputError as error:  # another package's part of the verb cannot be imported
            return str(error)


def _imported(name: str) -> Any:
    found = getattr(import_module(f"..{_MODULES[name]}", __package__), name)
    if isinstance(found, Group):
        return typer.main.get_group(with_verbs(name, found))
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    add(alone, found, name)
    return typer.main.get_command(alone)


def add(
    app: typer.Typer, verb: Verb, name: str, fixed: Mapping[str, Any] = {}, types: Mapping[str, Any] = {}, **more: Any
) -> None:
    """Adds a verb; see `as_command`."""
    from .signature import as_command, help_text

    app.command(name, **{"help": help_text(verb), **more})(as_command(verb, fixed, types))


def with_verbs(name: str, group: Group) -> typer.Typer:
    app = typer.Typer(cls=Verbs, name=name, help=group.about, no_args_is_help=True, rich_markup_mode=None)
    for word, (verb, fixed, types, keywords) in group.verbs.items():
        add(app, verb, word, fixed, types, **keywords)
    return app


def version_line() -> str:
    """The versions that a report of an error needs, in one line."""
    packages = ("hf-moe-expand", "torch", "transformers", "datasets", "peft", "trl")
    return f"{', '.join(f'{name} {version(name)}' for name in packages)}, Python {sys.version.split()[0]}"


def _show_versions(wanted: bool) -> None:
    if wanted:
        print(version_line())
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
