"""Expansion: a dense model's FFNs become experts, those of a checkpoint, streamed, or of a loaded model; and further
experts of an expanded checkpoint, which leave existing weights byte for byte."""

import copy
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedConfig, PreTrainedModel

from .. import __version__
from ..core.errors import InputError, errors_at
from ..core.languages import check_named_once
from ..core.schema import changed, checked, shown_value
from ..modeling import (
    DMoEConfig,
    ExpandedConfig,
    LayerMoEConfig,
    decoder_ffns,
    language_models,
    layer_names,
    stack_sizes,
)
from ..planning.plan import REFUSED, Plan
from .compare import base_hashes
from .facts import Facts
from .gate import Gate
from .kinds import AdapterKind, ExpertKind, set_part
from .new_experts import chosen_kind, new_weight, random_weight
from .operation_settings import NewExperts
from .promises import check_architecture
from .reader import TORCH_DTYPES
from .records import ExpansionRecord, History
from .source import (
    check_base_config,
    differences,
    load_base_config,
    load_expanded_config,
    name_and_commit,
    resolve_checkpoint,
)
from .stored import LoadedModel, OwnTensor, Place, Source, StoredModel, network_of, own_tensors
from .table import Copy, Given, Mix, New, Rows, Rule, opened, rewrite
from .writer import DEFAULT_SHARD_SIZE, check_output

_FEW = 5
_PART = re.compile(r"(model\.)?[^.]+")
_SNAPSHOT = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})[/\\]?$")
# Fields that say how a model was made or loaded and do not affect its outputs.
_OF_LOADING = {"_name_or_path", "architectures", "auto_map", "dtype", "expansions", "transformers_version"}


@dataclass(frozen=True)
class ExpansionReport:
    """Result of `expand_checkpoint`: parameters before and after, and tensors unknown to the backbone, left out."""

    out: Path
    base_parameters: int
    parameters: int
    left_out: list[str]

    @property
    def left_out_parts(self) -> list[str]:
        """What was left out, in words: a few tensors by name, many by the part of the model that they belong to."""
        if len(self.left_out) <= _FEW:
            return self.left_out
        parts = Counter(_PART.match(name)[0] for name in self.left_out)  # type: ignore[index]
        return [f"{part} ({count} tensors)" for part, count in parts.items()]


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
        plan: experts and classifiers of each layer.
        expert_init: `copy` makes every new expert a copy of the original FFN, so that the expanded model gives the
            dense model's outputs; `random` draws the weights as the backbone's own initialisation does (MoE-LPR's
            ablation "w/o EC").
        conditional_routing: make expert 0 a shared FFN outside the routed set, whose share of a token's output is
            learned (CMR).
        expert_kind: kind of the new experts: `ffn`, separate FFNs, or `lora`, expert 0 with a low-rank update on its
            linear layers (MoLA, LoRAMoE), which is zero at first; or `added`, expert 0 with an FFN of any width beside
            it, whose output is zero at first, for a base that is a mixture of experts too; or `adapter`, low-rank
            updates of all the layer's linear maps, in attention too, which are zero at first.
        lora_rank, lora_alpha: rank (8) and alpha (16) of the updates, which are scaled by `lora_alpha / lora_rank`.
        expert_width: width of the added FFNs.
        target_modules: the linear maps that adapters update, as PEFT names them; all by default.
        seed: random seed of the routers, of random experts and of updates.
        revision: revision of a hub id.
        max_shard_size: size of the largest weight file.
        overwrite: replace `out` if it exists.
        gate: the language gate of this base (`gating.gate_from_file`), for the plan's languages.

    Raises:
        InputError: the base cannot be expanded, the plan is for another model or gives experts to layers below the
            gate, or `out` cannot be written.
    """
    wanted = NewExperts(**experts)
    folder = resolve_checkpoint(base, revision)
    check_output(out, overwrite, folder)
    dense_config = load_base_config(folder)
    check_architecture(dense_config, base)
    check_dense_plan(plan, dense_config, base)
    dense = StoredModel(folder, dense_config)
    kind = chosen_kind(dense.network, plan, wanted)
    config = planned_config(dense_config, plan, kind, gate, conditional_routing=wanted.conditional_routing)
    _expand(
        dense, config, plan, name_and_commit(base, folder), wanted.expert_init, seed, gate, out,
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip
    record = History.of(config).last
    return ExpansionReport(Path(out), record.base_parameters or 0, record.parameters or 0, dense.unknown)


@partial(checked, keywords=NewExperts)
def expand_model(
    dense: Any, plan: Plan | ExpandedConfig, *, seed: int = 0, gate: Gate | None = None, **experts: Any
) -> Any:
    """Returns the expanded model of a dense one, equal to that of `expand_checkpoint` and `from_pretrained`.

    All weights but new experts and routers share the dense model's memory: training one model changes the other. New
    weights are on the device and in the type of the layer's FFN. `save_pretrained`, with the tokenizer saved beside
    it, writes a checkpoint that every command takes.

    Args:
        dense: a `...ForCausalLM` or `...ForConditionalGeneration` of a supported backbone, on one device.
        plan: experts and classifiers of each layer; or a configuration from `LayerMoEConfig.from_dense` or
            `DMoEConfig.from_dense`, which then also sets `conditional_routing`, `expert_kind` and its settings.
        expert_init, conditional_routing, expert_kind, lora_rank, lora_alpha, expert_width, target_modules, seed, gate:
            see `expand_checkpoint`.

    Returns:
        A `LayerMoEForCausalLM`, a `LayerMoEForSeq2SeqLM` if `dense` is an encoder-decoder, or a `DMoEForCausalLM` if
        the plan has language groups.

    Raises:
        InputError: the model cannot be expanded, or the plan or configuration is for another model.
    """
    wanted = NewExperts(**experts)
    _check_dense(dense)
    given = None
    if isinstance(plan, ExpandedConfig):
        if wanted != NewExperts(expert_init=wanted.expert_init):
            raise InputError(
                "conditional_routing, expert_kind and its settings are fields of the configuration: set them in "
                "`from_dense`."
            )
        given, wanted, plan = plan, _experts_of(plan, wanted.expert_init), _plan_of(plan)
    name, revision = base_of(dense)
    check_dense_plan(plan, dense.config, name)
    source = LoadedModel(dense)
    if source.unknown:
        raise InputError(
            f"{type(dense).__name__}: has tensors that the backbone does not know ({', '.join(source.unknown[:3])}); "
            "merge an adapter into the model before expanding it."
        )
    adapters = None if given is None else given.adapters
    kind = AdapterKind(adapters) if adapters else chosen_kind(dense, plan, wanted)
    config = planned_config(dense.config, plan, kind, gate, conditional_routing=wanted.conditional_routing)
    if given is not None:
        if gate is None:
            set_part(config, "gate", given.language_gate)
        for field, own, needed in differences(given, config, _OF_LOADING):
            raise InputError(
                f"The configuration is for another model: its {field} is {own!r}, but this dense model needs "
                f"{needed!r}. Make it with `from_dense(dense.config, ...)`."
            )
    config.tie_word_embeddings = source.config.tie_word_embeddings
    return _expand(source, config, plan, (name, revision), wanted.expert_init, seed, gate)


def _expand(
    dense: Source, config: Any, plan: Plan, base: tuple[str, str | None], expert_init: str, seed: int,
    gate: Gate | None, out: Any = None, **written: Any,
) -> Any:  # fmt: skip
    """The expanded model of a checkpoint or of a loaded model."""
    record = planned_record(
        plan, old_languages=plan.old, base_model=base[0], base_revision=base[1], seed=seed, expert_init=expert_init,
        base_parameters=sum(dense[key].numel for key in dense.tensors), language_gate=config.language_gate,
        base_hashes=base_hashes(dense),
    )  # fmt: skip
    own = own_tensors(network_of(config)) if "languages" in config.parts else {}
    rule = expansion_rule(dense, expert_init, seed, gate, own)
    return rewrite([dense], config, rule, out, record=History([record]), title="expand", **written)


def expansion_rule(
    dense: Source, expert_init: str, seed: int, gate: Gate | None = None, own: Mapping[str, OwnTensor] | None = None
) -> Rule:
    """Of what the tensors of an expanded model are made, right after its expansion: of copies of the dense model's, and
    new ones; `gate` has the rows of the language gate, and `own` are the tensors of languages' own modules."""
    ffns, network, own = decoder_ffns(dense.network), dense.network, own or {}

    def rule(place: Place) -> Copy | Mix | New | Given:
        if place.layer < 0 and place.expert is None:
            return Copy(place.key)
        if place.key in own and own[place.key].factor is None:
            return whole_copy(dense, own[place.key].dense)
        ffn = ffns[place.layer]
        if place.dense is None:
            # A router and the like have the type in which the layer's FFN is stored.
            dtype = dense[f"{ffn.name}.{next(inner for inner, _ in ffn.module.named_parameters())}"].dtype
            if gate is not None and (place.layer, place.inner) in gate.rows:
                return Given(gate.rows[place.layer, place.inner].to(TORCH_DTYPES[dtype]))
            return New(partial(new_weight, place.inner, place.shape, (seed, place.layer)), dtype)
        if expert_init == "random" and place.expert:
            rest = place.dense.removeprefix(f"{ffn.name}.")
            draw = partial(random_weight, network, ffn.module, rest, (seed, place.layer, place.expert))
            return New(draw, dense[place.dense].dtype)
        return Copy(place.dense)

    return rule


def whole_copy(source: Source, key: str) -> Copy | Mix:
    """A copy of a tensor in one piece: a mixture that is stored in parts is put together."""
    return Mix([Copy(key)], [1.0]) if key in source and source[key].parts else Copy(key)


def check_layers(plan: Plan, config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Refuses a plan for another number of layers, or of an encoder's layers."""
    sizes = stack_sizes(config)
    needed, own = (sum(sizes.values()), sizes.get("encoder", 0)), (len(plan.experts_per_layer), plan.encoder_layers)
    if own != needed:
        made, there = (f"{count} layers" + f", {of} of them an encoder's" * (of > 0) for count, of in (own, needed))
        raise InputError(f"The plan is for {made}, but {name} has {there}: make a plan for this model.")


def check_dense_plan(plan: Plan, dense_config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Refuses a plan that does not expand this dense model; messages call the model `name`."""
    plan.checked()
    if plan.grows_from:
        raise InputError("The plan was made to grow an expanded checkpoint (--from): use `grow`.")
    check_layers(plan, dense_config, name)


def planned_config(
    dense_config: PreTrainedConfig, plan: Plan, kind: ExpertKind | None = None, gate: Gate | None = None, **fields: Any
) -> Any:
    """The configuration of a dense model expanded by `plan` with experts of a kind, FFNs by default, and a gate;
    `fields` are further ones of `ExpandedConfig`."""
    config_class: Any = DMoEConfig if plan.groups else LayerMoEConfig
    kind = kind or ExpertKind()
    try:
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
    except ValueError as error:  # of code that checkpoints carry, which has no InputError
        raise InputError(str(error)) from None
    if gate is not None:
        check_plan_of_gate(plan)
        gate.set_in(config)
    return config


def check_plan_of_gate(plan: Plan) -> None:
    """Refuses a plan with what a gate takes the place of."""
    if plan.groups:
        raise InputError("A gate sends text home to a frozen base, but DMoE trains the base: leave the gate out.")
    if plan.classifier_layers:
        raise InputError(
            f"The gate takes the place of classifiers, but the plan has some, in layers {plan.classifiers_in_words}: "
            "plan without classifiers."
        )


def base_of(dense: PreTrainedModel) -> tuple[str, str | None]:
    """A loaded model's name and commit on the hub; the folder's name and None if it came from a folder; its class's
    name and None if it was made from a configuration."""
    name = str(dense.config._name_or_path or "")
    if not name:
        return type(dense).__name__, None
    if snapshot := _SNAPSHOT.search(name):  # a folder of the hub's cache
        return snapshot.group(1).replace("--", "/"), snapshot.group(2)
    path = Path(name)
    if path.is_dir() or path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2:
        return path.resolve().name, None
    # Since 5.23 transformers does not keep the commit: it is that of the only one in the hub's cache.
    return name, getattr(dense.config, "_commit_hash", None) or _only_commit(name)


def _only_commit(name: str) -> str | None:
    try:
        file = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no hub id
        return None
    folder = Path(file).parent if isinstance(file, str) else None
    return folder.name if folder is not None and len(list(folder.parent.iterdir())) == 1 else None


def _check_dense(dense: Any) -> None:
    name = type(dense).__name__
    if not isinstance(dense, PreTrainedModel):
        raise InputError(
            f"expand_model: dense is {shown_value(dense)}: not a model of transformers; for a PEFT model, give its "
            "`merge_and_unload()`."
        )
    check_base_config(dense.config, name)
    check_architecture(dense.config, name)
    wanted: Any = language_models(dense.config)[type(dense.config)]
    if not isinstance(dense, wanted):
        raise InputError(f"{name}: only a model with its language-model head is expanded; load a {wanted.__name__}.")


def _plan_of(config: ExpandedConfig) -> Plan:
    """The plan that a configuration describes."""
    facts = Facts(config)
    if len(facts.history) or len(config.counts_of_expansions) > 1:
        raise InputError(
            "The configuration has expansions already: make one with `from_dense` from the dense model's configuration."
        )
    method = "moe-lpr" if len(set(facts.counts)) == 1 and not facts.classifiers else "layer-moe"
    return Plan(
        "dmoe" if facts.groups else method, facts.counts, classifier_layers=facts.classifiers,
        top_k=config.router_top_k, groups=facts.groups, exclusive=facts.exclusive,
    )  # fmt: skip


def _experts_of(config: ExpandedConfig, expert_init: str) -> NewExperts:
    """The settings of the new experts in a configuration."""
    fields = {name: value for name in NewExperts.model_fields if (value := getattr(config, name, None)) is not None}
    return NewExperts(expert_init=expert_init, **fields)


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
    counts, history = Facts(config).counts, Facts(config).history
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
        "earlier_experts_per_layer": config.counts_of_expansions,
        "classifier_layers": plan.classifier_layers,
        # A gate knows nothing of the new languages: fit it again.
        "parts": {name: settings for name, settings in config.parts.items() if name != "gate"},
    }
    if config.expert_kind == "adapter":
        changes["parts"]["languages"] = [*config.adapters, _adapter_to_copy(folder, config, origin)]
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
        sources: the experts that the new ones copy, by layer.
        record: record of the expansion, for the history; its parameter count is filled in here.
        copy_router_rows: a new expert gets the router row of the expert that it copies; else a new row is drawn.
        config_changes: further fields of the configuration.
        seed: random seed of the new rows.
    """
    (stored,) = opened([model], out, overwrite)
    config, counts, names = copy.deepcopy(stored.config), Facts(stored.config).counts, layer_names(stored.config)
    for layer, experts in sources.items():
        if not 0 <= layer < len(counts) or (counts[layer] < 2 and experts):
            name = names[layer] if 0 <= layer < len(counts) else layer
            raise InputError(f"{stored.folder}: layer {name} has no router, so no expert can be added there.")
        if wrong := [expert for expert in experts if not 0 <= expert < counts[layer]]:
            raise InputError(
                f"{stored.folder}: layer {names[layer]} has no expert {wrong[0]} to copy; give one of "
                f"0..{counts[layer] - 1}."
            )
    sources = {layer: experts for layer, experts in sources.items() if experts}
    config.num_experts_per_layer = [count + len(sources.get(layer, ())) for layer, count in enumerate(counts)]
    for name, value in (config_changes or {}).items():
        setattr(config, name, value)
    return rewrite(
        [stored], config, _growth(stored, config, counts, sources, copy_router_rows, seed), out,
        record=History([*History.of(config).expansions, record]), title="grow", max_shard_size=max_shard_size,
        overwrite=overwrite,
    )  # fmt: skip


def _growth(
    stored: StoredModel, config: Any, counts: Sequence[int], sources: Mapping[int, Sequence[int]],
    copy_router_rows: bool, seed: int,
) -> Rule:  # fmt: skip
    """Of what the tensors of a model with this configuration are made, whose layers had `counts` experts."""
    copied = {expert for experts in sources.values() for expert in experts}
    outside = copied.pop() if len(copied) == 1 else 0
    own = own_tensors(network_of(config)) if "languages" in config.parts else {}
    classes = len(config.counts_of_expansions)

    def rule(place: Place) -> Copy | Mix | Rows | New | None:
        layer, key = place.layer, place.key
        draw = partial(new_weight, place.inner, place.shape, (seed, layer))
        is_outside = layer < 0 and place.expert == classes  # of a language, outside the layers
        if is_outside or (layer >= 0 and place.expert is not None and place.expert >= counts[layer]):
            source = outside if is_outside else sources[layer][place.expert - counts[layer]]  # type: ignore[operator]
            if source or place.dense is not None:
                return Copy(place.of_expert(source))
            if key in own and own[key].factor is None:
                return whole_copy(stored, own[key].dense)
            # A LoRA or added expert that adds zero to expert 0.
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
