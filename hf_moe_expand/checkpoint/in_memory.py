"""Expands a model in memory: a loaded dense model's FFNs become experts."""

import copy
import re
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import initialization as init

from ..auto_class import auto_class, language_models
from ..errors import InputError
from ..modeling import ExpandedConfig, decoder_ffns, model_class
from ..modeling.prefix_gate import PrefixRule
from ..planning.plan import Plan
from ..records import History
from ..settings import LORA_ALPHA, LORA_RANK
from .expand import check_dense_plan, first_record, planned_config
from .kinds import check_kinds, chosen_kind, recorded_init
from .new_weights import first_weight
from .promises import check_architecture
from .source import check_base_config, differences
from .stored import places

_SNAPSHOT = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})[/\\]?$")
# Fields that say how a model was made or loaded and do not affect its outputs.
_OF_LOADING = {"_name_or_path", "architectures", "auto_map", "dtype", "expansions", "transformers_version"}


def expand_model(
    dense: PreTrainedModel,
    plan: Plan | ExpandedConfig,
    *,
    expert_init: str = "copy",
    conditional_routing: bool = False,
    expert_kind: str = "ffn",
    lora_rank: int = LORA_RANK,
    lora_alpha: float = LORA_ALPHA,
    expert_width: int | None = None,
    seed: int = 0,
) -> Any:
    """Returns the expanded model of a dense one, equal to that of `expand_checkpoint` and `from_pretrained`, without
    files.

    All weights but new experts and routers share the dense model's memory: training one model changes the other. New
    weights are on the device and in the type of the layer's FFN. `save_pretrained`, with the tokenizer saved beside
    it, writes a checkpoint that every command takes.

    Args:
        dense: a `...ForCausalLM` or `...ForConditionalGeneration` of a supported backbone, on one device.
        plan: experts and classifiers of each layer; or a configuration from `LayerMoEConfig.from_dense` or
            `DMoEConfig.from_dense`, which then also sets `conditional_routing`, `expert_kind` and its settings.
        expert_init, conditional_routing, expert_kind, lora_rank, lora_alpha, expert_width, seed: see
            `expand_checkpoint`.

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
        if conditional_routing or expert_kind != "ffn":
            raise InputError(
                "conditional_routing and expert_kind are fields of the configuration: set them in `from_dense`."
            )
        plan, conditional_routing, expert_kind = _plan_of(wanted), wanted.conditional_routing, wanted.expert_kind
        lora_rank, lora_alpha = wanted.lora_rank or lora_rank, wanted.lora_alpha or lora_alpha
        expert_width = wanted.expert_width
    else:
        wanted = None
    name, revision = base_of(dense)
    check_dense_plan(plan, dense.config, name, conditional_routing)
    kind = chosen_kind(dense, plan, expert_init, expert_kind, lora_rank, lora_alpha, expert_width)
    config = planned_config(dense.config, plan, kind, conditional_routing=conditional_routing)
    if wanted is not None:
        _check_same(wanted, config)
    with torch.device("meta"), init.no_init_weights():
        expanded: Any = auto_class(config).from_config(
            config, dtype=dense.dtype, attn_implementation=dense.config._attn_implementation
        )
    state = _state(dense, expanded, expert_init, seed)
    expanded.load_state_dict(state, assign=True)
    _tie(expanded)
    _copy_buffers(dense, expanded)
    counts = [_parameters(model) for model in (dense, expanded)]
    static = model_class(config)
    expanded.config.architectures = [static.__name__]
    expanded.config.auto_map = static.auto_map(config)
    History([first_record(plan, name, revision, recorded_init(kind, expert_init), seed, *counts)]).write(
        expanded.config
    )
    expanded.generation_config = copy.deepcopy(dense.generation_config)
    return expanded.train(dense.training)


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
    return name, getattr(dense.config, "_commit_hash", None)


def _check_dense(dense: Any) -> None:
    name = type(dense).__name__
    if not isinstance(dense, PreTrainedModel):
        raise InputError(f"{name}: not a model of transformers; for a PEFT model, give its `merge_and_unload()`.")
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
        top_k=config.router_top_k, groups=groups,
        prefix_gate=PrefixRule.of(config),
    )  # fmt: skip


def _check_same(wanted: ExpandedConfig, config: ExpandedConfig) -> None:
    """Refuses a configuration that was made for another dense model."""
    for field, own, needed in differences(wanted, config, _OF_LOADING):
        raise InputError(
            f"The configuration is for another model: its {field} is {own!r}, but this dense model needs {needed!r}. "
            "Make it with `from_dense(dense.config, ...)`."
        )


def _state(dense: PreTrainedModel, expanded: Any, expert_init: str, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the expanded model: the dense model's own, copies of them, and new ones."""
    weights, ffns, where = dense.state_dict(), decoder_ffns(dense), places(expanded)
    if unknown := sorted(set(weights) - {place.dense for place in where.values()}):
        raise InputError(
            f"{type(dense).__name__}: has tensors that the backbone does not know ({', '.join(unknown[:3])}); merge an "
            "adapter into the model before expanding it."
        )
    state = {}
    for name, empty in expanded.state_dict().items():
        place = where[name]
        ffn = ffns[place.layer]
        like = next(ffn.module.parameters()) if place.dense is None else weights[place.dense]
        make = first_weight(dense, expanded.config, ffn, place, empty.shape, expert_init, seed)
        if make is not None:
            state[name] = make().to(like.dtype).to(like.device)
        else:
            state[name] = like.clone() if place.expert else like
    return state


def _tie(model: Any) -> None:
    """Ties weights as `tie_weights` does, except for the head's bias, of which `tie_weights` makes a copy."""
    for target, source in (model.all_tied_weights_keys or {}).items():
        module, _, name = target.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(source))


def _copy_buffers(dense: PreTrainedModel, expanded: Any) -> None:
    """Copies buffers that checkpoints do not hold, such as rotary frequencies."""
    buffers, held = dict(dense.named_buffers()), expanded.state_dict().keys()
    for name, _ in list(expanded.named_buffers()):
        if name not in held:
            module, _, buffer = name.rpartition(".")
            expanded.get_submodule(module).register_buffer(
                buffer, buffers[re.sub(r"\.experts\.\d+\.", ".", name)].clone(), persistent=False
            )


def _parameters(model: Any) -> int:
    """Number of elements in a checkpoint of the model: tied tensors count once."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return sum(value.numel() for name, value in model.state_dict().items() if name not in tied)
