"""From settings (and, for layer-moe and dmoe, an analysis) to a plan."""

from collections.abc import Sequence
from pathlib import Path

from ..analysis.result import DeviationResult, SimilarityResult
from ..errors import InputError
from ..settings import PlanSettings
from .allocation import allocate_experts, mola_experts, random_experts, uniform_experts
from .grouping import check_groups, group_languages, random_groups, vector_similarity
from .layers import classifier_layers, select_layers
from .plan import Plan

METHODS = ("layer-moe", "uniform", "mola", "random", "dmoe")
DEFAULT_RATIO = 0.4


def make_plan(
    settings: PlanSettings,
    num_layers: int,
    old: Sequence[str],
    new: Sequence[str],
    analysis: SimilarityResult | None = None,
    seed: int = 0,
    deviation: DeviationResult | None = None,
    grows_from: Sequence[int] = (),
) -> Plan:
    """The plan that `settings` describe.

    Args:
        num_layers: of the base model.
        analysis: similarities of each layer; `layer-moe` and classifier layers by similarity need it.
        deviation: how far each layer moved on each language; `dmoe` needs it.
        grows_from: experts of each layer of the expanded model that the plan is to grow.

    Raises:
        InputError: the method is unknown, or what it needs is missing or out of range.
    """
    method = settings.method
    drawn = "random" in (method, settings.classifier_choice, settings.grouping)
    details: dict = {"seed": seed} if drawn else {}
    groups: list[list[str]] = []
    minimum = settings.minimum or (1 if grows_from else 2)
    if grows_from and method in ("mola", "dmoe"):
        raise InputError(f"A {method} plan is for a dense model; grow with layer-moe, uniform or random.")
    if grows_from and len(grows_from) != num_layers:
        raise InputError(f"The analysis has {num_layers} layers, but the model to grow has {len(grows_from)}.")
    if method == "layer-moe":
        if analysis is None:
            raise InputError("The layer-moe plan needs an analysis: run `analyze similarity` first.")
        total = _needed(settings.total_experts, "total_experts", method)
        counts = allocate_experts(analysis.similarity, total, minimum, settings.similarity_floor)
        details["similarity"] = analysis.similarity
    elif method == "uniform":
        counts = uniform_experts(num_layers, _needed(settings.experts, "experts", method), minimum)
    elif method == "mola":
        counts = mola_experts(num_layers, settings.shape)
        details["shape"] = settings.shape
    elif method == "random":
        counts = random_experts(num_layers, _needed(settings.total_experts, "total_experts", method), minimum, seed)
    elif method == "dmoe":
        if deviation is None:
            raise InputError("The dmoe plan needs the deviation of each layer: run `analyze deviation` first.")
        groups = make_groups(settings, deviation, seed)
        ratio = DEFAULT_RATIO if settings.ratio is None and settings.threshold is None else settings.ratio
        chosen = select_layers(deviation.deviation, ratio, settings.threshold)
        counts = [len(groups) if layer in chosen else 1 for layer in range(len(deviation.deviation))]
        details |= {"ratio": ratio, "threshold": settings.threshold, "deviation": deviation.deviation}
        # The file's name alone: a plan may travel.
        details["grouping"] = "by hand" if isinstance(settings.groups, list) else Path(settings.grouping).name
    else:
        raise InputError(f"Unknown plan method {method!r}; known: {', '.join(METHODS)}.")
    if grows_from:
        counts = [before + added for before, added in zip(grows_from, counts, strict=True)]
    expanded = [layer for layer, count in enumerate(counts) if count > 1]
    # Asking for no layers is how every choice but `all` is switched off.
    choice = (
        "none"
        if settings.classifier_layers == 0 and settings.classifier_choice != "all"
        else settings.classifier_choice
    )
    layers = classifier_layers(
        choice, settings.classifier_layers, expanded, None if analysis is None else analysis.new_old, seed
    )
    return Plan(method, counts, layers, settings.top_k, list(old), list(new), details, groups, list(grows_from))


def make_groups(settings: PlanSettings, deviation: DeviationResult, seed: int = 0) -> list[list[str]]:
    """The groups of languages of a dmoe plan.

    Raises:
        InputError: there are fewer than two groups or more than languages, a language is missing or named twice, or
            the file of linguistic vectors is wrong.
    """
    languages = deviation.languages
    if isinstance(settings.groups, list):
        check_groups(settings.groups, languages)
        groups = settings.groups
    else:
        number = _needed(settings.groups, "groups", "dmoe")
        if settings.grouping == "random":
            groups = random_groups(languages, number, seed)
        elif settings.grouping == "deviation":
            groups = group_languages(deviation.similarity, languages, number)
        else:
            groups = group_languages(vector_similarity(settings.grouping, languages), languages, number)
    if len(groups) < 2:
        raise InputError("One group of languages: a mixture needs at least 2 experts, one a group.")
    return groups


def _needed(value: int | None, name: str, method: str) -> int:
    if value is None:
        raise InputError(f"The {method} plan needs `{name}`.")
    return value
