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
    groups = _language_groups(models, list(sources), codes(old), codes(new))
    result = evaluate_models(models, sources, groups, block_size, batch_size, max_tokens, ensemble)
    result.to_json(out)
    print(f"wrote {out}")


def _language_groups(models: list[str], languages: list[str], old: list[str], new: list[str]) -> list[list[str]]:
    """The evaluated languages in groups, the old ones first: as told, else as the longest history of the models says,
    a group for each expansion."""
    from ..checkpoint.source import languages_by_expansion, resolve_checkpoint

    if old or new:
        groups = [old, new]
    else:
        histories = [languages_by_expansion(resolve_checkpoint(name, weights=False)) for name in models]
        groups = max(histories, key=len) or [languages, []]
    if unknown := sorted(set(languages).difference(*groups)):
        raise InputError(
            f"{', '.join(unknown)}: neither an old nor a new language of these models; say so with --old, --new."
        )
    return [[code for code in languages if code in group] for group in groups]
