"""From settings (and, for layer-moe, an analysis) to a plan."""

from collections.abc import Sequence

from ..analysis.result import SimilarityResult
from ..errors import InputError
from ..settings import PlanSettings
from .allocation import allocate_experts, mola_experts, random_experts, uniform_experts
from .layers import classifier_layers
from .plan import Plan

METHODS = ("layer-moe", "uniform", "mola", "random")


def make_plan(
    settings: PlanSettings,
    num_layers: int,
    old: Sequence[str],
    new: Sequence[str],
    analysis: SimilarityResult | None = None,
    seed: int = 0,
) -> Plan:
    """The plan that `settings` describe.

    Args:
        num_layers: of the base model.
        analysis: similarities of each layer; `layer-moe` and classifier layers by similarity need it.

    Raises:
        InputError: the method is unknown, or what it needs is missing or out of range.
    """
    method = settings.method
    details: dict = {"seed": seed} if method == "random" or settings.classifier_choice == "random" else {}
    if method == "layer-moe":
        if analysis is None:
            raise InputError("The layer-moe plan needs an analysis: run `analyze similarity` first.")
        total = _needed(settings.total_experts, "total_experts", method)
        counts = allocate_experts(analysis.similarity, total, settings.minimum, settings.similarity_floor)
        details["similarity"] = analysis.similarity
    elif method == "uniform":
        counts = uniform_experts(num_layers, _needed(settings.experts, "experts", method))
    elif method == "mola":
        counts = mola_experts(num_layers, settings.shape)
        details["shape"] = settings.shape
    elif method == "random":
        counts = random_experts(
            num_layers, _needed(settings.total_experts, "total_experts", method), settings.minimum, seed
        )
    else:
        raise InputError(f"Unknown plan method {method!r}; known: {', '.join(METHODS)}.")
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
    return Plan(method, counts, layers, settings.top_k, list(old), list(new), details)


def _needed(value: int | None, name: str, method: str) -> int:
    if value is None:
        raise InputError(f"The {method} plan needs `{name}`.")
    return value
