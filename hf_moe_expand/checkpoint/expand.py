"""Expansion: a dense model's FFNs become experts, those of a checkpoint, streamed, or of a loaded model."""

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedConfig, PreTrainedModel

from .. import __version__
from ..core.errors import InputError
from ..core.schema import checked, shown_value
from ..modeling import (
    DMoEConfig,
    ExpandedConfig,
    LayerMoEConfig,
    decoder_ffns,
    language_models,
    model_class,
    stack_sizes,
)
from ..planning.plan import Plan
from .base_tensors import base_hashes
from .gate_file import Gate
from .kinds import AdapterKind, ExpertKind, set_part
from .loaded import LoadedModel, blank, filled
from .local import name_and_commit
from .new_experts import check_kinds, chosen_kind, first_weight
from .promises import check_architecture
from .reader import TORCH_DTYPES
from .records import ExpansionRecord, History
from .settings import LORA_ALPHA, LORA_RANK
from .source import TOKENIZER_FILES, check_base_config, differences, load_base_config, resolve_checkpoint
from .stored import Place, StoredModel, network_of, places
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, computed, in_memory, write_checkpoint

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


@checked
def expand_checkpoint(
    base: str | os.PathLike,
    out: str | os.PathLike,
    plan: Plan,
    *,
    expert_init: str = "copy",
    conditional_routing: bool = False,
    expert_kind: str = "ffn",
    lora_rank: int = LORA_RANK,
    lora_alpha: float = LORA_ALPHA,
    expert_width: int | None = None,
    target_modules: str | list[str] | None = None,
    seed: int = 0,
    revision: str | None = None,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    gate: Gate | None = None,
) -> ExpansionReport:
    """Writes the expanded checkpoint of a dense one.

    Args:
        base: folder or hub id of the dense checkpoint (safetensors).
        out: folder to write; appears whole or not at all.
        plan: experts and classifiers of each layer.
        expert_init: `copy` makes every new expert a copy of the original FFN, so that the expanded model gives the
            dense model's outputs; `random` draws the weights as the backbone's own initialisation does (MoE-LPR's
            ablation "w/o EC").
        conditional_routing: make expert 0 a shared FFN outside the routed set; a gate decides whether the routed
            experts add to a token's output (CMR).
        expert_kind: kind of the new experts: `ffn`, separate FFNs, or `lora`, expert 0 with a low-rank update on its
            linear layers (MoLA, LoRAMoE), which is zero at first; or `added`, expert 0 with an FFN of any width beside
            it, whose output is zero at first, for a base that is a mixture of experts too; or `adapter`, low-rank
            updates of all the layer's linear maps, in attention too, which are zero at first.
        lora_rank, lora_alpha: rank and alpha of the updates, which are scaled by `lora_alpha / lora_rank`.
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
    check_kinds(expert_init, expert_kind)
    folder = resolve_checkpoint(base, revision)
    check_output(out, overwrite, folder)
    dense_config = load_base_config(folder)
    check_architecture(dense_config, base)
    check_dense_plan(plan, dense_config, base)
    dense = StoredModel(folder, dense_config)
    kind = chosen_kind(
        dense.network, plan, expert_init, expert_kind, lora_rank, lora_alpha, expert_width, target_modules
    )
    config = planned_config(dense_config, plan, kind, conditional_routing=conditional_routing)
    if gate is not None:
        check_plan_of_gate(plan)
        gate.set_in(config)
    tensors = expanded_tensors(dense, config, expert_init, seed, gate=gate)
    held = [dense[key] for key in dense.tensors]
    base_parameters = sum(stored.numel for stored in held)
    parameters = sum(tensor.numel for tensor in tensors)
    name, commit = name_and_commit(base, folder)
    record = planned_record(
        plan, old_languages=plan.old, base_model=name, base_revision=commit, seed=seed,
        expert_init=expert_init, base_parameters=base_parameters, parameters=parameters,
        language_gate=config.language_gate, base_hashes=base_hashes(dense),
    )  # fmt: skip
    History([record]).write(config)
    write_checkpoint(out, config, tensors, [(folder, TOKENIZER_FILES)], "expand", max_shard_size, overwrite)
    return ExpansionReport(Path(out), base_parameters, parameters, dense.unknown)


@checked
def expand_model(
    dense: Any,
    plan: Plan | ExpandedConfig,
    *,
    expert_init: str = "copy",
    conditional_routing: bool = False,
    expert_kind: str = "ffn",
    lora_rank: int = LORA_RANK,
    lora_alpha: float = LORA_ALPHA,
    expert_width: int | None = None,
    target_modules: str | list[str] | None = None,
    seed: int = 0,
    gate: Gate | None = None,
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
    check_kinds(expert_init, expert_kind)
    _check_dense(dense)
    if isinstance(plan, ExpandedConfig):
        wanted = plan
        of_kind = (lora_rank, lora_alpha, expert_width, target_modules) != (LORA_RANK, LORA_ALPHA, None, None)
        if conditional_routing or expert_kind != "ffn" or of_kind:
            raise InputError(
                "conditional_routing, expert_kind and its settings are fields of the configuration: set them in "
                "`from_dense`."
            )
        plan, conditional_routing, expert_kind = _plan_of(wanted), wanted.conditional_routing, wanted.expert_kind
        lora_rank, lora_alpha = wanted.lora_rank or lora_rank, wanted.lora_alpha or lora_alpha
        expert_width = wanted.expert_width
    else:
        wanted = None
    name, revision = base_of(dense)
    check_dense_plan(plan, dense.config, name)
    if wanted is not None and wanted.adapters:
        kind: ExpertKind = AdapterKind(wanted.adapters)
    else:
        kind = chosen_kind(
            dense, plan, expert_init, expert_kind, lora_rank, lora_alpha, expert_width, target_modules
        )  # fmt: skip
    config = planned_config(dense.config, plan, kind, conditional_routing=conditional_routing)
    if gate is not None:
        check_plan_of_gate(plan)
        gate.set_in(config)
    elif wanted is not None:
        set_part(config, "gate", wanted.language_gate)
    if wanted is not None:
        for field, own, needed in differences(wanted, config, _OF_LOADING):
            raise InputError(
                f"The configuration is for another model: its {field} is {own!r}, but this dense model needs "
                f"{needed!r}. Make it with `from_dense(dense.config, ...)`."
            )
    untied = _untied(dense)
    if untied and not config.is_encoder_decoder:
        config.tie_word_embeddings = False  # as `StoredModel` has it
    expanded = blank(dense, config, untied)
    filled(expanded, dense, _state(dense, expanded, expert_init, seed, gate))
    static = model_class(config)
    expanded.config.architectures = [static.__name__]
    expanded.config.auto_map = static.auto_map(config)
    record = planned_record(
        plan, old_languages=plan.old, base_model=name, base_revision=revision, seed=seed,
        expert_init=expert_init, base_parameters=_parameters(dense),
        parameters=_parameters(expanded), language_gate=config.language_gate,
        base_hashes=base_hashes(LoadedModel(expanded)),
    )  # fmt: skip
    History([record]).write(expanded.config)
    return expanded


def check_layers(plan: Plan, dense_config: PreTrainedConfig, base: str | os.PathLike) -> None:
    """Refuses a plan for another number of layers, or of an encoder's layers."""
    sizes = stack_sizes(dense_config)
    layers, encoder = sum(sizes.values()), sizes.get("encoder", 0)
    if len(plan.experts_per_layer) != layers:
        raise InputError(
            f"The plan is for {len(plan.experts_per_layer)} layers, but {base} has {layers}: "
            "make a plan for this model."
        )
    if plan.encoder_layers != encoder:
        raise InputError(
            f"The plan is for {_stacks(plan.encoder_layers, layers)}, but {base} has {_stacks(encoder, layers)}: make "
            "a plan for this model (`plan --layers MODEL`)."
        )


def _stacks(encoder: int, layers: int) -> str:
    return f"{encoder} layers of an encoder and {layers - encoder} of a decoder" if encoder else "a decoder"


def check_dense_plan(plan: Plan, dense_config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Refuses a plan that does not expand this dense model; messages call the model `name`."""
    plan.checked()
    if plan.grows_from:
        raise InputError("The plan was made to grow an expanded checkpoint (--from): use `grow`.")
    check_layers(plan, dense_config, name)


def check_plan_of_gate(plan: Plan) -> None:
    """Refuses a plan with what a gate takes the place of."""
    if plan.groups:
        raise InputError("A gate sends text home to a frozen base, but DMoE trains the base: leave the gate out.")
    if plan.classifier_layers:
        raise InputError(
            f"The gate takes the place of classifiers, but the plan has some, in layers {plan.classifiers_in_words}: "
            "plan without classifiers."
        )


def planned_config(
    dense_config: PreTrainedConfig, plan: Plan, kind: ExpertKind | None = None, **fields: Any
) -> ExpandedConfig:
    """The configuration of a dense model expanded by `plan` with experts of a kind, FFNs by default; `fields` are
    further ones of `ExpandedConfig`."""
    config_class = DMoEConfig if plan.groups else LayerMoEConfig
    kind = kind or ExpertKind()
    try:
        return config_class.from_dense(
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


def expanded_tensors(
    dense: StoredModel,
    config: Any,
    expert_init: str,
    seed: int,
    own: Callable[[Place, str], OutputTensor] | None = None,
    gate: Gate | None = None,
) -> list[OutputTensor]:
    """Every tensor of the expanded checkpoint. `own` makes those that the dense model has too, of their places and
    names; by default they are copies. `gate` has the rows of the language gate."""
    expanded, ffns = network_of(config), decoder_ffns(dense.network)
    outputs = []
    for name, place in places(expanded).items():
        if place.dense is not None and place.dense not in dense:  # tied
            continue
        ffn = ffns[place.layer]
        make = first_weight(dense.network, ffn, place, expert_init, seed)
        if make is not None:
            # A router and the like have the type in which the layer's FFN is stored.
            like = place.dense or f"{ffn.name}.{next(inner for inner, _ in ffn.module.named_parameters())}"
            rows = None if gate is None else gate.rows.get((place.layer, place.inner))
            dtype = dense[like].dtype
            outputs.append(
                computed(name, dtype, place.shape, make)
                if rows is None
                else in_memory(name, rows.to(TORCH_DTYPES[dtype]))
            )
        else:
            assert place.dense is not None, "`first_weight` makes what the dense model lacks"
            outputs += dense.copies(place.dense, name) if own is None else [own(place, name)]
    return outputs


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
    devices = {parameter.device for parameter in dense.parameters()}
    if len(devices) > 1 or "meta" in {device.type for device in devices}:
        raise InputError(
            f"{name}: its weights lie on {', '.join(sorted(map(str, devices)))}; load it onto one device, or expand "
            "its files (`expand_checkpoint`)."
        )


def _plan_of(config: ExpandedConfig) -> Plan:
    """The plan that a configuration describes."""
    if config.expansions or getattr(config, "earlier_experts_per_layer", None):
        raise InputError(
            "The configuration has expansions already: make one with `from_dense` from the dense model's configuration."
        )
    counts, groups = config.num_experts_per_layer or [], getattr(config, "language_groups", None) or []
    method = "moe-lpr" if len(set(counts)) == 1 and not config.classifier_layers else "layer-moe"
    return Plan(
        "dmoe" if groups else method, counts, classifier_layers=config.classifier_layers or [],
        top_k=config.router_top_k, groups=groups, exclusive=config.exclusive_experts,
    )  # fmt: skip


def _state(
    dense: PreTrainedModel, expanded: Any, expert_init: str, seed: int, gate: Gate | None
) -> dict[str, torch.Tensor]:
    """Every tensor of the expanded model: the dense model's own, copies of them, and new ones."""
    weights, ffns, where = dense.state_dict(), decoder_ffns(dense), places(expanded)
    if unknown := sorted(set(weights) - {place.dense for place in where.values()}):
        raise InputError(
            f"{type(dense).__name__}: has tensors that the backbone does not know ({', '.join(unknown[:3])}); merge an "
            "adapter into the model before expanding it."
        )
    state = {}
    for name, place in where.items():
        ffn = ffns[place.layer]
        like = next(ffn.module.parameters()) if place.dense is None else weights[place.dense]
        make = first_weight(dense, ffn, place, expert_init, seed)
        if gate is not None and (place.layer, place.inner) in gate.rows:
            state[name] = gate.rows[place.layer, place.inner].to(like.dtype).to(like.device)
        elif make is not None:
            state[name] = make().to(like.dtype).to(like.device)
        else:
            state[name] = like.clone() if place.expert else like
    return state


def _untied(dense: PreTrainedModel) -> list[str]:
    """The tensors that are tied by the configuration, but have other values than those they are tied to."""
    get = dense.get_parameter_or_buffer
    ties = dense.get_expanded_tied_weights_keys(all_submodels=True)
    return [key for key, source in ties.items() if not torch.equal(get(key), get(source))]


def _parameters(model: Any) -> int:
    """Number of elements in a checkpoint of the model: tied tensors count once."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return sum(value.numel() for name, value in model.state_dict().items() if name not in tied)


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
