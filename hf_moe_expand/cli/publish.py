"""Verbs that show a checkpoint to others: its card, its repository and the report of its run."""

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .common import check_checkpoints, check_file, print_or_write


@opt.app.command()
def card(
    model: opt.Model,
    evaluation: opt.Evaluated = None,
    evaluated_as: opt.EvaluatedAs = None,
    repo_id: Annotated[str | None, typer.Option(help="Repository of the published checkpoint: namespace/name.")] = None,
    license: opt.License = None,
    base: opt.BaseId = None,
    out: Annotated[Path | None, typer.Option(help="File to write, such as README.md in the checkpoint.")] = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Print the model card that `push` would write.

    Example: hf-moe-expand card qwen-el-2 --evaluation evaluation.json
    """
    check_file(out, overwrite)
    check_checkpoints(model, expanded=True)
    from ..card import make_card

    print_or_write(str(make_card(model, repo_id, evaluation, evaluated_as, license, base)), out, overwrite)


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
    from ..hub import push_to_hub

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
    """Write the HTML page of a run, or of single commands' outputs: languages before and after, plan, losses, routing,
    frozen tensors. Loads no weights.

    For routing heat maps, run `analyze routing MODEL --out FOLDER/routing.json` first.

    Example: hf-moe-expand report runs/qwen-el

    Example: hf-moe-expand report . qwen-el-1 qwen-el-2 --out report.html
    """
    alone = len(folders) == 1 and not (folders[0] / "config.json").is_file()
    out = out or (folders[0] / "report.html" if alone else Path("report.html"))
    from ..run_record import run_folder

    for folder in folders:
        run_folder(folder)
    check_file(out, overwrite)
    from ..report.page import make_page

    print_or_write(make_page(*folders), out, overwrite)
