"""The verb that lets a base model write text."""

from typing import Annotated

import typer

from .apps import app
from .common import check_checkpoints, check_file
from .options import Model, Out, Overwrite, Revision, Seed


@app.command()
def sample(
    model: Model,
    out: Out,
    language: Annotated[
        str, typer.Option(help="Code of the old language for which the text stands, e.g. en; und: undetermined.")
    ] = "und",
    documents: Annotated[int, typer.Option(help="Documents to write.")] = 1000,
    tokens: Annotated[int, typer.Option(help="Most tokens of a document, the prompt's left out.")] = 256,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Beginning of a document, a few words in the language; repeat, for turns."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Divisor of the logits.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Draw among the tokens with this share of the probability.")] = 1.0,
    batch_size: Annotated[int, typer.Option(help="Documents written at once.")] = 16,
    seed: Seed = 0,
    revision: Revision = None,
    overwrite: Overwrite = False,
) -> None:
    """Let a base model write text, for a review without any text that the base was trained on.

    Of an expanded model, the base inside writes (expert 0). Each row of the file names the model, the prompt and the
    settings that it came from.

    Example: hf-moe-expand sample Qwen/Qwen2.5-0.5B --language en --prompt "The city" --prompt "In 1990" --out en.jsonl
    """
    check_file(out, overwrite)
    check_checkpoints(model)
    from ..languages import check_language_code
    from ..self_written import SampleSettings, write_texts

    check_language_code(language)
    chosen = SampleSettings(
        documents=documents, tokens=tokens, prompts=list(prompt or []), temperature=temperature, top_p=top_p,
        batch_size=batch_size, seed=seed,
    )  # fmt: skip
    written, words = write_texts(model, revision, {language: chosen}, out)
    print(f"wrote {out}: {written:,} documents, {words:,} words")
