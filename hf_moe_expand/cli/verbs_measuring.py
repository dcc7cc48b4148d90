"""The verbs that measure a model on text, compare checkpoints, and show what one is."""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from ..analysis.settings import AnalysisSettings, DeviationSettings
from ..checkpoint.settings import ExpandSettings
from .groups import group, verb
from .kinds import (
    Expanded,
    Model,
    NewCodes,
    NewFile,
    OldCodes,
    Overwrite,
    PlanFile,
    Revision,
    Seed,
    Texts,
    expanded,
)
from .printing import print_table
from .signature import Given, Keys, belongs

_HIDDEN = ("expert_init", "copy_from", "conditional_routing", "max_shard_size")


@group
def analyze() -> None:
    """Measure a model on text."""


@verb(analyze, "similarity")
def analyze_similarity(
    base: Model,
    *,
    new: Texts,
    out: NewFile,
    settings: AnalysisSettings,
    old: Texts | None = None,
    seed: Seed = 0,
    revision: Revision | None = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure how similar the languages are in each layer of a dense or expanded model (LayerMoE).

    The file has every pair of languages, old ones too, and each language with itself.

    Example: hf-moe-expand analyze similarity Qwen/Qwen2.5-0.5B --old en=en.jsonl --new el=el.jsonl --out analysis.json

    Args:
        new: LANGUAGE=FILE of a new language; repeat.
        old: LANGUAGE=FILE of an old language; repeat. None for DMoE.
    """
    from ..data.sources import check_languages

    old = old or {}
    check_languages(old, new)
    from ..analysis.similarity import measure_similarity
    from ..core.layer_names import layer_name
    from ..data.pairs import texts_for
    from ..inference.models import load_for_inference

    model, tokenizer = load_for_inference(base, revision)
    texts = texts_for(model.config, {**old, **new}, seed)
    result = measure_similarity(model, tokenizer, texts, list(old), list(new), **settings.model_dump())
    result.to_json(out)
    print("layer  similarity")
    for layer, value in enumerate(result.similarity):
        print(f"{layer_name(layer, result.encoder_layers):>5}  {value:.4f}")
    print(f"wrote {out}")


@verb(analyze, "deviation")
def analyze_deviation(
    base: Model,
    *,
    data: Texts,
    out: NewFile,
    settings: DeviationSettings,
    work_dir: Path | None = None,
    seed: Seed = 0,
    revision: Revision | None = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure how far training on each language moves each layer's FFN, and how similar these changes are (DMoE).

    Needs memory for training in float32, 16 bytes a parameter. After an interruption, run the command again: it
    continues with the next language. With --at-steps (repeat it) languages are compared at earlier steps as well.

    Example: hf-moe-expand analyze deviation Qwen/Qwen2.5-0.5B --data el=el.jsonl --data hu=hu.jsonl --out found.json

    Args:
        work_dir: folder for each language's results, kept; by default beside --out until it is written.
    """
    from ..analysis.deviation import measure_deviation
    from ..checkpoint.source import load_base_config, resolve_checkpoint
    from ..inference.models import load_for_inference

    load_base_config(resolve_checkpoint(base, revision, weights=False))
    model, tokenizer = load_for_inference(base, revision)
    work = work_dir or out.with_name(f"{out.name}.work")
    texts = {code: source.load()["text"] for code, source in data.items()}
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


@verb(analyze, "routing")
def analyze_routing(
    model: Expanded,
    *,
    data: Texts,
    out: NewFile,
    settings: Annotated[AnalysisSettings, Keys(defaults={"tokens": 20_000})],
    old: OldCodes = (),
    new: NewCodes = (),
    by_direction: bool = False,
    seed: Seed = 0,
    revision: Revision | None = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure which experts each language uses in each layer of an expanded model, how clearly, and to what effect.

    The checkpoint names its old and new languages; --old and --new override it. Random routing is the mean of two
    seeds.

    Example: hf-moe-expand analyze routing qwen-el-2 --data en=en.jsonl --data el=el.jsonl --out routing.json

    Args:
        by_direction: of an encoder-decoder, measure each direction, such as en-el.
    """
    from ..analysis.routing import language_classes, measure_routing
    from ..checkpoint.source import load_expanded_config, resolve_checkpoint
    from ..data.pairs import texts_for
    from ..inference.models import load_for_inference
    from ..planning.results import NO_CHOICE

    config = load_expanded_config(resolve_checkpoint(model, revision, weights=False))
    languages: dict[str, Any] = {"old": [*old], "new": [*new]}
    language_classes(config, data, **languages)
    network, tokenizer = load_for_inference(model, revision)
    texts = texts_for(config, data, seed)
    result = measure_routing(
        network, tokenizer, texts, **settings.model_dump(), **languages, by_direction=by_direction,
        random_seeds=(seed, (seed + 1) % 2**32),
    )  # fmt: skip
    result.to_json(out)
    print_table(*result.rows())
    print_table(*result.perplexity_rows())
    if result.colocation:
        print_table(*result.colocation_rows())
    if not result.has_choice:
        print(NO_CHOICE)
    print(f"wrote {out}")


def inspect(
    model: Model,
    *,
    settings: Annotated[ExpandSettings, Keys(without=_HIDDEN)],
    plan: PlanFile | None = None,
    revision: Revision | None = None,
    given: Given,
) -> None:
    """Show layers, experts, parameters (total, active, trained by each stage) and history of an expanded checkpoint.

    Example: hf-moe-expand inspect qwen-el-2

    Example: hf-moe-expand inspect Qwen/Qwen2.5-0.5B --plan plan.json

    Args:
        plan: plan.json for the dense MODEL: show what it makes of it, before anything runs.
    """
    belongs(given, "plan", *ExpandSettings.model_fields)
    if plan is None:
        expanded(model, {"revision": revision})
    from ..report.inspection import inspect_checkpoint, inspect_plan

    if plan is None:
        found = inspect_checkpoint(model, revision)
    else:
        found = inspect_plan(model, plan, revision, **settings.experts.model_dump())
    print("\n".join(found.lines()))


def diff(before: Model, after: Model, *, all_: bool = False, json_: bool = False) -> None:
    """Show which tensors differ between two checkpoints. Exit status 0: none differ; 1: some differ; 2: an error.

    Example: hf-moe-expand diff qwen-el qwen-el-1

    Args:
        all_: name every tensor that differs.
        json_: print JSON, with all names.
    """
    from ..checkpoint.compare import compare_checkpoints
    from ..checkpoint.source import resolve_checkpoint

    difference = compare_checkpoints(resolve_checkpoint(before), resolve_checkpoint(after))
    parts = difference.by_part()
    if json_:
        print(json.dumps({**vars(difference), "by_part": parts}, indent=2))
    else:
        rows = [[part, *map(str, counts.values())] for part, counts in parts.items()]
        print_table(["", *next(iter(parts.values()), {})], rows)
        for kind in ("changed", "removed", "added") if all_ else ():
            for name in getattr(difference, kind):
                print(f"{kind}  {name}")
    raise typer.Exit(0 if difference.same else 1)
