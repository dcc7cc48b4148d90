"""The whole way: validate, run, demo."""

from pathlib import Path
from typing import Annotated

import typer

from .apps import app
from .options import (
    Seed,
)


@app.command()
def validate(recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")]) -> None:
    """Check everything in a recipe that can be checked before the first GPU hour.

    Example: hf-moe-expand validate recipe.yaml
    """
    from ..pipeline import validate_recipe
    from ..recipe import Recipe

    for line in validate_recipe(Recipe.load(recipe)):
        print(line)
    print(f"{recipe}: ok")


@app.command()
def run(recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")]) -> None:
    """The whole way: analyse, plan, expand, post-pretrain, review, evaluate. Run again to go on after an interruption.

    Example: accelerate launch $(which hf-moe-expand) run recipe.yaml
    """
    from ..pipeline import run_recipe
    from ..recipe import Recipe

    run_recipe(Recipe.load(recipe))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything that the demo makes.")] = Path("runs/demo"),
    seed: Seed = 0,
) -> None:
    """The whole way on a tiny model that is made on the spot, on a CPU, in a few minutes.

    Example: hf-moe-expand demo
    """
    from ..demo.run import run_demo

    run_demo(out, seed)
