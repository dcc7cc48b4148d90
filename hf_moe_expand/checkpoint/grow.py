"""Adds experts to an expanded checkpoint. Existing weights stay byte for byte; all is streamed."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core.errors import InputError, errors_at
from ..core.languages import check_named_once
from ..core.schema import changed, checked
from ..modeling import LayerMoEConfig, layer_names, stack_sizes
from ..planning.plan import REFUSED, Plan
from .expand import planned_record
from .new_experts import new_weight
from .records import ExpansionRecord, History
from .source import TOKENIZER_FILES, load_expanded_config, resolve_checkpoint
from .stored import StoredModel, network_of, places
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, computed, write_checkpoint, zeros


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
    plan = changed(plan, exclusive=config.exclusive_experts)
    counts, history = config.num_experts_per_layer, History.of(config)
    if unknown := sorted({*(copy_from or {})} - {*range(len(counts))}):
        raise InputError(f"copy_from names layer {unknown[0]}, but {folder} has layers 0 to {len(counts) - 1}.")
    origin = {layer: (copy_from or {}).get(layer, 0) for layer in range(len(counts))}
    sources = {
        layer: [origin[layer]] * (after - before)
        for layer, (before, after) in enumerate(zip(counts, plan.experts_per_layer, strict=True))
    }
    record = planned_record(
        plan, old_languages=history.languages, base_model=history.first.base_model,
        base_revision=history.first.base_revision, copied_experts=origin, seed=seed,
    )  # fmt: skip
    changes: dict[str, Any] = {
        "earlier_experts_per_layer": [*(config.earlier_experts_per_layer or []), counts],
        "classifier_layers": plan.classifier_layers,
        # A gate knows nothing of the new languages: fit it again.
        "parts": {name: settings for name, settings in config.parts.items() if name != "gate"},
    }
    if config.expert_kind == "adapter":
        changes["parts"]["adapters"] = [*config.adapters, _adapter_to_copy(folder, config, origin)]
    return add_experts(
        folder, out, sources, record, config_changes=changes, seed=seed, max_shard_size=max_shard_size,
        overwrite=overwrite,
    )  # fmt: skip


def _adapter_to_copy(folder: Path, config: Any, origin: Mapping[int, int]) -> dict:
    """The maps of the next adapter: those of the one that it copies; of the last one, if it begins with zeros."""
    adapters = {str(config.adapters[expert - 1]): config.adapters[expert - 1] for expert in {*origin.values()}}
    if len(adapters) > 1:
        raise InputError(f"{folder}: copy_from names adapters of different maps: copy one adapter in all layers, or 0.")
    return next(iter(adapters.values()))


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
    counts = config.num_experts_per_layer
    if plan.grows_from != counts:
        made_for = f"a model with {plan.grows_from} experts" if plan.grows_from else "a dense model"
        raise InputError(
            f"The plan was made for {made_for} in its layers, but {folder} has {counts}: plan with --from {folder}."
        )
    added = [after - before for before, after in zip(counts, plan.experts_per_layer, strict=True)]
    if config.expert_kind == "adapter" and max(added) > 1:
        raise InputError(
            f"{folder}: a language has one adapter, but the plan adds more experts to a layer: plan with 1 (`plan "
            "exclusive --from MODEL`)."
        )
    if plan.exclusive and not config.exclusive_experts:
        raise InputError(f"{folder}: the plan's experts are exclusive, but its own are not: plan without `exclusive`.")
    encoder = stack_sizes(config).get("encoder", 0)
    if plan.encoder_layers != encoder:
        raise InputError(
            f"The plan says that the first {plan.encoder_layers} layers are an encoder's, but in {folder} it is "
            f"{encoder}: plan with --from {folder}."
        )
    with errors_at(str(folder)):
        history = History.of(config)
        known = [*history.first.old_languages, *history.languages]
    if again := [code for code in plan.new if code in known]:
        raise InputError(f"{', '.join(again)}: already a language of the model; leave it out of --new.")
    check_named_once([*known, *plan.new])
    return config


def classifier_changes(model: str | os.PathLike, plan: Plan) -> list[str]:
    """What growth by the plan does to the model's classifiers, one sentence for each kind of change."""
    config = check_growth(model, plan)
    before, after = set(config.classifier_layers or []), set(plan.classifier_layers)
    classes, names = len(History.of(config)) + 2, layer_names(config)
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
    if config.language_gate is not None:
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
        sources: the experts that the new ones copy, by layer.
        record: record of the expansion, for the history; its parameter count is filled in here.
        copy_router_rows: a new expert gets the router row of the expert that it copies; else a new row is drawn.
        config_changes: further fields of the configuration.
        seed: random seed of the new rows.
    """
    folder = resolve_checkpoint(model)
    check_output(out, overwrite, folder)
    config: Any = load_expanded_config(folder)
    counts, names = list(config.num_experts_per_layer), layer_names(config)
    for layer, experts in sources.items():
        if not 0 <= layer < len(counts) or (counts[layer] < 2 and experts):
            name = names[layer] if 0 <= layer < len(counts) else layer
            raise InputError(f"{folder}: layer {name} has no router, so no expert can be added there.")
        if wrong := [expert for expert in experts if not 0 <= expert < counts[layer]]:
            raise InputError(
                f"{folder}: layer {names[layer]} has no expert {wrong[0]} to copy; give one of 0..{counts[layer] - 1}."
            )
    stored = StoredModel(folder)
    config.num_experts_per_layer = [count + len(sources.get(layer, ())) for layer, count in enumerate(counts)]
    for name, value in (config_changes or {}).items():
        setattr(config, name, value)
    outputs = list(_grown_tensors(stored, config, sources, copy_router_rows, seed))
    history = History.of(config)
    parameters = sum(tensor.numel for tensor in outputs)
    History([*history.expansions, changed(record, parameters=parameters)]).write(config)
    return write_checkpoint(out, config, outputs, [(folder, TOKENIZER_FILES)], "grow", max_shard_size, overwrite)


def _grown_tensors(
    stored: StoredModel, config: Any, sources: Mapping[int, Sequence[int]], copy_router_rows: bool, seed: int
) -> Iterator[OutputTensor]:
    """Every tensor of the grown model, whose configuration is `config`."""
    counts = stored.config.num_experts_per_layer
    for key, place in places(network_of(config)).items():
        layer, shape, prefix = place.layer, place.shape, key.removesuffix(place.inner)
        if place.expert is not None and place.expert >= counts[layer]:
            source = sources[layer][place.expert - counts[layer]]
            rest = place.inner.split(".", 2)[2]
            if source == 0 and place.dense is None:  # a LoRA or added expert that adds zero to expert 0
                dtype = next(stored[name].dtype for name in stored.tensors if name.startswith(f"{prefix}experts."))
                yield computed(key, dtype, shape, partial(new_weight, place.inner, shape, (seed, layer)))
            else:
                yield stored.copied(f"{prefix}experts.{source}.{rest}", key)
        elif place.inner == "router.weight" and sources.get(layer):
            if key not in stored:  # the first class with a choice, of exclusive experts
                yield computed(key, "F32", shape, partial(new_weight, place.inner, shape, (seed, layer)))
                continue
            rows = sources[layer] if copy_router_rows else None
            more = partial(_more_experts, copied_rows=rows, place=(seed, layer, counts[layer]))
            yield _resized(stored, key, shape[0], more)
        elif place.inner == "classifier.weight":
            if key not in stored:  # a new one
                yield zeros(key, stored[f"{prefix}router.weight"].dtype, shape)
            else:
                yield _resized(stored, key, shape[0], lambda old, n: torch.cat([old, *[old[-1:]] * (n - len(old))]))
        elif key in stored:
            yield from stored.copies(key)


def _resized(
    stored: StoredModel, key: str, rows: int, make: Callable[[torch.Tensor, int], torch.Tensor]
) -> OutputTensor:
    """A tensor with another number of rows, which `make` makes of the stored tensor."""
    shape = (rows, *stored[key].shape[1:])
    return computed(key, stored[key].dtype, shape, lambda: make(stored.tensor(key), rows))


def _more_experts(
    old: torch.Tensor, experts: int, copied_rows: Sequence[int] | None, place: tuple[int, ...]
) -> torch.Tensor:
    if copied_rows is not None:
        return torch.cat([old, old[list(copied_rows)]])
    # Drawn for the router's whole size, so that the new rows have the scale of a first expansion's rows.
    drawn = new_weight("router.weight", (experts, old.shape[1]), place)
    return torch.cat([old, drawn[len(old) :].to(old.dtype)])
