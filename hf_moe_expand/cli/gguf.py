"""`from-gguf`."""

from pathlib import Path
from typing import Annotated

import typer

from .apps import app
from .options import OutFolder, Overwrite


@app.command("from-gguf")
def from_gguf(
    file: Annotated[Path, typer.Argument(help="A .gguf file, quantised or not.")],
    out: OutFolder,
    overwrite: Overwrite = False,
) -> None:
    """Write an ordinary checkpoint, in float32, with the weights and the tokenizer of a GGUF file.

    Example: hf-moe-expand from-gguf SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    """
    from ..checkpoint.gguf import checkpoint_from_gguf

    parameters = checkpoint_from_gguf(file, out, overwrite)
    print(f"wrote {out}: {parameters:,} parameters")
