"""The verbs of recipes."""

from pathlib import Path
from typing import Annotated

from ..checkpoint.arguments import NewFile, Texts, checkpoint
from ..core.printing import print_or_write
from ..core.verbs import Group, Kind

RecipeName = Annotated[str, Kind("Recipe (YAML file), or a name from `recipes ls`.", metavar="RECIPE")]


def _file(name: str) -> Path:
    """The file of a recipe, whose keys are recipes'."""
    from .misspelt import check_keys_of
    from .recipes import find_recipe

    file = find_recipe(name)
    check_keys_of(file)
    return file


def run(recipe: RecipeName) -> None:
    """Run all steps of a recipe: analyse, plan, expand, train each stage, evaluate. A second run resumes the first.

    Example: accelerate launch $(which hf-moe-expand) run recipe.yaml
    """
    file = _file(recipe)
    from .pipeline import run_recipe
    from .recipe import Recipe

    run_recipe(Recipe.load(file))


def validate(recipe: RecipeName, *, offline: bool = False) -> None:
    """Check a recipe as far as possible before anything runs.

    Example: hf-moe-expand validate recipe.yaml

    Args:
        offline: use no network; skip checks of files that are not on this machine.
    """
    file = _file(recipe)
    from .pipeline import validate_recipe
    from .recipe import Recipe

    for line in validate_recipe(Recipe.load(file, unset_ok=offline), offline):
        print(line)
    print(f"{recipe}: ok")


recipes = Group("The recipes of published settings.")


@recipes.verb("ls")
def recipes_ls() -> None:
    """List the recipes that come with the package: name, method, base model and description.

    The last line names the files that hold a method's settings alone, for recipes to inherit.

    Example: hf-moe-expand recipes ls
    """
    from .recipes import packaged_files, packaged_recipes

    # Plain columns: a table would break long names if the output is not a terminal.
    rows = [(recipe.name, recipe.method, recipe.base, recipe.about) for recipe in packaged_recipes()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *columns, about in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(columns, widths, strict=True)), about]))
    print(f"to inherit: {', '.join(packaged_files('methods'))}")


@recipes.verb("show")
def recipes_show(name: RecipeName) -> None:
    """Print a recipe, to read it or to start your own from it; of one that inherits, the merged values.

    Example: hf-moe-expand recipes show layermoe-qwen1.5-1.8b-g1 > recipe.yaml
    """
    from ..core.yamlfile import to_yaml
    from .recipe import keeps_null
    from .recipes import WholeRecipe, find_recipe

    whole = WholeRecipe.load(find_recipe(name), keeps_null)
    print(to_yaml(whole.mapping) if len(whole.files) > 1 else whole.text, end="")


@recipes.verb("new")
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
    revision: str | None = None,
    seed: int = 0,
    allow_lost_text: bool = False,
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
    from .pipeline import validate_recipe
    from .recipe import Recipe
    from .recommended import new_recipe

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


@recipes.verb("schema")
def recipes_schema(*, out: NewFile | None = None) -> None:
    """Write the JSON schema of a recipe, with which editors complete and check keys.

    In VS Code, put `# yaml-language-server: $schema=recipe.schema.json` into a recipe's first line.

    Example: hf-moe-expand recipes schema --out recipe.schema.json

    Args:
        out: file to write; on the screen by default.
    """
    import json

    from .recipe import recipe_schema

    print_or_write(json.dumps(recipe_schema(), indent=2) + "\n", out)


@recipes.verb("settings")
def recipes_settings(*, out: NewFile | None = None) -> None:
    """Write every key of a recipe and of a stage's file, with its default and its meaning, in Markdown.

    Example: hf-moe-expand recipes settings --out settings.md

    Args:
        out: file to write; on the screen by default.
    """
    from .settings_page import settings_page

    print_or_write(settings_page(), out)
