"""Adds experts to an expanded checkpoint, and takes later ones out again. Existing weights stay byte for byte; all is
streamed, one tensor in memory."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from ..errors import InputError, errors_at
from ..modeling import LayerMoEConfig, decoder_ffns, layer_names, stack_sizes
from ..modeling.expanded_config import KINDS
from ..planning.plan import Plan
from ..records import ExpansionRecord, History
from ..schema import changed
from .expand import planned_record
from .new_experts import Block, new_router, new_weight
from .reader import CheckpointReader
from .source import COMPANIONS, load_expanded_config, resolve_checkpoint
from .stored import StoredModel, check_complete
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, copy_of, in_memory, made, write_checkpoint, zeros

# File beside the weights: routers and classifiers as they were after expansion {}.
KEPT_ROUTERS = "routers_after_expansion_{}.safetensors"
_ROUTING = re.compile(r"\.(router|classifier|conditional_gate)\.(weight|bias)$")


def grow_checkpoint(
    model: str | os.PathLike,
    out: str | os.PathLike,
    plan: Plan,
    *,
    copy_from: Mapping[int, int] | None = None,
    keep_routers: bool = False,
    seed: int = 0,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Path:
    """Writes the further expansion of an expanded checkpoint (LayerMoE section 3.4, lifelong expansion).

    Earlier experts and router rows stay byte for byte. Classifiers get one more class: a layer that had a classifier
    keeps its rows, and the new class starts as a copy of the last one, so that its decisions do not change until
    review.

    Args:
        model: expanded checkpoint.
        out: folder to write.
        plan: made with `--from`, for this model: experts of each layer after the growth.
        copy_from: the expert that the new ones copy, by layer; expert 0 by default.
        keep_routers: store the present routers and classifiers beside the weights, for `shrink_checkpoint`.

    Raises:
        InputError: see `check_growth`; or a layer lacks the expert to copy.
    """
    folder = resolve_checkpoint(model)
    config = check_growth(folder, plan)
    counts, history = config.num_experts_per_layer, History.of(config)
    origin = {layer: (copy_from or {}).get(layer, 0) for layer in range(len(counts))}
    sources = {
        layer: [origin[layer]] * (after - before)
        for layer, (before, after) in enumerate(zip(counts, plan.experts_per_layer, strict=True))
        if after > before
    }
    record = planned_record(
        plan, old_languages=history.languages, base_model=history.first.base_model,
        base_revision=history.first.base_revision, copied_experts=origin, seed=seed,
    )  # fmt: skip
    changes = {
        "earlier_experts_per_layer": [*(config.earlier_experts_per_layer or []), counts],
        "classifier_layers": plan.classifier_layers,
        "prefix_gate": plan.prefix_rule,
        "gate_languages": None,  # fitted gates know nothing of the new languages: fit them again
    }
    return add_experts(
        folder, out, sources, record, config_changes=changes, keep_routers=keep_routers, seed=seed,
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip


def check_growth(model: str | os.PathLike, plan: Plan) -> Any:
    """The configuration of the checkpoint that the plan grows, after checking that the plan is for it.

    Raises:
        InputError: the plan is for another model, the model knows a language of the plan already, or the checkpoint is
            DMoE's.
    """
    folder = resolve_checkpoint(model)
    config: Any = load_expanded_config(folder)
    plan.checked()
    if not isinstance(config, LayerMoEConfig):
        raise InputError(
            f"{folder}: is a {config.model_type} checkpoint, which does not grow by plans: add a language to it with "
            "`train adapt`."
        )
    if config.updates_of_packs:
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
    return config


def classifier_changes(model: str | os.PathLike, plan: Plan) -> list[str]:
    """What growth by the plan does to the model's classifiers, one sentence for each kind of change."""
    config = check_growth(model, plan)
    before, after = set(config.classifier_layers or []), set(plan.classifier_layers)
    classes, names = len(History.of(config)) + 2, layer_names(config)
    refitted = config.gate_languages is not None
    retained = set() if refitted else before & after
    why = (
        "fit gates again after stage 1 (`hf-moe-expand gates`)" if refitted else "the plan names none for these layers"
    )
    effects = [
        (before if refitted else before - after, f"removed: {why}"),
        (retained, f"kept, with a class for the new languages ({classes} classes)"),
        (after - retained, f"added, with weights of zero ({classes} classes)"),
    ]
    changes = [
        f"classifiers of layers {', '.join(names[layer] for layer in sorted(layers))}: {effect}"
        for layers, effect in effects
        if layers
    ]
    if retained and config.prefix_gate != plan.prefix_rule:
        was, will_be = (
            f"judge the text so far ({gate})" if gate else "judge one token"
            for gate in (config.prefix_gate, plan.prefix_rule)
        )
        changes.append(f"all classifiers: they {was}, and will {will_be}")
    return changes


def add_experts(
    model: str | os.PathLike,
    out: str | os.PathLike,
    sources: Mapping[int, Sequence[int]],
    record: ExpansionRecord,
    *,
    copy_router_rows: bool = False,
    config_changes: Mapping[str, Any] | None = None,
    keep_routers: bool = False,
    seed: int = 0,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Path:
    """Writes the checkpoint with more experts in its expanded layers.

    Args:
        model: expanded checkpoint.
        sources: the experts that the new ones copy, by layer.
        record: record of the expansion, for the history; its parameter count is filled in here.
        copy_router_rows: a new expert gets the router row of the expert that it copies; else a new row, drawn as the
            router's rows were.
        config_changes: further fields of the configuration.
        keep_routers: store the present routers and classifiers beside the weights.
        seed: random seed of the new rows.

    Raises:
        InputError: `model` is not an expanded checkpoint, a layer is not expanded, or it lacks the expert to copy.
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
    prefixes = [ffn.place for ffn in decoder_ffns(check_complete(folder, config))]
    reader = CheckpointReader(folder)
    config.num_experts_per_layer = [count + len(sources.get(layer, ())) for layer, count in enumerate(counts)]
    for name, value in (config_changes or {}).items():
        setattr(config, name, value)
    history = History.of(config)
    before = len(history)
    outputs = {name: copy_of(reader, name) for name in reader.tensors}
    stored = StoredModel(folder) if config.expert_kind == "added" else None
    for layer, experts in sources.items():
        prefix = prefixes[layer]
        block = None
        if stored is not None:
            block = Block(stored.network.expanded_ffns()[layer].experts[0], stored, f"{prefix}.experts.0")
        for number, expert in enumerate(experts, start=counts[layer]):
            # A LoRA or added expert that copies expert 0 adds zero to it, with tensors of the shapes of expert 1's.
            anew = expert == 0 and not KINDS[config.expert_kind].has_ffn
            make = partial(new_weight, place=(seed, layer), block=block) if anew else None
            new = _new_expert(reader, prefix, 1 if anew else expert, number, make)
            outputs |= {tensor.name: tensor for tensor in new}
        if experts:  # else a dense layer, maybe, which has no router
            rows = experts if copy_router_rows else None
            more = partial(_more_experts, copied_rows=rows, place=(seed, layer, counts[layer]))
            name = f"{prefix}.router.weight"
            outputs[name] = _resized(reader, name, config.num_experts_per_layer[layer], more)
    for layer, prefix in enumerate(prefixes):
        name = f"{prefix}.classifier.weight"
        fitted = outputs.pop(f"{prefix}.classifier.bias", None) is not None
        old = outputs.pop(name, None)
        if layer in config.classifier_layers:
            if old is None or fitted:
                router = outputs[f"{prefix}.router.weight"]
                outputs[name] = zeros(name, router.dtype, (before + 2, router.shape[1]))
            else:
                outputs[name] = _resized(reader, name, before + 2, _more_classes)
    parameters = sum(tensor.numel for tensor in outputs.values())
    history.with_expansion(changed(record, parameters=parameters)).write(config)
    files = {}
    if keep_routers:
        today = {name: reader.tensor(name) for name in reader.tensors if _ROUTING.search(name)}
        files[KEPT_ROUTERS.format(before)] = save(today, metadata={"format": "pt"})
    return write_checkpoint(
        out, config, outputs.values(), [(folder, COMPANIONS)], "grow", max_shard_size, overwrite, files=files
    )


def _new_expert(
    reader: CheckpointReader, prefix: str, source: int, number: int, make: Callable[..., torch.Tensor] | None
) -> Iterator[OutputTensor]:
    """The tensors of expert `number` of a layer: copies of those of expert `source`, or new ones of their shapes."""
    of_source = f"{prefix}.experts.{source}."
    for name, info in reader.tensors.items():
        if name.startswith(of_source):
            inner = f"experts.{number}.{name.removeprefix(of_source)}"
            new = f"{prefix}.{inner}"
            if make is None:
                yield copy_of(reader, name, new)
            else:
                yield made(new, info.dtype, info.shape, partial(make, inner, info.shape))


def _resized(
    reader: CheckpointReader, name: str, rows: int, make: Callable[[torch.Tensor, int], torch.Tensor]
) -> OutputTensor:
    """A tensor with another number of rows, which `make` makes of the stored tensor."""
    info = reader.tensors[name]
    return made(name, info.dtype, (rows, *info.shape[1:]), lambda: make(reader.tensor(name), rows))


def _more_classes(old: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.cat([old, old[-1:].expand(classes - len(old), -1)])


def _more_experts(
    old: torch.Tensor, experts: int, copied_rows: Sequence[int] | None, place: tuple[int, ...]
) -> torch.Tensor:
    # Drawn for the router's whole size, so that the new rows have the scale of a first expansion's rows.
    new = new_router((experts, old.shape[1]), place)[len(old) :] if copied_rows is None else old[list(copied_rows)]
    return torch.cat([old, new.to(old.dtype)])


@dataclass(frozen=True)
class ShrinkReport:
    """Result of `shrink_checkpoint`.

    Attributes:
        routers_restored: whether routers and classifiers are restored byte for byte; else they are the first rows of
            the later ones, which later stages retrained.
        classifiers_lost: layers whose classifier could not be restored.
        names_lost: the names of these layers.
    """

    out: Path
    routers_restored: bool
    classifiers_lost: list[int]
    names_lost: list[str]


def shrink_checkpoint(
    model: str | os.PathLike,
    out: str | os.PathLike,
    to: int,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> ShrinkReport:
    """Writes the checkpoint as it was after expansion `to` (1 is the first).

    Raises:
        InputError: the checkpoint was not grown, or has no such expansion.
    """
    folder = resolve_checkpoint(model)
    check_output(out, overwrite, folder)
    config: Any = load_expanded_config(folder)
    history = list(getattr(config, "earlier_experts_per_layer", None) or [])
    if not isinstance(config, LayerMoEConfig) or not 1 <= to <= len(history):
        raise InputError(
            f"{folder}: expansion {to} was asked for, but "
            + (f"only 1..{len(history)} came before its last." if history else "it was expanded once only.")
        )
    if config.packs and to < sum(config.packs):
        raise InputError(f"{folder}: joins language packs, which have no order: take one out with --without PACK.")
    expansions = History.of(config).expansions
    if stage := next((stage.stage for stage in History(expansions[to:]).stages if stage.changes_everything), None):
        raise InputError(
            f"{folder}: `{stage}` changed the earlier experts and shared weights: leaving out the later experts does "
            "not restore the earlier model. Shrink the checkpoint from before that stage."
        )
    prefixes = [ffn.place for ffn in decoder_ffns(check_complete(folder, config))]
    reader = CheckpointReader(folder)
    kept_file = folder / KEPT_ROUTERS.format(to)
    routers = load_file(kept_file) if kept_file.is_file() else None
    grown: Any = config.num_experts_per_layer
    config.num_experts_per_layer = history[to - 1]
    config.earlier_experts_per_layer = history[: to - 1] or None
    kept_history = History(expansions[:to])
    kept_history.write(config)
    config.classifier_layers = kept_history.last.classifier_layers
    config.prefix_gate = kept_history.last.prefix_gate
    known, config.gate_languages = config.gate_languages, kept_history.last.gate_languages
    lost = []
    outputs = {name: copy_of(reader, name) for name in reader.tensors if ".classifier." not in name}
    for layer, prefix in enumerate(prefixes):
        if grown[layer] == 1:  # never expanded; it may have experts of the backbone's own
            continue
        count = config.num_experts_per_layer[layer]
        for name in reader.tensors:
            inside = name.removeprefix(f"{prefix}.experts.")
            if inside != name and int(inside.split(".", 1)[0]) >= count:
                del outputs[name]
        of_classes = to + 1 if known is None else sum(map(len, known[: to + 1]))
        rows = {"router.weight": count, "classifier.weight": of_classes if layer in config.classifier_layers else 0}
        rows["classifier.bias"] = rows["classifier.weight"] if config.gate_languages else 0
        rows["conditional_gate.weight"] = int(config.conditional_routing and count > 1)
        for inner, number in rows.items():
            name = f"{prefix}.{inner}"
            if routers is not None and name in routers:
                outputs[name] = in_memory(name, routers[name])
            elif number and name in reader.tensors and bool(known) == bool(config.gate_languages):
                outputs[name] = _resized(reader, name, number, lambda old, rows: old[:rows])
            elif number:
                lost.append(layer)
    if lost:
        config.classifier_layers = [layer for layer in config.classifier_layers if layer not in lost]
        config.prefix_gate = config.prefix_gate if config.classifier_layers else None
    companions = [pattern for pattern in COMPANIONS if pattern != KEPT_ROUTERS.format("*")]
    companions += [KEPT_ROUTERS.format(earlier) for earlier in range(1, to)]
    write_checkpoint(out, config, outputs.values(), [(folder, companions)], "shrink", max_shard_size, overwrite)
    names = layer_names(config)
    return ShrinkReport(Path(out), routers is not None, lost, [names[layer] for layer in lost])
