"""Verbs for recipes: validate, run, demo, `recipes ...`, and `sample`, which writes old text for one. And verbs that
show a run or a checkpoint to others: its card, its repository and its report."""

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import InputError
from ..inference.writing import SampleSettings
from . import options as opt
from .common import check_checkpoints, check_file, print_or_write, text_sources

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe (YAML file), or a name from `recipes ls`.")]


@opt.app.command()
def card(
    model: opt.Model,
    evaluation: opt.Evaluated = None,
    evaluated_as: opt.EvaluatedAs = None,
    repo_id: Annotated[str | None, typer.Option(help="Repository of the published checkpoint: namespace/name.")] = None,
    license: opt.License = None,
    base: opt.BaseId = None,
    expansion_only: Annotated[
        bool, typer.Option("--expansion-only", help="The card of a repository that holds only the added tensors.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File to write, such as README.md in the checkpoint.")] = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Print the model card that `push` writes with the same options; its notes go to the error stream.

    Example: hf-moe-expand card qwen-el-2 --repo-id me/qwen-el
    """
    check_file(out, overwrite)
    check_checkpoints(model, expanded=True)
    from ..core.saying import say_once
    from ..hub.publish import card_to_push

    text, *_ = card_to_push(
        model, repo_id, evaluation=evaluation, evaluated_as=evaluated_as, license=license, base=base,
        expansion_only=expansion_only, say=say_once,
    )  # fmt: skip
    print_or_write(text, out, overwrite)


@opt.app.command()
def push(
    model: opt.Model,
    repo_id: Annotated[str, typer.Argument(help="Repository: namespace/name.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to; main by default.")] = None,
    evaluation: opt.Evaluated = None,
    evaluated_as: opt.EvaluatedAs = None,
    include: Annotated[list[str] | None, typer.Option(help="Further file of the folder to publish; repeat.")] = None,
    license: opt.License = None,
    base: opt.BaseId = None,
    expansion_only: Annotated[
        bool, typer.Option("--expansion-only", help="Publish only the added tensors; loading fetches the base model.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print files and card without uploading.")] = False,
) -> None:
    """Publish a checkpoint on the hub. A second run continues a broken upload, and sends only files that changed.

    Example: hf-moe-expand push qwen-el-2 me/qwen-el --evaluation evaluation.json
    """
    check_checkpoints(model, expanded=True)
    from ..hub.publish import push_to_hub

    push_to_hub(
        model, repo_id, private=private, revision=revision, evaluation=evaluation, evaluated_as=evaluated_as,
        include=include or (), license=license, base=base, expansion_only=expansion_only, dry_run=dry_run,
    )  # fmt: skip


@opt.app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="Folder of a run: the recipe's `output`. Or checkpoints that single commands made, in the order of "
            "their stages, and the folder with the commands' JSON files.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write; by default report.html in a run's folder, or where you are.")
    ] = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Write the HTML page of a run, or of single commands' outputs: languages and text before and after, plan, losses,
    routing. Loads no weights.

    For tables of routing, run `analyze routing MODEL --out FOLDER/routing.json` first.

    Example: hf-moe-expand report runs/qwen-el

    Example: hf-moe-expand report . qwen-el-1 qwen-el-2 --out report.html
    """
    alone = len(folders) == 1 and not (folders[0] / "config.json").is_file()
    out = out or (folders[0] / "report.html" if alone else Path("report.html"))
    from ..runs.run_record import run_folder

    for folder in folders:
        run_folder(folder)
    check_file(out, overwrite)
    from ..report.page import make_page

    print_or_write(make_page(*folders), out, overwrite)


@opt.app.command()
def validate(
    recipe: RecipeName,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use no network; skip checks of files that are not on this machine.")
    ] = False,
) -> None:
    """Check a recipe as far as possible before anything runs.

    Example: hf-moe-expand validate recipe.yaml
    """
    file = _recipe_file(recipe)
    from ..runs.pipeline import validate_recipe
    from ..runs.recipe import Recipe

    for line in validate_recipe(Recipe.load(file, unset_ok=offline), offline):
        print(line)
    print(f"{recipe}: ok")


@opt.app.command()
def run(recipe: RecipeName) -> None:
    """Run all steps of a recipe: analyse, plan, expand, train each stage, evaluate. A second run resumes the first.

    Example: accelerate launch $(which hf-moe-expand) run recipe.yaml
    """
    file = _recipe_file(recipe)
    from ..runs.pipeline import run_recipe
    from ..runs.recipe import Recipe

    run_recipe(Recipe.load(file))


def _recipe_file(name: str) -> Path:
    """The file of a recipe, whose keys are recipes'."""
    from ..runs.keys import check_recipe_keys
    from ..runs.recipes import find_recipe

    file = find_recipe(name)
    check_recipe_keys(file)
    return file


@opt.recipes_app.command("ls")
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


@opt.recipes_app.command("show")
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


@opt.recipes_app.command("new")
def recipes_new(
    base: Annotated[str, typer.Option("--base", help="Folder or hub id of the dense model.")],
    new: Annotated[list[str], typer.Option("--new", help="LANGUAGE=FILE of a new language; repeat.")],
    out: Annotated[Path, typer.Option("--out", help="Recipe to write (YAML).")] = Path("recipe.yaml"),
    old: Annotated[
        list[str] | None,
        typer.Option("--old", help="LANGUAGE=FILE of an old language; repeat."),
    ] = None,
    test: Annotated[
        list[str] | None,
        typer.Option(
            "--test", help="LANGUAGE=FILE of held-out text, old, new or unnamed; repeat. Without any, no evaluation."
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Folder of the run; by default runs/, the base and the new languages.")
    ] = None,
    tokens: Annotated[
        int | None, opt.whole_number("Tokens to train on, for which batch and rate are chosen; by default one epoch.")
    ] = None,
    gpu: Annotated[
        bool | None,
        typer.Option("--gpu/--no-gpu", help="Whether it will train on a GPU; by default, whether there is one here."),
    ] = None,
    revision: opt.Revision = None,
    seed: opt.Seed = 0,
    overwrite: opt.Overwrite = False,
    allow_lost_text: opt.AllowLostText = False,
) -> None:
    """Write the recommended recipe for a base and your text, with the steps of one epoch or for some tokens, and check
    it.

    Example: hf-moe-expand recipes new --base Qwen/Qwen2.5-0.5B --new hu=hu.jsonl --old en=en.jsonl --out recipe.yaml
    """
    check_file(out, overwrite)
    check_checkpoints(base, revision=revision)
    sources = {
        key: {code: text.source for code, text in text_sources(arguments or []).items()}
        for key, arguments in (("old", old), ("new", new), ("test", test))
    }
    from ..core.jsonfile import write_text
    from ..runs.pipeline import validate_recipe
    from ..runs.recipe import Recipe
    from ..runs.recommended import new_recipe

    text = new_recipe(
        base, **sources, output=output, revision=revision, seed=seed, allow_lost_text=allow_lost_text, gpu=gpu,
        tokens=tokens,
    )  # fmt: skip
    lines = validate_recipe(Recipe.of_text(text, out), here=False)
    write_text(out, text)
    for line in lines:
        print(line)
    print(f"wrote {out}: read it, then `hf-moe-expand run {out}`")


@opt.recipes_app.command("schema")
def recipes_schema(
    out: Annotated[Path | None, typer.Option(help="File to write; on the screen by default.")] = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Write the JSON schema of a recipe, with which editors complete and check keys.

    In VS Code, put `# yaml-language-server: $schema=recipe.schema.json` into a recipe's first line.

    Example: hf-moe-expand recipes schema --out recipe.schema.json
    """
    import json

    from ..runs.recipe import recipe_schema

    print_or_write(json.dumps(recipe_schema(), indent=2) + "\n", out, overwrite)


@opt.recipes_app.command("settings")
def recipes_settings(
    out: Annotated[Path | None, typer.Option(help="File to write; on the screen by default.")] = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Write every key of a recipe and of a stage's file, with its default and its meaning, in Markdown.

    Example: hf-moe-expand recipes settings --out settings.md
    """
    from ..runs.settings_page import settings_page

    print_or_write(settings_page(), out, overwrite)


@opt.app.command()
def demo(
    real: Annotated[
        bool, typer.Option("--real", help="A real model, SmolLM2-135M-Instruct, learns Spanish: about twelve minutes.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all files of the demo; runs/demo or runs/demo-real by default.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="With --real: folder or hub id of a model to take, instead of downloading SmolLM2 (93 MB)."),
    ] = None,
    seed: opt.Seed = 0,
) -> None:
    """Run all steps with a tiny model, which the demo makes itself, on a CPU in a few minutes; or with a real one.

    Example: hf-moe-expand demo

    Example: hf-moe-expand demo --real
    """
    if base is not None and not real:
        raise InputError("--base belongs to --real, which is not given.")
    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bars()  # reading and writing take no time here
    disable_progress_bar()
    if real:
        from ..demo.real import run_real_demo

        run_real_demo(out or Path("runs/demo-real"), base, seed)
    else:
        from ..demo.run import run_demo

        run_demo(out or Path("runs/demo"), seed)


@opt.app.command()
@opt.with_settings("prompts")
def sample(
    model: opt.Model,
    out: opt.Out,
    settings: SampleSettings,
    language: Annotated[
        str, typer.Option(help="Code of the old language for which the text stands, e.g. en; und: undetermined.")
    ] = "und",
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Beginning of a document, a few words in the language; repeat, for turns."),
    ] = None,
    revision: opt.Revision = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Let a base model write text, for a gate or a review without any text that the base was trained on.

    Of an expanded model, the base inside writes (expert 0). Each row of the file names the model, the prompt and the
    settings that it came from.

    Example: hf-moe-expand sample Qwen/Qwen2.5-0.5B --language en --prompt "The city" --prompt "In 1990" --out en.jsonl
    """
    check_file(out, overwrite)
    check_checkpoints(model, revision=revision)
    from ..core.languages import check_language_code
    from ..core.schema import changed
    from ..inference.sampling import write_sample

    check_language_code(language)
    settings = changed(settings, prompts=list(prompt or []))
    print(f"wrote {out}: {write_sample(model, revision, language, settings, out)}")
