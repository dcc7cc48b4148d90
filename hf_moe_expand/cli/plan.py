"""Verbs that decide which layer gets how many experts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError
from .apps import plan_app
from .common import check_figure, check_file, codes
from .options import (
    Analysis,
    ClassifierChoice,
    ClassifierCount,
    Figure,
    GrowsFrom,
    Layers,
    Minimum,
    NewCodes,
    OldCodes,
    Out,
    Overwrite,
    Seed,
    TopK,
    Total,
)

if TYPE_CHECKING:
    from ..settings import PlanSettings


@plan_app.command("layer-moe")
def plan_layer_moe(
    analysis: Annotated[Path, typer.Option(help="analysis.json of `analyze similarity`.")],
    total_experts: Total,
    out: Out,
    minimum: Minimum = None,
    similarity_floor: Annotated[float | None, typer.Option(help="Count smaller similarities as this.")] = None,
    classifier_layers: ClassifierCount = 0,
    classifier_choice: ClassifierChoice = "similarity",
    top_k: TopK = 2,
    seed: Seed = 0,
    grows_from: GrowsFrom = None,
    overwrite: Overwrite = False,
) -> None:
    """Fewer experts where languages are more alike (LayerMoE).

    Example: hf-moe-expand plan layer-moe --analysis analysis.json --total-experts 72 --classifier-layers 7 --out p.json
    """
    from ..settings import PlanSettings

    settings = PlanSettings(
        "layer-moe", total_experts=total_experts, minimum=minimum, similarity_floor=similarity_floor,
        classifier_layers=classifier_layers, classifier_choice=classifier_choice, top_k=top_k,
    )  # fmt: skip
    _plan(settings, out, overwrite, seed, analysis=analysis, grows_from=grows_from)


@plan_app.command("uniform")
def plan_uniform(
    experts: Annotated[int, typer.Option(help="Experts in each layer, the original counted.")],
    out: Out,
    layers: Layers = None,
    old: OldCodes = "",
    new: NewCodes = "",
    classifier_layers: ClassifierCount = 0,
    classifier_choice: ClassifierChoice = "similarity",
    analysis: Analysis = None,
    top_k: TopK = 2,
    seed: Seed = 0,
    grows_from: GrowsFrom = None,
    overwrite: Overwrite = False,
) -> None:
    """The same number of experts in every layer (MoE-LPR).

    Example: hf-moe-expand plan uniform --layers 24 --experts 6 --old en,es,zh --new el,hu,tr --out plan.json
    """
    from ..settings import PlanSettings

    settings = PlanSettings(
        "uniform",
        experts=experts,
        classifier_layers=classifier_layers,
        classifier_choice=classifier_choice,
        top_k=top_k,
    )
    _plan(settings, out, overwrite, seed, layers, old, new, analysis, grows_from)


@plan_app.command("mola")
def plan_mola(
    layers: Layers,
    out: Out,
    shape: Annotated[
        str, typer.Option(help="inverted-triangle (2 4 6 8 by quarters), triangle, hourglass or rectangle.")
    ] = "inverted-triangle",
    old: OldCodes = "",
    new: NewCodes = "",
    classifier_layers: ClassifierCount = 0,
    classifier_choice: ClassifierChoice = "similarity",
    analysis: Analysis = None,
    top_k: TopK = 2,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """More experts in higher layers, by a fixed shape (MoLA).

    Example: hf-moe-expand plan mola --layers 24 --old en,es,zh --new el,hu,tr --out plan.json
    """
    from ..settings import PlanSettings

    settings = PlanSettings(
        "mola", shape=shape, classifier_layers=classifier_layers, classifier_choice=classifier_choice, top_k=top_k
    )
    _plan(settings, out, overwrite, seed, layers, old, new, analysis)


@plan_app.command("random")
def plan_random(
    total_experts: Total,
    out: Out,
    minimum: Minimum = None,
    layers: Layers = None,
    old: OldCodes = "",
    new: NewCodes = "",
    classifier_layers: ClassifierCount = 0,
    classifier_choice: ClassifierChoice = "similarity",
    analysis: Analysis = None,
    top_k: TopK = 2,
    seed: Seed = 0,
    grows_from: GrowsFrom = None,
    overwrite: Overwrite = False,
) -> None:
    """A total shared out at random (LayerMoE's ablation).

    Example: hf-moe-expand plan random --layers 24 --total-experts 72 --old en,es,zh --new el,hu,tr --out plan.json
    """
    from ..settings import PlanSettings

    settings = PlanSettings(
        "random", total_experts=total_experts, minimum=minimum,
        classifier_layers=classifier_layers, classifier_choice=classifier_choice, top_k=top_k,
    )  # fmt: skip
    _plan(settings, out, overwrite, seed, layers, old, new, analysis, grows_from)


@plan_app.command("dmoe")
def plan_dmoe(
    deviation: Annotated[Path, typer.Option(help="deviation.json of `analyze deviation`.")],
    out: Out,
    groups: Annotated[int | None, typer.Option(help="Number of language groups, each with its expert.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Share of layers, those that deviate most (default 0.4).")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Instead: layers of at least this deviation, scaled to 0..1.")
    ] = None,
    by_hand: Annotated[str | None, typer.Option(help='The groups themselves, e.g. "en,de;fr,es".')] = None,
    random: Annotated[bool, typer.Option("--random", help="Random groups of equal size (ablation).")] = False,
    vectors: Annotated[
        Path | None, typer.Option(help="Groups by linguistic vectors (ablation): .json or .csv, language and numbers.")
    ] = None,
    figure: Figure = None,
    top_k: TopK = 2,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """One expert for each group of similar languages, in the layers that deviate most (DMoE).

    Example: hf-moe-expand plan dmoe --deviation deviation.json --groups 6 --ratio 0.4 --out plan.json
    """
    check_file(out, overwrite)
    check_figure(figure, overwrite)
    if (by_hand is not None) + random + (vectors is not None) > 1:
        raise InputError("--by-hand, --random and --vectors: give one of them at most.")
    if (groups is None) == (by_hand is None):
        raise InputError("Give the number of groups (--groups 6), or the groups themselves (--by-hand 'en,de;fr,es').")
    from ..analysis.result import DeviationResult
    from ..planning.make import make_plan
    from ..settings import PlanSettings

    settings = PlanSettings(
        "dmoe", top_k=top_k, ratio=ratio, threshold=threshold,
        groups=groups if by_hand is None else [codes(group) for group in by_hand.split(";")],
        grouping="random" if random else "deviation" if vectors is None else str(vectors),
    )  # fmt: skip
    found = DeviationResult.from_json(deviation)
    plan = make_plan(settings, len(found.deviation), [], [], seed=seed, deviation=found)
    plan.save(out)
    for expert, group in enumerate(plan.groups):
        print(f"expert {expert}  {', '.join(group)}")
    if figure is not None:
        from ..evaluation.figures import plot_deviation

        layers = [layer for layer, count in enumerate(plan.experts_per_layer) if count > 1]
        plot_deviation(figure, found.languages, found.similarity, found.deviation, plan.groups, layers)
    print(f"experts per layer  {' '.join(map(str, plan.experts_per_layer))} (total {plan.total_experts})")
    print(f"wrote {out}")


def _plan(
    settings: "PlanSettings",
    out: Path,
    overwrite: bool,
    seed: int,
    layers: str | None = None,
    old: str = "",
    new: str = "",
    analysis: Path | None = None,
    grows_from: str | None = None,
) -> None:
    from ..planning.make import make_plan

    check_file(out, overwrite)
    measured = None
    if analysis is not None:
        from ..analysis.result import SimilarityResult

        measured = SimilarityResult.from_json(analysis)
    old_codes, new_codes = codes(old), codes(new)
    if measured is not None:
        old_codes, new_codes = old_codes or measured.old, new_codes or measured.new
    counts: list[int] = []
    if grows_from is not None:
        from ..checkpoint.source import grown_from

        counts, known = grown_from(grows_from)
        old_codes = old_codes or known
    if layers is not None:
        num_layers = int(layers) if layers.isdecimal() else _layers_of(layers)
    else:
        num_layers = len(counts) or (len(measured.similarity) if measured is not None else 0)
        if not num_layers:
            raise InputError("How many layers? Give --layers, a number or the checkpoint; or --from to grow one.")
    plan = make_plan(settings, num_layers, old_codes, new_codes, measured, seed, grows_from=counts)
    plan.save(out)
    print(f"experts per layer  {' '.join(map(str, plan.experts_per_layer))} (total {plan.total_experts})")
    print(f"classifier layers  {', '.join(map(str, plan.classifier_layers)) or 'none'}")
    print(f"wrote {out}")


def _layers_of(checkpoint: str) -> int:
    from ..checkpoint.source import load_config, resolve_checkpoint

    return load_config(resolve_checkpoint(checkpoint, weights=False)).num_hidden_layers
