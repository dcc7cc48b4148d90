"""The verb that tells which models can be expanded."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .apps import app
from .common import print_or_write
from .options import Overwrite


@app.command()
def backbones(
    model: Annotated[str | None, typer.Argument(help="Folder or hub id of a dense model.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub id.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the list; on the screen by default.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Tell whether a model can be expanded, or list the architectures that can.

    Loads no weights: an architecture is tried on a tiny twin of the model.

    Example: hf-moe-expand backbones Qwen/Qwen3-0.6B
    """
    from ..backbones import answer, backbones_page
    from ..errors import InputError

    if model is None:
        print("trying each architecture on a tiny twin: about a minute ...", file=sys.stderr, flush=True)
        print_or_write(backbones_page(), out, overwrite)
        return
    if out is not None:
        raise InputError("--out is for the list of architectures: leave MODEL out.")
    print("\n".join(answer(model, revision)))
