"""Verbs that measure a model on text."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from ..analysis.settings import AnalysisSettings, DeviationSettings
from . import options as opt
from .common import check_checkpoints, check_file, codes, print_table, text_sources


def _old_and_new(old: list[str], new: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The texts of `--old` and of `--new`, whose files are there."""
    sources = text_sources(old, look=True), text_sources(new, look=True)
    from ..data.sources import check_languages

    check_languages(*sources)
    return sources


@opt.analyze_app.command("similarity")
@opt.with_settings()
def analyze_similarity(
    base: opt.Model,
    new: opt.New,
    out: opt.Out,
    settings: AnalysisSettings,
    old: Annotated[
        list[str] | None, typer.Option("--old", help="LANGUAGE=FILE of an old language; repeat. None for DMoE.")
    ] = None,
    seed: opt.Seed = 0,
    revision: opt.Revision = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Measure how similar the languages are in each layer of a dense or expanded model (LayerMoE).

    The file has every pair of languages, old ones too, and each language with itself.

    Example: hf-moe-expand analyze similarity Qwen/Qwen2.5-0.5B --old en=en.jsonl --new el=el.jsonl --out analysis.json
    """
    check_file(out, overwrite)
    check_checkpoints(base, revision=revision)
    old_sources, new_sources = _old_and_new(old or [], new)
    from ..analysis.similarity import measure_similarity
    from ..core.layer_names import layer_name
    from ..data.pairs import texts_for
    from ..inference.models import load_for_inference

    model, tokenizer = load_for_inference(base, revision)
    texts = texts_for(model.config, {**old_sources, **new_sources}, seed)
    result = measure_similarity(model, tokenizer, texts, list(old_sources), list(new_sources), **settings.model_dump())
    result.to_json(out)
    print("layer  similarity")
    for layer, value in enumerate(result.similarity):
        print(f"{layer_name(layer, result.encoder_layers):>5}  {value:.4f}")
    print(f"wrote {out}")


@opt.analyze_app.command("deviation")
@opt.with_settings()
def analyze_deviation(
    base: opt.Model,
    data: opt.Data,
    out: opt.Out,
    settings: DeviationSettings,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for each language's results, kept; by default beside --out until it is written."),
    ] = None,
    seed: opt.Seed = 0,
    revision: opt.Revision = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Measure how far training on each language moves each layer's FFN, and how similar these changes are (DMoE).

    Needs memory for training in float32, 16 bytes a parameter. After an interruption, run the command again: it
    continues with the next language. With --at-steps (repeat it) languages are compared at earlier steps as well.

    Example: hf-moe-expand analyze deviation Qwen/Qwen2.5-0.5B --data el=el.jsonl --data hu=hu.jsonl --out found.json
    """
    check_file(out, overwrite)
    check_checkpoints(base, revision=revision)
    sources = text_sources(data, look=True)
    from ..analysis.deviation import measure_deviation
    from ..checkpoint.source import load_base_config, resolve_checkpoint
    from ..inference.models import load_for_inference

    load_base_config(resolve_checkpoint(base, revision, weights=False))
    model, tokenizer = load_for_inference(base, revision)
    work = work_dir or out.with_name(f"{out.name}.work")
    texts = {code: source.load()["text"] for code, source in sources.items()}
    result = measure_deviation(model, tokenizer, texts, work_dir=work, seed=seed, **settings.model_dump())
    result.to_json(out)
    if work_dir is None:
        shutil.rmtree(work)
    print("layer  deviation")
    for layer, value in enumerate(result.deviation):
        print(f"{layer:5d}  {value:.6f}")
    print("language  most similar")
    for row, language in enumerate(result.languages):
        others = [column for column in range(len(result.languages)) if column != row]
        for nearest in sorted(others, key=lambda column: -result.similarity[row][column])[:1]:
            print(f"{language:8}  {result.languages[nearest]} {result.similarity[row][nearest]:.3f}")
    for place, step in enumerate(settings.at_steps):
        alike = [matrix[place][-1] for matrix in result.likeness_of_steps.values()]
        print(f"step {step}: cosine with the last step's change {min(alike):.3f} to {max(alike):.3f}")
    print(f"wrote {out}")


@opt.analyze_app.command("routing")
@opt.with_settings(tokens=20_000)
def analyze_routing(
    model: opt.Model,
    data: opt.Data,
    out: opt.Out,
    settings: AnalysisSettings,
    old: opt.OldCodes = "",
    new: opt.NewCodes = "",
    by_direction: Annotated[
        bool,
        typer.Option("--by-direction", help="Of an encoder-decoder, measure each direction, such as en-el."),
    ] = False,
    seed: opt.Seed = 0,
    revision: opt.Revision = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Measure which experts each language uses in each layer of an expanded model, how clearly, and to what effect.

    The checkpoint names its old and new languages; --old and --new override it. Random routing is the mean of two
    seeds.

    Example: hf-moe-expand analyze routing qwen-el-2 --data en=en.jsonl --data el=el.jsonl --out routing.json
    """
    check_file(out, overwrite)
    check_checkpoints(model, revision=revision, expanded=True)
    sources = text_sources(data, look=True)
    from ..analysis.routing import language_classes, measure_routing
    from ..checkpoint.source import load_expanded_config, resolve_checkpoint
    from ..data.pairs import texts_for
    from ..inference.models import load_for_inference
    from ..planning.results import NO_CHOICE

    config = load_expanded_config(resolve_checkpoint(model, revision, weights=False))
    language_classes(config, sources, codes(old), codes(new))
    network, tokenizer = load_for_inference(model, revision)
    texts = texts_for(config, sources, seed)
    result = measure_routing(
        network, tokenizer, texts, **settings.model_dump(), old=codes(old), new=codes(new),
        random_seeds=(seed, (seed + 1) % 2**32), by_direction=by_direction,
    )  # fmt: skip
    result.to_json(out)
    print_table(*result.rows())
    print_table(*result.perplexity_rows())
    if result.colocation:
        print_table(*result.colocation_rows())
    if not result.has_choice:
        print(NO_CHOICE)
    print(f"wrote {out}")
