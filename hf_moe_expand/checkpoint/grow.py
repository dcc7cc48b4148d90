"""Growth: further experts of an expanded checkpoint, which leave existing weights byte for byte."""

import copy
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import InputError, errors_at
from ..core.languages import check_named_once
from ..core.schema import changed, checked
from ..modeling import LayerMoEConfig, layer_names
from ..planning.plan import REFUSED, Plan
from .expand import check_layers, planned_record
from .facts import Facts
from .new_experts import new_weight
from .records import ExpansionRecord, History
from .source import load_expanded_config, resolve_checkpoint
from .stored import Place, StoredModel
from .table import Copy, New, Rows, Rule, opened, rewrite
from .writer import DEFAULT_SHARD_SIZE


@checked
def grow_checkpoint(
    model: str | os.PathLike,
    out: str | os.PathLike,
    plan: Plan,
    *,
    copy_from: Mapping[int, int] | None = None,
    seed: int = 0,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Path:
    """Writes the further expansion of an expanded checkpoint (LayerMoE section 3.4, lifelong expansion).

    New experts are of the last expansion's kind and size, and exclusive if those are.

    Earlier experts and router rows stay byte for byte. Classifiers get one more class: a layer that had a classifier
    keeps its rows, and the new class starts as a copy of the last one, so that its decisions do not change until
    review.

    Args:
        model: expanded checkpoint.
        out: folder to write.
        plan: made with `--from`, for this model: experts of each layer after the growth.
        copy_from: the expert that the new ones copy, by layer; expert 0 by default.

    Raises:
        InputError: see `check_growth`; or a layer lacks the expert to copy.
    """
    folder = resolve_checkpoint(model)
    config = check_growth(folder, plan)
    facts, layers = Facts(config), range(len(plan.experts_per_layer))
    if unknown := sorted({*(copy_from or {})} - {*layers}):
        raise InputError(f"copy_from names layer {unknown[0]}, but {folder} has layers 0 to {layers[-1]}.")
    origin = {layer: (copy_from or {}).get(layer, 0) for layer in layers}
    sources = {layer: [origin[layer]] * (plan.experts_per_layer[layer] - facts.counts[layer]) for layer in layers}
    first = facts.history.first
    record = planned_record(
        changed(plan, exclusive=config.exclusive_experts), old_languages=facts.history.languages,
        base_model=first.base_model, base_revision=first.base_revision, copied_experts=origin, seed=seed,
    )  # fmt: skip
    # A gate knows nothing of the new languages: fit it again.
    parts = {name: settings for name, settings in config.parts.items() if name != "gate"}
    if facts.has_adapters:
        parts["languages"] = [*config.adapters, _adapter_to_copy(folder, config, origin)]
    changes = {
        "earlier_experts_per_layer": config.counts_of_expansions, "classifier_layers": plan.classifier_layers,
        "parts": parts,
    }  # fmt: skip
    return add_experts(
        folder, out, sources, record, config_changes=changes, seed=seed, max_shard_size=max_shard_size,
        overwrite=overwrite,
    )  # fmt: skip


def _adapter_to_copy(folder: Path, config: Any, origin: Mapping[int, int]) -> dict:
    """The maps of the next adapter: those of the one that it copies; of the last one, if it begins with zeros."""
    known = [config.adapters[-1], *config.adapters]  # `add_experts` refuses an expert that is not there
    adapters = [known[expert] for expert in {*origin.values()} if expert < len(known)] or known
    if any(adapter != adapters[0] for adapter in adapters):
        raise InputError(f"{folder}: copy_from names adapters of different maps: copy one adapter in all layers, or 0.")
    return adapters[0]


def check_growth(model: str | os.PathLike, plan: Plan) -> Any:
    """The configuration of the checkpoint that the plan grows, after checking that the plan is for it."""
    folder = resolve_checkpoint(model)
    config: Any = load_expanded_config(folder)
    plan.checked()
    if not isinstance(config, LayerMoEConfig):
        raise InputError(f"{folder}: {REFUSED['dmoe', 'grown']}.")
    parts: dict[str, Any] = config.parts or {}
    if any("each" in parts.get(name, {}) for name in ("lora", "added")):
        raise InputError(
            f"{folder}: joins packs with experts of several kinds or sizes, and growth adds experts of one kind: "
            "expand the base for the new languages and join that pack too."
        )
    facts = Facts(config)
    counts = facts.counts
    if plan.grows_from != counts:
        made_for = f"a model with {plan.grows_from} experts" if plan.grows_from else "a dense model"
        raise InputError(
            f"The plan was made for {made_for} in its layers, but {folder} has {counts}: plan with --from {folder}."
        )
    added = [after - before for before, after in zip(counts, plan.experts_per_layer, strict=True)]
    if facts.has_adapters and max(added) > 1:
        raise InputError(
            f"{folder}: a language has one adapter, but the plan adds more experts to a layer: plan with 1 (`plan "
            "exclusive --from MODEL`)."
        )
    if plan.exclusive and not facts.exclusive:
        raise InputError(f"{folder}: the plan's experts are exclusive, but its own are not: plan without `exclusive`.")
    check_layers(plan, config, folder)
    with errors_at(str(folder)):
        known = [*facts.history.first.old_languages, *facts.history.languages]
    if again := [code for code in plan.new if code in known]:
        raise InputError(f"{', '.join(again)}: already a language of the model; leave it out of --new.")
    check_named_once([*known, *plan.new])
    return config


def classifier_changes(model: str | os.PathLike, plan: Plan) -> list[str]:
    """What growth by the plan does to the model's classifiers, one sentence for each kind of change."""
    config = check_growth(model, plan)
    facts = Facts(config)
    before, after = set(facts.classifiers), set(plan.classifier_layers)
    classes, names = len(facts.history) + 2, layer_names(config)
    effects = [
        (before - after, "removed: the plan names none for these layers"),
        (before & after, f"kept, with a class for the new languages ({classes} classes)"),
        (after - before, f"added, with weights of zero ({classes} classes)"),
    ]
    changes = [
        f"classifiers of layers {', '.join(names[layer] for layer in sorted(layers))}: {effect}"
        for layers, effect in effects
        if layers
    ]
    if facts.gate is not None:
        changes.append("the language gate: removed; fit it again after stage 1 (`hf-moe-expand gates`)")
    return changes


def add_experts(
    model: str | os.PathLike,
    out: str | os.PathLike,
    sources: Mapping[int, Sequence[int]],
    record: ExpansionRecord,
    *,
    copy_router_rows: bool = False,
    config_changes: Mapping[str, Any] | None = None,
    seed: int = 0,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Path:
    """Writes the checkpoint with more experts in its expanded layers.

    Args:
        model: expanded checkpoint.
        sources: the experts that the new ones copy, by layer; of expanded layers alone.
        record: record of the expansion, for the history; its parameter count is filled in here.
        copy_router_rows: a new expert gets the router row of the expert that it copies; else a new row is drawn.
        config_changes: further fields of the configuration.
        seed: random seed of the new rows.
    """
    (stored,) = opened([model], out, overwrite)
    config, counts, names = copy.deepcopy(stored.config), Facts(stored.config).counts, layer_names(stored.config)
    for layer, expert in ((layer, expert) for layer, experts in sources.items() for expert in experts):
        if not 0 <= expert < counts[layer]:
            raise InputError(
                f"{stored.folder}: layer {names[layer]} has no expert {expert} to copy; give one of "
                f"0..{counts[layer] - 1}."
            )
    sources = {layer: experts for layer, experts in sources.items() if experts}
    for name, value in (config_changes or {}).items():
        setattr(config, name, value)
    config.num_experts_per_layer = [count + len(sources.get(layer, ())) for layer, count in enumerate(counts)]
    return rewrite(
        [stored], config, _growth(stored, counts, sources, copy_router_rows, seed), out,
        record=History([*History.of(config).expansions, record]), title="grow", max_shard_size=max_shard_size,
        overwrite=overwrite,
    )  # fmt: skip


def _growth(
    stored: StoredModel, counts: Sequence[int], sources: Mapping[int, Sequence[int]], copy_router_rows: bool, seed: int
) -> Rule:
    """Of what the tensors of a grown model are made, whose layers had `counts` experts."""
    copied = {expert for experts in sources.values() for expert in experts}
    outside = copied.pop() if len(copied) == 1 else 0
    classes = len(stored.config.counts_of_expansions) + 1

    def rule(place: Place) -> Copy | Rows | New:
        layer, key = place.layer, place.key
        draw = partial(new_weight, place.inner, place.shape, (seed, layer))
        before = counts[layer] if layer >= 0 else classes  # outside the layers a language has the number of its class
        if place.expert is not None and place.expert >= before:
            if source := sources[layer][place.expert - before] if layer >= 0 else outside:
                return Copy(place.of_expert(source))
            if place.dense is not None:
                return Copy(stored.base.get(place.dense, place.dense))
            # An update or an added expert, which adds zero to expert 0.
            like = next(name for name in stored.tensors if name.startswith(place.beside("experts.")))
            return New(draw, stored[like].dtype)
        if place.inner == "router.weight" and layer in sources:
            if key not in stored.shapes:  # the first class with a choice, of exclusive experts
                return New(draw, "F32")
            rows = [*range(counts[layer])]
            if copy_router_rows:
                return Rows(Copy(key), [*rows, *sources[layer]])
            # Drawn for the router's whole size, so that the new rows have the scale of a first expansion's rows.
            place_of_rows = (seed, layer, counts[layer])
            return Rows(Copy(key), rows, lambda: new_weight(place.inner, place.shape, place_of_rows)[counts[layer] :])
        if place.inner == "classifier.weight":
            if key not in stored.shapes:  # a new one
                return New(draw, stored[place.beside("router.weight")].dtype)
            had = stored.shapes[key][0]
            return Rows(Copy(key), [*range(had), *[had - 1] * (place.shape[0] - had)])
        return Copy(key)

    return rule
