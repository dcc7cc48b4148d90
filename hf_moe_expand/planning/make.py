"""Makes a plan from a recipe's `plan:` and, if its method needs one, an analysis."""

from collections.abc import Sequence

from ..core.errors import InputError
from ..core.layer_names import layer_name
from .layers import classifier_layers, layers_in
from .methods import METHODS, LayerPlan, PlanSettings, Target
from .plan import MOST_EXPERTS, Plan
from .results import Result


def make_plan(
    settings: PlanSettings,
    num_layers: int,
    old: Sequence[str],
    new: Sequence[str],
    analysis: Result | None = None,
    seed: int = 0,
    *,
    grows_from: Sequence[int] = (),
    encoder_layers: int = 0,
    exclusive: bool = False,
    measured: bool = True,
) -> Plan:
    """The plan that `settings` describe.

    Args:
        old, new: the languages. A method that makes groups takes its languages from the analysis.
        analysis: the one that `settings.needs` names.
        grows_from: experts of each layer of the expanded model that the plan grows; empty for a dense model.
        encoder_layers: for an encoder-decoder, the number of the encoder's among the layers.
        exclusive: whether that model's experts are exclusive.
        measured: whether the analysis is there; else the plan is the largest that it may give.
    """
    if grows_from and not settings.grows:
        growing = ", ".join(name for name, other in METHODS.items() if other.grows)
        raise InputError(f"A {settings.method} plan is for a dense model and cannot grow one; use {growing}.")
    if grows_from and len(grows_from) != num_layers:
        raise InputError(f"The plan is for {num_layers} layers, but the model to grow has {len(grows_from)}.")
    if num_layers > MOST_EXPERTS:
        raise InputError(f"{num_layers} layers are too many: a model may have at most {MOST_EXPERTS:,} experts in all.")
    analyses = {} if analysis is None else _named(analysis, num_layers, encoder_layers)
    by_layer = settings if isinstance(settings, LayerPlan) else LayerPlan.model_construct()
    layers = _layers(by_layer.only_layers, num_layers, grows_from, encoder_layers)
    target = Target(num_layers, seed, grows_from, analyses, [*old, *new])
    made = settings.allocate_in(layers, target, measured)
    counts = made.counts
    if grows_from:
        counts = [before + added for before, added in zip(grows_from, counts, strict=True)]
    expanded = [layer for layer, count in enumerate(counts) if count > 1]
    new_old = getattr(analysis, "new_old", None) if measured else [0.0] * num_layers  # any layers are as good
    if by_layer.classifiers_in:
        classifiers = layers_in(by_layer.classifiers_in, num_layers, "classifiers_in", encoder_layers)
    else:
        choice, count = by_layer.classifier_choice, by_layer.classifier_layers
        classifiers = classifier_layers(choice, count, expanded, new_old, seed)
    details = {**({"seed": seed} if made.drawn or by_layer.classifier_choice == "random" else {}), **made.details}
    if by_layer.only_layers:
        details["only_layers"] = by_layer.only_layers
    return Plan(
        settings.method, counts, top_k=settings.top_k, old=list(old), new=list(new), settings=details,
        classifier_layers=classifiers, groups=[list(group) for group in made.groups], grows_from=list(grows_from),
        exclusive=by_layer.exclusive or exclusive, encoder_layers=encoder_layers,
        modules=getattr(settings, "modules", None), rank=getattr(settings, "rank", None),
    )  # fmt: skip


def _named(analysis: Result, num_layers: int, encoder_layers: int) -> dict[str, Result]:
    """An analysis by its name; refuses one of a model with other layers."""
    name = analysis.by_layer[0]
    if (layers_of := len(getattr(analysis, name))) != num_layers:
        raise InputError(f"The analysis has {layers_of} layers, but the model has {num_layers}.")
    if (of_encoder := getattr(analysis, "encoder_layers", encoder_layers)) != encoder_layers:
        raise InputError(f"The analysis has {of_encoder} layers of an encoder, but the model has {encoder_layers}.")
    return {name: analysis}


def _layers(only: str | None, num_layers: int, grows_from: Sequence[int], encoder_layers: int) -> list[int]:
    """The layers that get experts: those that the settings name, all by default. Growth leaves dense layers dense."""
    layers = layers_in(only, num_layers, encoder_layers=encoder_layers) if only else list(range(num_layers))
    dense = [layer for layer in layers if grows_from and grows_from[layer] == 1]
    if only and dense:
        raise InputError(
            f"only_layers names layer {layer_name(dense[0], encoder_layers)}, which is dense in the model that grows "
            "and has no router; leave it out."
        )
    return [layer for layer in layers if layer not in dense]
