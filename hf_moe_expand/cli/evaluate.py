"""`evaluate`."""

from typing import Annotated

import typer

from ..errors import InputError
from .apps import app
from .common import check_file, codes, evaluate_models, text_sources
from .options import (
    BatchSize,
    BlockSize,
    Data,
    NewCodes,
    OldCodes,
    Out,
    Overwrite,
)


@app.command()
def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Folders or hub ids; the first is what the others are compared with.")
    ],
    data: Data,
    out: Out,
    old: OldCodes = "",
    new: NewCodes = "",
    block_size: BlockSize = 1024,
    batch_size: BatchSize = 8,
    max_tokens: Annotated[int | None, typer.Option(help="Score this many tokens of a language at most.")] = None,
    ensemble: Annotated[
        int | None,
        typer.Option(help="Score all models together, too: mix this many at each token, those that fit the text best."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Perplexity and bits per byte on each language, several models side by side.

    Example: hf-moe-expand evaluate Qwen/Qwen2.5-0.5B qwen-el-2 --data en=en.jsonl --data el=el.jsonl --out eval.json
    """
    check_file(out, overwrite)
    sources = text_sources(data)
    for source in sources.values():
        source.files()
    if ensemble is not None and not 1 <= ensemble <= len(models):
        raise InputError(f"--ensemble {ensemble}: mixes 1 to {len(models)} of the {len(models)} models given.")
    groups = _old_and_new(models, list(sources), codes(old), codes(new))
    result = evaluate_models(models, sources, *groups, block_size, batch_size, max_tokens, ensemble)
    result.to_json(out)
    print(f"wrote {out}")


def _old_and_new(
    models: list[str], languages: list[str], old: list[str], new: list[str]
) -> tuple[list[str], list[str]]:
    """Which of the evaluated languages are old and which new: as told, else as an expanded model's history says."""
    from ..checkpoint.source import expansion_languages, resolve_checkpoint

    if not old and not new:
        known = filter(None, (expansion_languages(resolve_checkpoint(name, weights=False)) for name in models))
        old, new = next(known, (languages, []))
    if unknown := sorted(set(languages) - set(old) - set(new)):
        raise InputError(
            f"{', '.join(unknown)}: neither an old nor a new language of these models; say so with --old, --new."
        )
    return [code for code in languages if code in old], [code for code in languages if code in new]
