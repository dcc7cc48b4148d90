"""The verbs of recipes, and `demo`, which runs one."""

from functools import partial
from pathlib import Path
from typing import Annotated

from ..core.errors import InputError
from .groups import group, verb
from .kinds import LostText, NewFile, Overwrite, Revision, Seed, Texts, check_file, checkpoint
from .printing import print_or_write
from .signature import Kind

RecipeName = Annotated[str, Kind("Recipe (YAML file), or a name from `recipes ls`.", metavar="RECIPE")]


def _file(name: str) -> Path:
    """The file of a recipe, whose keys are recipes'."""
    from ..runs.keys import check_recipe_keys
    from ..runs.recipes import find_recipe

    file = find_recipe(name)
    check_recipe_keys(file)
    return file


def run(recipe: RecipeName) -> None:
    """Run all steps of a recipe: analyse, plan, expand, train each stage, evaluate. A second run resumes the first.

    Example: accelerate launch $(which hf-moe-expand) run recipe.yaml
    """
    file = _file(recipe)
    from ..runs.pipeline import run_recipe
    from ..runs.recipe import Recipe

    run_recipe(Recipe.load(file))


def validate(recipe: RecipeName, *, offline: bool = False) -> None:
    """Check a recipe as far as possible before anything runs.

    Example: hf-moe-expand validate recipe.yaml

    Args:
        offline: use no network; skip checks of files that are not on this machine.
    """
    file = _file(recipe)
    from ..runs.pipeline import validate_recipe
    from ..runs.recipe import Recipe

    for line in validate_recipe(Recipe.load(file, unset_ok=offline), offline):
        print(line)
    print(f"{recipe}: ok")


def report(
    folders: Annotated[list[Path], Kind(metavar="FOLDER...")], *, out: Path | None = None, overwrite: Overwrite = False
) -> None:
    """Write the HTML page of a run, or of single commands' outputs: languages and text before and after, plan, losses,
    routing. Loads no weights.

    For tables of routing, run `analyze routing MODEL --out FOLDER/routing.json` first.

    Example: hf-moe-expand report runs/qwen-el

    Example: hf-moe-expand report . qwen-el-1 qwen-el-2 --out report.html

    Args:
        folders: folder of a run: the recipe's `output`. Or checkpoints that single commands made, in the order of their
            stages, and the folder with the commands' JSON files.
        out: file to write; by default report.html in a run's folder, or where you are.
    """
    alone = len(folders) == 1 and not (folders[0] / "config.json").is_file()
    out = out or (folders[0] / "report.html" if alone else Path("report.html"))
    from ..runs.run_record import run_folder

    for folder in folders:
        run_folder(folder)
    check_file(out, overwrite)
    from ..report.page import make_page

    print_or_write(make_page(*folders), out)


@group
def recipes() -> None:
    """The recipes of published settings."""


@verb(recipes, "ls")
def recipes_ls() -> None:
    """List the recipes that come with the package: name, method, base model and description.

    The last line names the files that hold a method's settings alone, for recipes to inherit.

    Example: hf-moe-expand recipes ls
    """
    from ..runs.recipes import packaged_files, packaged_recipes

    # Plain columns: a table would break long names if the output is not a terminal.
    rows = [(recipe.name, recipe.method, recipe.base, recipe.about) for recipe in packaged_recipes()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *columns, about in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(columns, widths, strict=True)), about]))
    print(f"to inherit: {', '.join(packaged_files('methods'))}")


@verb(recipes, "show")
def recipes_show(name: RecipeName) -> None:
    """Print a recipe, to read it or to start your own from it; of one that inherits, the merged values.

    Example: hf-moe-expand recipes show layermoe-qwen1.5-1.8b-g1 > recipe.yaml
    """
    from ..core.yamlfile import to_yaml
    from ..runs.recipes import WholeRecipe, find_recipe

    def keeps_null(key: str) -> bool:
        from ..runs.recipe import keeps_null  # slow to import, and seldom needed

        return keeps_null(key)

    whole = WholeRecipe.load(find_recipe(name), keeps_null)
    print(to_yaml(whole.mapping) if len(whole.layers) > 1 else whole.text, end="")


@verb(recipes, "new")
def recipes_new(
    *,
    base: Annotated[str, Kind("Folder or hub id of the dense model.", checkpoint)],
    new: Texts,
    out: NewFile = Path("recipe.yaml"),
    old: Texts | None = None,
    test: Texts | None = None,
    output: str | None = None,
    tokens: int | None = None,
    gpu: bool | None = None,
    revision: Revision | None = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    allow_lost_text: LostText = False,
) -> None:
    """Write the recommended recipe for a base and your text, with the steps of one epoch or for some tokens, and check
    it.

    Example: hf-moe-expand recipes new --base Qwen/Qwen2.5-0.5B --new hu=hu.jsonl --old en=en.jsonl --out recipe.yaml

    Args:
        new: LANGUAGE=FILE of a new language; repeat.
        out: recipe to write (YAML).
        old: LANGUAGE=FILE of an old language; repeat.
        test: LANGUAGE=FILE of held-out text, old, new or unnamed; repeat. Without any, no evaluation.
        output: folder of the run; by default runs/, the base and the new languages.
        tokens: tokens to train on, for which batch and rate are chosen; by default one epoch.
        gpu: whether it will train on a GPU; by default, whether there is one here.
    """
    from ..core.jsonfile import write_text
    from ..runs.pipeline import validate_recipe
    from ..runs.recipe import Recipe
    from ..runs.recommended import new_recipe

    sources = {
        key: {code: text.source for code, text in (texts or {}).items()}
        for key, texts in (("old", old), ("new", new), ("test", test))
    }
    text = new_recipe(
        base, **sources, output=output, revision=revision, seed=seed, allow_lost_text=allow_lost_text, gpu=gpu,
        tokens=tokens,
    )  # fmt: skip
    lines = validate_recipe(Recipe.of_text(text, out), here=False)
    write_text(out, text)
    print(*lines, f"wrote {out}: read it, then `hf-moe-expand run {out}`", sep="\n")


@verb(recipes, "schema")
def recipes_schema(*, out: NewFile | None = None, overwrite: Overwrite = False) -> None:
    """Write the JSON schema of a recipe, with which editors complete and check keys.

    In VS Code, put `# yaml-language-server: $schema=recipe.schema.json` into a recipe's first line.

    Example: hf-moe-expand recipes schema --out recipe.schema.json

    Args:
        out: file to write; on the screen by default.
    """
    import json

    from ..runs.recipe import recipe_schema

    print_or_write(json.dumps(recipe_schema(), indent=2) + "\n", out)


@verb(recipes, "settings")
def recipes_settings(*, out: NewFile | None = None, overwrite: Overwrite = False) -> None:
    """Write every key of a recipe and of a stage's file, with its default and its meaning, in Markdown.

    Example: hf-moe-expand recipes settings --out settings.md

    Args:
        out: file to write; on the screen by default.
    """
    from ..runs.settings_page import settings_page

    print_or_write(settings_page(), out)


def demo(*, real: bool = False, out: Path | None = None, base: str | None = None, seed: Seed = 0) -> None:
    """Run all steps with a tiny model, which the demo makes itself, on a CPU in a few minutes; or with a real one.

    Example: hf-moe-expand demo

    Example: hf-moe-expand demo --real

    Args:
        real: a real model, SmolLM2-135M-Instruct, learns Spanish: about twelve minutes.
        out: folder for all files of the demo; runs/demo or runs/demo-real by default.
        base: with --real: folder or hub id of a model to take, instead of downloading SmolLM2 (93 MB).
    """
    if base is not None and not real:
        raise InputError("--base belongs to --real, which is not given.")
    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bars()  # reading and writing take no time here
    disable_progress_bar()
    from ..demo.real import run_real_demo
    from ..demo.run import run_demo

    work = partial(run_real_demo, base=base) if real else run_demo
    work(out or Path("runs/demo-real" if real else "runs/demo"), seed=seed)
