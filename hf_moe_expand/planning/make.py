"""Makes a plan from a recipe's `plan:` and, if its method needs one, an analysis."""

from collections.abc import Sequence

from ..errors import InputError
from ..results import DeviationResult, SimilarityResult
from .layers import classifier_layers
from .methods import METHODS, PlanSettings, Target
from .plan import Plan


def make_plan(
    settings: PlanSettings,
    num_layers: int,
    old: Sequence[str],
    new: Sequence[str],
    similarity: SimilarityResult | None = None,
    seed: int = 0,
    deviation: DeviationResult | None = None,
    grows_from: Sequence[int] = (),
) -> Plan:
    """The plan that `settings` describe.

    Args:
        num_layers: number of the model's layers.
        old, new: the languages. A method that makes groups takes its languages from `deviation`.
        similarity, deviation: the analysis that `settings.needs` names.
        seed: random seed of all choices.
        grows_from: experts of each layer of the expanded model that the plan grows; empty for a dense model.

    Raises:
        InputError: the analysis that the method needs is missing or belongs to another model, the method cannot grow a
            model, a number is out of range, or the languages contradict each other.
    """
    method = settings.planner
    if grows_from and not method.grows:
        growing = ", ".join(other.name for other in METHODS.values() if other.grows)
        raise InputError(f"A {settings.method} plan is for a dense model and cannot grow one; use {growing}.")
    if grows_from and len(grows_from) != num_layers:
        raise InputError(f"The plan is for {num_layers} layers, but the model to grow has {len(grows_from)}.")
    lengths = [len(similarity.similarity)] if similarity else []
    lengths += [len(deviation.deviation)] if deviation else []
    if wrong := [length for length in lengths if length != num_layers]:
        raise InputError(f"The analysis has {wrong[0]} layers, but the model has {num_layers}.")
    made = method.allocate(Target(num_layers, seed, similarity, deviation, grows_from), **settings.own)
    counts = made.counts
    if grows_from:
        counts = [before + added for before, added in zip(grows_from, counts, strict=True)]
    expanded = [layer for layer, count in enumerate(counts) if count > 1]
    choice, number = settings.classifier_choice, settings.classifier_layers
    # A count of 0 turns off every choice but `all`.
    choice = "none" if number == 0 and choice != "all" else choice
    layers = classifier_layers(choice, number, expanded, None if similarity is None else similarity.new_old, seed)
    drawn = made.drawn or settings.classifier_choice == "random"
    details = {**({"seed": seed} if drawn else {}), **made.details}
    groups = [list(group) for group in made.groups]
    return Plan(
        settings.method, counts, layers, settings.top_k, list(old), list(new), details, groups, list(grows_from)
    )
