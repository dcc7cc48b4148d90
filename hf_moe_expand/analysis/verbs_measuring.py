"""The verbs that measure a model on text."""

import shutil
from pathlib import Path
from typing import Annotated, Any

from ..checkpoint.arguments import Expanded, Model, NewCodes, NewFile, OldCodes, Texts
from ..core.printing import print_table
from ..core.verbs import Group, Keys
from .settings import AnalysisSettings, DeviationSettings

analyze = Group("Measure a model on text.")


@analyze.verb("similarity")
def analyze_similarity(
    base: Model,
    *,
    new: Texts,
    out: NewFile,
    settings: AnalysisSettings,
    old: Texts | None = None,
    seed: int = 0,
    revision: str | None = None,
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
    from ..core.layer_names import layer_name
    from ..data.pairs import texts_for
    from ..inference.models import load_for_inference
    from .similarity import measure_similarity

    model, tokenizer = load_for_inference(base, revision)
    texts = texts_for(model.config, {**old, **new}, seed)
    result = measure_similarity(model, tokenizer, texts, list(old), list(new), **settings.model_dump())
    result.to_json(out)
    print("layer  similarity")
    for layer, value in enumerate(result.similarity):
        print(f"{layer_name(layer, result.encoder_layers):>5}  {value:.4f}")
    print(f"wrote {out}")


@analyze.verb("deviation")
def analyze_deviation(
    base: Model,
    *,
    data: Texts,
    out: NewFile,
    settings: DeviationSettings,
    work_dir: Path | None = None,
    seed: int = 0,
    revision: str | None = None,
) -> None:
    """Measure how far training on each language moves each layer's FFN, and how similar these changes are (DMoE).

    Needs memory for training in float32, 16 bytes a parameter. After an interruption, run the command again: it
    continues with the next language. With --at-steps (repeat it) languages are compared at earlier steps as well.

    Example: hf-moe-expand analyze deviation Qwen/Qwen2.5-0.5B --data el=el.jsonl --data hu=hu.jsonl --out found.json

    Args:
        work_dir: folder for each language's results, kept; by default beside --out until it is written.
    """
    from ..checkpoint.source import load_base_config, resolve_checkpoint
    from ..inference.models import load_for_inference
    from .deviation import measure_deviation

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
    print(f"wrote {out}")


@analyze.verb("routing")
def analyze_routing(
    model: Expanded,
    *,
    data: Texts,
    out: NewFile,
    settings: Annotated[AnalysisSettings, Keys(defaults={"tokens": 20_000})],
    old: OldCodes = (),
    new: NewCodes = (),
    by_direction: bool = False,
    seed: int = 0,
    revision: str | None = None,
) -> None:
    """Measure which experts each language uses in each layer of an expanded model, how clearly, and to what effect.

    The checkpoint names its old and new languages; --old and --new override it. Random routing is the mean of two
    seeds.

    Example: hf-moe-expand analyze routing qwen-el-2 --data en=en.jsonl --data el=el.jsonl --out routing.json

    Args:
        by_direction: of an encoder-decoder, measure each direction, such as en-el.
    """
    from ..checkpoint.source import load_expanded_config, resolve_checkpoint
    from ..data.pairs import texts_for
    from ..inference.models import load_for_inference
    from ..planning.results import NO_CHOICE
    from .routers import language_classes, measure_routing

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
