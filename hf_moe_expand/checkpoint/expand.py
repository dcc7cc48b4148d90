"""Expansion: a dense model's FFNs become experts, those of a checkpoint, streamed, or of a loaded model; and growth: an
expanded checkpoint gets further ones, and keeps existing weights byte for byte."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from .. import __version__
from ..core.errors import InputError, errors_at, library_errors_at
from ..core.languages import check_named_once
from ..core.schema import changed, checked
from ..modeling import DMoEConfig, LayerMoEConfig, decoder_ffns, stack_sizes
from ..planning.plan import REFUSED, Plan
from .arguments import NewExperts
from .compare import base_hashes
from .facts import ExpertKind, Facts
from .gate import Gate
from .new_experts import chosen_kind, new_weight, random_weight
from .promises import check_architecture
from .reader import TORCH_DTYPES
from .records import ExpansionRecord, History
from .source import check_base_config, load_base_config, load_expanded_config, resolve_checkpoint
from .stored import LoadedModel, Place, Source, StoredModel
from .table import Copy, Given, New, Rows, Rule, opened, rewrite
from .writer import DEFAULT_SHARD_SIZE, check_output


@dataclass(frozen=True)
class ExpansionReport:
    """Result of an expansion: parameters before and after; tensors unknown to the backbone, left out; and warnings."""

    out: Path
    base_parameters: int
    parameters: int
    left_out: Sequence[str] = ()
    warnings: Sequence[str] = ()


@partial(checked, keywords=NewExperts)
def expand_checkpoint(
    base: str | os.PathLike,
    out: str | os.PathLike,
    plan: Plan,
    *,
    seed: int = 0,
    revision: str | None = None,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    gate: Gate | None = None,
    **experts: Any,
) -> ExpansionReport:
    """Writes the expanded checkpoint of a dense one.

    Args:
        base: folder or hub id of the dense checkpoint (safetensors).
        out: folder to write; appears whole or not at all.
        experts: `expert_init`, `expert_kind` and the other settings of the new experts (`NewExperts`). All but
            `random` ones start as the dense model: copies, or updates and added FFNs whose output is zero.
        seed: of the routers, of random experts and of updates.
        gate: the language gate of this base (`gating.gate_from_file`), for the plan's languages.

    Raises:
        InputError: the base cannot be expanded, the plan is for another model or gives experts to layers below the
            gate, or `out` cannot be written.
    """
    folder = resolve_checkpoint(base, revision)
    check_output(out, overwrite, folder)
    config = load_base_config(folder)
    check_architecture(config, base)
    dense = StoredModel(base, config, revision)
    written: dict[str, Any] = {"out": out, "max_shard_size": max_shard_size, "overwrite": overwrite}
    _, record = _expanded(dense, plan, NewExperts(**experts), seed, gate, **written)
    return ExpansionReport(Path(out), record.base_parameters or 0, record.parameters or 0, dense.unknown)


@partial(checked, keywords=NewExperts)
def expand_model(dense: PreTrainedModel, plan: Plan, *, seed: int = 0, gate: Gate | None = None, **experts: Any) -> Any:
    """Returns the expanded model of a dense one, equal to that of `expand_checkpoint` and `from_pretrained`.

    All weights but new experts and routers share the dense model's memory: training one model changes the other. New
    weights are on the device and in the type of the layer's FFN. `save_pretrained`, with the tokenizer saved beside
    it, writes a checkpoint that every command takes.

    Args:
        dense: a `...ForCausalLM` or `...ForConditionalGeneration` of a supported backbone, on one device.
        plan, experts, seed, gate: see `expand_checkpoint`.

    Returns:
        A `LayerMoEForCausalLM`, a `LayerMoEForSeq2SeqLM` if `dense` is an encoder-decoder, or a `DMoEForCausalLM` if
        the plan has language groups.
    """
    name = type(dense).__name__
    check_base_config(dense.config, name)
    check_architecture(dense.config, name)
    source = LoadedModel(dense)
    if source.unknown:
        raise InputError(f"{name}: has tensors that the backbone does not know ({', '.join(source.unknown[:3])}).")
    model, _ = _expanded(source, plan, NewExperts(**experts), seed, gate)
    return model


def _expanded(
    dense: Source, plan: Plan, experts: NewExperts, seed: int, gate: Gate | None, **written: Any
) -> tuple[Any, ExpansionRecord]:
    """The folder of the expanded model, or the loaded one; and its record."""
    check_dense_plan(plan, dense.config, dense.name)
    kind = chosen_kind(dense.network, plan, experts)
    config = planned_config(dense.config, plan, kind, gate, conditional_routing=experts.conditional_routing)
    record = planned_record(
        plan, old_languages=plan.old, seed=seed, expert_init=experts.expert_init, language_gate=config.language_gate,
        base_hashes=base_hashes(dense), **dense.as_base,
    )  # fmt: skip
    rule = expansion_rule(dense, experts.expert_init, seed, gate)
    made = rewrite([dense], config, rule, record=History([record]), title="expand", **written)
    return made, History.of(config).last


def expansion_rule(dense: Source, expert_init: str, seed: int, gate: Gate | None = None) -> Rule:
    """Of what the tensors of an expanded model are made, right after its expansion: of copies of the dense model's, and
    new ones; `gate` has the rows of the language gate."""
    ffns, network = decoder_ffns(dense.network), dense.network

    def rule(place: Place) -> Copy | New | Given:
        if place.dense is None:
            # A router and the like have the type in which the layer's FFN is stored.
            ffn = ffns[place.layer]
            dtype = dense[f"{ffn.name}.{next(inner for inner, _ in ffn.module.named_parameters())}"].dtype
            if gate is not None and (place.layer, place.inner) in gate.rows:
                return Given(gate.rows[place.layer, place.inner].to(TORCH_DTYPES[dtype]))
            return New(partial(new_weight, place.inner, place.shape, (seed, place.layer)), dtype)
        if expert_init == "random" and place.expert:
            ffn = ffns[place.layer]
            rest = place.dense.removeprefix(f"{ffn.name}.")
            draw = partial(random_weight, network, ffn.module, rest, (seed, place.layer, place.expert))
            return New(draw, dense[place.dense].dtype)
        return Copy(place.dense)

    return rule


def check_layers(plan: Plan, config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Refuses a plan for another number of layers, or of an encoder's layers."""
    sizes = stack_sizes(config)
    needed, own = (sum(sizes.values()), sizes.get("encoder", 0)), (len(plan.experts_per_layer), plan.encoder_layers)
    if own != needed:
        made, there = (f"{count} layers" + f", {of} of them an encoder's" * (of > 0) for count, of in (own, needed))
        raise InputError(f"The plan is for {made}, but {name} has {there}: make a plan for this model.")


def check_dense_plan(plan: Plan, dense_config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Refuses a plan that does not expand this dense model, which messages call `name`."""
    plan.checked()
    if plan.grows_from:
        raise InputError("The plan was made to grow an expanded checkpoint (--from): use `grow`.")
    check_layers(plan, dense_config, name)


def planned_config(
    dense_config: PreTrainedConfig, plan: Plan, kind: ExpertKind | None = None, gate: Gate | None = None, **fields: Any
) -> Any:
    """The configuration of a dense model expanded by `plan` with experts of a kind, FFNs by default, and a gate; and
    with further `fields` of `ExpandedConfig`."""
    config_class: Any = DMoEConfig if plan.groups else LayerMoEConfig
    kind = kind or ExpertKind()
    with library_errors_at("plan", ValueError):  # of code that checkpoints carry, which has no InputError
        config = config_class.from_dense(
            dense_config,
            num_experts_per_layer=plan.experts_per_layer,
            classifier_layers=plan.classifier_layers,
            router_top_k=plan.top_k,
            exclusive_experts=plan.exclusive,
            **kind.fields,
            **({"language_groups": plan.groups} if plan.groups else {}),
            **fields,
        )
    if gate is not None:
        check_plan_of_gate(plan)
        gate.set_in(config)
    return config


def check_plan_of_gate(plan: Plan) -> None:
    """Refuses a plan with what a gate takes the place of."""
    if plan.groups or plan.classifier_layers:
        has = f"classifiers in layers {plan.classifiers_in_words}" if plan.classifier_layers else "groups of a DMoE"
        raise InputError(f"The plan has {has}, which a gate takes the place of: leave one of them out.")


def planned_record(plan: Plan, **facts: Any) -> ExpansionRecord:
    """The record of an expansion by `plan`; `facts` are the fields that the plan does not decide."""
    grouped = [code for group in plan.groups for code in group]
    return ExpansionRecord(
        method=plan.method,
        new_languages=plan.new or [code for code in grouped if code not in plan.old],
        experts_per_layer=plan.experts_per_layer,
        classifier_layers=plan.classifier_layers,
        exclusive=plan.exclusive or None,
        versions=versions(),
        **facts,
    )


def versions() -> dict[str, str]:
    """The versions of the software that writes a checkpoint."""
    return {"hf_moe_expand": __version__, "transformers": transformers.__version__, "torch": torch.__version__}


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

    New experts are of the last expansion's kind and size, and exclusive if those are. Earlier experts and router rows
    stay byte for byte. Classifiers get one more class: a layer that had a classifier keeps its rows, and the new class
    starts as a copy of the last one, so that its decisions do not change until review.

    Args:
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
    known = [config.adapters[-1], *config.adapters]  # `rewrite` refuses an expert that is not there
    adapters = [known[expert] for expert in {*origin.values()} if expert < len(known)] or known
    if any(adapter != adapters[0] for adapter in adapters):
        raise InputError(f"{folder}: copy_from names adapters of different maps: copy one of them, or expert 0.")
    return adapters[0]


def check_growth(model: str | os.PathLike, plan: Plan) -> Any:
    """The configuration of the checkpoint that the plan grows, after checking that the plan is for it."""
    folder = resolve_checkpoint(model)
    config: Any = load_expanded_config(folder)
    plan.checked()
    with errors_at(str(folder)):
        if not isinstance(config, LayerMoEConfig):
            raise InputError(f"{REFUSED['dmoe', 'grown']}.")
        if any("each" in (config.parts or {}).get(name, {}) for name in ("lora", "added")):
            raise InputError("joins packs with experts of several kinds or sizes: join a further pack.")
        facts = Facts(config)
        if plan.grows_from != facts.counts:
            raise InputError(f"has {facts.counts} experts, but the plan was made for {plan.grows_from or [1]}.")
        added = [after - before for before, after in zip(facts.counts, plan.experts_per_layer, strict=True)]
        if facts.has_adapters and max(added) > 1:
            raise InputError("a language has one adapter, but the plan adds more experts to a layer: plan with 1.")
        if plan.exclusive and not facts.exclusive:
            raise InputError("the plan's experts are exclusive, but its own are not: plan without `exclusive`.")
        check_layers(plan, config, folder)
        known = [*facts.history.first.old_languages, *facts.history.languages]
        if again := [code for code in plan.new if code in known]:
            raise InputError(f"{', '.join(again)}: already a language of the model; leave it out of --new.")
        check_named_once([*known, *plan.new])
    return config


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
        sources: the experts that the new ones copy, by layer; of expanded layers alone.
        record: of the expansion, for the history; its parameter count is filled in here.
        copy_router_rows: a new expert gets the router row of the expert that it copies; else a new row is drawn.
        config_changes: further fields of the configuration.
    """
    (stored,) = opened([model], out, overwrite)
    config, counts = copy.deepcopy(stored.config), Facts(stored.config).counts
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
