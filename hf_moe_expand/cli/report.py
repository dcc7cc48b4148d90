"""`report`."""

from pathlib import Path
from typing import Annotated

import typer

from .apps import app
from .common import check_file
from .options import Overwrite


@app.command()
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
    overwrite: Overwrite = False,
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
    from ..jsonfile import write_text
    from ..report.page import make_page

    text = make_page(*folders)
    write_text(out, text)
    print(f"wrote {out}")
