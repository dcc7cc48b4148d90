"""The command groups that verbs belong to."""

import typer

app = typer.Typer(
    help="Teach a dense language model new languages by growing its feed-forward layers into mixtures of experts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
