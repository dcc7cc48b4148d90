"""The command groups that verbs belong to, and the options and arguments that several verbs share."""

from pathlib import Path
from typing import Annotated

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

Model = Annotated[str, typer.Argument(help="Folder or hub id of a checkpoint.")]
Old = Annotated[list[str], typer.Option("--old", help="LANGUAGE=FILE of an old language; repeat.")]
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
Seed = Annotated[int, typer.Option(help="Random seed.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]
Config = Annotated[
    Path | None,
    typer.Option(
        help="YAML file with the stage's settings; without it, one epoch at 5e-5 (cosine), the papers' rate for 1.8 B: "
        "a small base wants more (docs/recipes.md#learning-rates)."
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
Instruct = Annotated[str, typer.Option("--instruct", help="A fine-tune of the base.")]
Scale = Annotated[float, typer.Option(help="Factor of the change (instruct - base).")]
KeepTokenizer = Annotated[
    bool, typer.Option("--keep-tokenizer", help="Keep the model's own tokenizer, chat template and generation config.")
]
ShardSize = Annotated[str, typer.Option(help="Size of the largest weight file.")]
BatchSize = Annotated[int, typer.Option(help="Blocks in a forward pass.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.")]
Figure = Annotated[Path | None, typer.Option(help="Picture to write as well (.svg, .png, .pdf).")]
Evaluated = Annotated[Path | None, typer.Option(help="evaluation.json, for the card's results.")]
EvaluatedAs = Annotated[str | None, typer.Option(help="Name of this model in the evaluation.")]
License = Annotated[str | None, typer.Option(help="License for the card; by default that of the base model's card.")]
BaseId = Annotated[
    str | None,
    typer.Option("--base", help="Hub id of the base, if it was a local folder: card and config.json name it."),
]
