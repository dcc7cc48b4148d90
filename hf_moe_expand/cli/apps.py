"""The command groups that verbs belong to."""

import typer

app = typer.Typer(
    help="Teach a dense language model new languages by growing its feed-forward layers into mixtures of experts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
analyze_app = typer.Typer(help="Measure a model on text.", no_args_is_help=True, rich_markup_mode=None)
plan_app = typer.Typer(help="Decide which layer gets how many experts.", no_args_is_help=True, rich_markup_mode=None)
train_app = typer.Typer(help="Train one stage.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(analyze_app, name="analyze")
app.add_typer(plan_app, name="plan")
app.add_typer(train_app, name="train")
merge_app = typer.Typer(help="Merge checkpoints tensor by tensor.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(merge_app, name="merge")
recipes_app = typer.Typer(help="The recipes of published settings.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes")
curriculum_app = typer.Typer(
    help="Decide which language enters training when.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(curriculum_app, name="curriculum")
