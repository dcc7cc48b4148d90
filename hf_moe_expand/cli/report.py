"""`report`."""

from pathlib import Path
from typing import Annotated

import typer

from .apps import app
from .common import check_file
from .options import Overwrite


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run: the recipe's `output`.")],
    out: Annotated[Path | None, typer.Option(help="File to write; report.html in the folder by default.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a run's HTML page: languages before and after, plan, losses, routing, frozen tensors. Loads no weights.

    For routing heat maps, run `analyze routing MODEL --out RUN_DIR/routing.json` first.

    Example: hf-moe-expand report runs/qwen-el
    """
    out = out or run / "report.html"
    from ..run_record import run_folder

    run_folder(run)
    check_file(out, overwrite)
    from ..jsonfile import write_text
    from ..report.page import make_page

    text = make_page(run)
    write_text(out, text)
    print(f"wrote {out}")
