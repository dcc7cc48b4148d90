"""Exports an expanded checkpoint as a native architecture of transformers, or one expert as a dense model; streamed."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from ..errors import InputError
from ..modeling import layer_names
from ..records import StageRecord, add_stage
from .folder import write_checkpoint
from .source import TOKENIZER_FILES, load_expanded_config, resolve_checkpoint
from .stored import StoredModel, network_of, places, rounded, widened
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, zeros

_NOT_INHERITED = ("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path")


@dataclass(frozen=True)
class NativeForm:
    """How a native architecture of transformers stores the tensors of an expanded layer.

    Attributes:
        model_type: model type of the architecture.
        dense_layers: whether some of its layers may be dense.
        router: name of the router's weight in a layer.
        expert: prefix of an expert's tensors in a layer.
        parts: its names of an expert's tensors, where they differ from ours.
        stacks: stacked tensors `[experts, rows, columns]` in place of one tensor for each expert, with the parts that
            each concatenates along the rows.
        zero: further tensors, which must be zero to have no effect, with their shapes in terms of fields.
        fields: fields of the configuration with which it computes the same.
    """

    model_type: str
    dense_layers: bool = False
    router: str = "mlp.gate.weight"
    expert: str = "mlp.experts.{}."
    parts: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    zero: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


# Qwen2-MoE adds a shared expert to the routed ones. A small one of zeros has no effect; kernels like a width of 64.
_QWEN2_MOE = NativeForm(
    "qwen2_moe",
    dense_layers=True,
    zero={
        "mlp.shared_expert.gate_proj.weight": ("shared_expert_intermediate_size", "hidden_size"),
        "mlp.shared_expert.up_proj.weight": ("shared_expert_intermediate_size", "hidden_size"),
        "mlp.shared_expert.down_proj.weight": ("hidden_size", "shared_expert_intermediate_size"),
        "mlp.shared_expert_gate.weight": ("1", "hidden_size"),
    },
    fields={"shared_expert_intermediate_size": 64},
)
_MIXTRAL = NativeForm(
    "mixtral",
    router="block_sparse_moe.gate.weight",
    expert="block_sparse_moe.experts.{}.",
    parts={"gate_proj.weight": "w1.weight", "up_proj.weight": "w3.weight", "down_proj.weight": "w2.weight"},
)
_QWEN2_MOE_WITHOUT_BIAS = dataclasses.replace(_QWEN2_MOE, fields={**_QWEN2_MOE.fields, "qkv_bias": False})
_GRANITE_MOE = NativeForm(
    "granitemoe",
    router="block_sparse_moe.router.layer.weight",
    stacks={
        "block_sparse_moe.input_linear.weight": ("gate_proj.weight", "up_proj.weight"),
        "block_sparse_moe.output_linear.weight": ("down_proj.weight",),
    },
)
# The first form of a backbone that allows the model's dense layers is taken.
NATIVE_FORMS: dict[str, tuple[NativeForm, ...]] = {
    "granite": (_GRANITE_MOE,),
    "llama": (_MIXTRAL, _QWEN2_MOE_WITHOUT_BIAS),
    "mistral": (_MIXTRAL, _QWEN2_MOE_WITHOUT_BIAS),
    "olmo2": (NativeForm("flex_olmo"),),
    "qwen2": (_QWEN2_MOE,),
    "qwen3": (NativeForm("qwen3_moe", dense_layers=True),),
}
_NEAR_MISSES = {
    "cohere": "Cohere2-MoE has no rotary positions where attention is full",
    "gemma": "Gemma 4's mixture has other attention and norms",
    "gemma2": "Gemma 4's mixture has other attention and norms",
    "gemma3_text": "Gemma 4's mixture has other attention and norms",
    "phi3": "PhiMoE has other norms and another router",
}


def export_native(
    model: str | os.PathLike,
    out: str | os.PathLike,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> str:
    """Writes an expanded checkpoint as a native architecture of transformers, which serving back ends support.

    In float32 its logits equal the expanded model's up to rounding. In bfloat16 these architectures compute their
    routers in bfloat16, while ours stay in float32: tokens with nearly tied experts may be routed to the other one.

    Args:
        model: expanded checkpoint without classifiers, whose expanded layers all have the same number of experts.
        out: folder to write.

    Returns:
        The architecture's name.

    Raises:
        InputError: no architecture of transformers computes the same; the message says why.
    """
    folder = resolve_checkpoint(model)
    check_output(out, overwrite, folder)
    source = StoredModel(model, load_expanded_config(folder))
    form = _form(source)
    config = _native_config(source, form)
    tensors = list(_native_tensors(source, form, config))
    _check_fits(source, form, config, tensors)
    settings = {"model": source.name, "expansions": source.config.expansions}
    add_stage(config, StageRecord("export", settings=settings))
    write_checkpoint(
        out, config, tensors, [(folder, TOKENIZER_FILES)], "export", max_shard_size=max_shard_size, overwrite=overwrite
    )
    return config.architectures[0]


def export_expert(
    model: str | os.PathLike,
    out: str | os.PathLike,
    expert: int,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> str:
    """Writes the dense model that has one expert of every expanded layer as its FFN, byte for byte. For expert 0 of a
    model whose base was frozen, this is the base. A LoRA expert's updates are added to expert 0's weights in float32
    and rounded once.

    Args:
        model: expanded checkpoint.
        out: folder to write.
        expert: number of the expert.

    Returns:
        The architecture's name.

    Raises:
        InputError: an expanded layer lacks this expert.
    """
    folder = resolve_checkpoint(model)
    check_output(out, overwrite, folder)
    source = StoredModel(model, load_expanded_config(folder))
    for layer, count in enumerate(source.config.num_experts_per_layer):
        if not 0 <= expert < count and count > 1:
            name = layer_names(source.config)[layer]
            raise InputError(f"{folder}: layer {name} has no expert {expert}; give one of 0..{count - 1}.")
    config = dense_config(source.config)
    network = network_of(config)
    tensors = []
    for key, place in places(source.network).items():
        update = source.config.update_of(place.layer, expert)
        if key in source.names and place.dense is not None and place.expert in (None, 0 if update else expert):
            name = _saved_name(network, place.dense)
            if update and place.expert == 0:
                tensors.append(_updated(source, key, name, place.inner, expert, *update))
            else:
                tensors.append(source.copied(key, name))
    settings = {"model": source.name, "expert": expert, "expansions": source.config.expansions}
    add_stage(config, StageRecord("export", settings=settings))
    write_checkpoint(
        out, config, tensors, [(folder, TOKENIZER_FILES)], "export", max_shard_size=max_shard_size, overwrite=overwrite
    )
    return config.architectures[0]


def _updated(
    source: StoredModel, key: str, name: str, inner: str, expert: int, rank: int, alpha: float
) -> OutputTensor:
    """A tensor of expert 0 with a LoRA expert's update: `W + alpha / r * B A`, if it is a matrix."""
    prefix, layer = key.removesuffix(inner), inner.removeprefix("experts.0.").removesuffix(".weight")
    factors = [f"{prefix}experts.{expert}.{layer}.lora_{factor}.weight" for factor in "BA"]
    if factors[0] not in source.names:  # a bias
        return source.copied(key, name)
    info = source.reader.tensors[source.home(key)]
    scaling = alpha / rank
    transposed = isinstance(source.network.get_submodule(key.removesuffix(".weight")), Conv1D)

    def data() -> Iterable[bytes]:
        b, a = (widened(source.reader.tensor(source.home(factor))) for factor in factors)
        update = b @ a
        weight = widened(source.reader.tensor(source.home(key)))
        yield rounded(weight + scaling * (update.T if transposed else update), info.dtype, name)

    return OutputTensor(name, info.dtype, info.shape, data)


def dense_config(config: Any) -> Any:
    """The backbone's own configuration inside that of an expanded model."""
    backbone = config.backbone_config_class
    ours = {f.name for f in dataclasses.fields(config)} - {f.name for f in dataclasses.fields(backbone)}
    values = {name: value for name, value in config.to_dict().items() if name not in {*ours, *_NOT_INHERITED}}
    causal, seq2seq = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    architecture = (seq2seq if config.is_encoder_decoder else causal)[backbone.model_type]
    return backbone(**values, architectures=[architecture])


def _saved_name(network: Any, name: str) -> str:
    """The name under which the library saves a tensor (GPT-NeoX's `embed_out`)."""
    rules = get_model_conversion_mapping(network, add_legacy=False)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming) and not isinstance(rule, PrefixChange)]
    reverse: Any = [rule.reverse_transform() for rule in reversed(renamings)]
    return rename_source_key(name, reverse, [], reverse=True)[0]


def _form(source: StoredModel) -> NativeForm:
    config, folder = source.config, source.folder
    backbone = config.backbone_model_type
    if backbone not in NATIVE_FORMS:
        why = _NEAR_MISSES.get(backbone, "none has this backbone's attention and FFN")
        raise InputError(
            f"{folder}: no mixture-of-experts architecture of transformers is equivalent to an expanded {backbone} "
            f"model: {why}. Native forms exist for {', '.join(NATIVE_FORMS)}."
        )
    if config.conditional_routing:
        raise InputError(
            f"{folder}: has conditional routing, a gate between expert 0 and the routed experts; no architecture of "
            "transformers with this backbone's attention has one."
        )
    if config.has_updates:
        raise InputError(
            f"{folder}: its experts are expert 0 with low-rank updates; no architecture of transformers has such "
            "experts. `export --expert` writes a dense model with one of them."
        )
    if config.classifier_layers:
        raise InputError(
            f"{folder}: layers {', '.join(map(str, config.classifier_layers))} have a classifier; no architecture of "
            "transformers has one."
        )
    counts = sorted({count for count in config.num_experts_per_layer if count > 1})
    if len(counts) > 1:
        raise InputError(
            f"{folder}: its layers have {', '.join(map(str, counts))} experts; the architectures of transformers have "
            "one number for all layers. Expand with a uniform plan (`plan moe-lpr`) to export."
        )
    dense = [layer for layer, count in enumerate(config.num_experts_per_layer) if count == 1]
    forms = [form for form in NATIVE_FORMS[backbone] if form.dense_layers or not dense]
    if not forms:
        raise InputError(
            f"{folder}: layers {', '.join(map(str, dense))} are dense, but every layer of "
            f"{NATIVE_FORMS[backbone][0].model_type} is a mixture of experts. Expand all layers to export."
        )
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if (backbone == "qwen3" and sliding) or (dense and backbone == "mistral" and config.sliding_window is not None):
        raise InputError(
            f"{folder}: has sliding-window attention, which {forms[0].model_type} does not have in this form."
        )
    return forms[0]


def _native_config(source: StoredModel, form: NativeForm) -> Any:
    dense = dense_config(source.config)
    counts = source.config.num_experts_per_layer
    experts = max(counts)
    wanted = {
        "num_experts": experts,
        "num_local_experts": experts,
        "num_experts_per_tok": min(source.config.router_top_k, experts),
        "moe_intermediate_size": dense.intermediate_size,
        "norm_topk_prob": True,
        "mlp_only_layers": [layer for layer, count in enumerate(counts) if count == 1],
        **form.fields,
    }
    native_class = CONFIG_MAPPING[form.model_type]
    # `head_dim` is read by all of them, whether they declare it or not.
    known = {f.name for f in dataclasses.fields(native_class)} | {"head_dim"}
    wanted["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[form.model_type]]
    values = {name: value for name, value in dense.to_dict().items() if name not in _NOT_INHERITED}
    return native_class(**{name: value for name, value in {**values, **wanted}.items() if name in known})


def _native_tensors(source: StoredModel, form: NativeForm, config: Any) -> Iterator[OutputTensor]:
    stacked: dict[tuple[str, str], dict[tuple[int, int], OutputTensor]] = {}  # (layer, stack) -> (expert, part) -> it
    for key, place in places(source.network).items():
        if key not in source.names:  # tied
            continue
        prefix = key.removesuffix(place.inner).rsplit(".", 2)[0]  # the layer's name
        if place.dense is None:
            yield source.copied(key, f"{prefix}.{form.router}")
            yield from _zeros(source.copied(key), prefix, form, config)
        elif place.expert is None:
            yield source.copied(key, key)
        else:
            part = place.inner.split(".", 2)[2]
            stack = next((name for name, parts in form.stacks.items() if part in parts), None)
            if stack is None:
                name = f"{prefix}.{form.expert.format(place.expert)}{form.parts.get(part, part)}"
                yield source.copied(key, name)
            else:
                number = form.stacks[stack].index(part)
                stacked.setdefault((prefix, stack), {})[place.expert, number] = source.copied(key)
    for (prefix, stack), parts in stacked.items():
        yield _stack(f"{prefix}.{stack}", [parts[place] for place in sorted(parts)], max(parts)[0] + 1)


def _zeros(router: OutputTensor, prefix: str, form: NativeForm, config: Any) -> Iterator[OutputTensor]:
    for name, fields in form.zero.items():
        shape = tuple(int(size) if size.isdecimal() else getattr(config, size) for size in fields)
        yield zeros(f"{prefix}.{name}", router.dtype, shape)


def _stack(name: str, tensors: list[OutputTensor], experts: int) -> OutputTensor:
    first = tensors[0]
    if len(types := sorted({tensor.dtype for tensor in tensors})) > 1:
        raise InputError(f"Tensor {name!r} stacks tensors of several types ({', '.join(types)}): convert them to one.")
    rows = sum(tensor.shape[0] for tensor in tensors) // experts

    def data() -> Iterable[bytes]:
        for tensor in tensors:
            yield from tensor.data()

    return OutputTensor(name, first.dtype, (experts, rows, *first.shape[1:]), data)


def _check_fits(source: StoredModel, form: NativeForm, config: Any, tensors: list[OutputTensor]) -> None:
    """Refuses tensors for which the architecture has no place, such as biases."""
    network = network_of(config)
    tied = set(network.all_tied_weights_keys)
    state = {name: value for name, value in network.state_dict().items() if name not in tied}
    expected = {name: tuple(value.shape) for name, value in revert_weight_conversion(network, state).items()}
    found = {tensor.name: tensor.shape for tensor in tensors if tensor.name not in tied}
    if differ := sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name)):
        raise InputError(
            f"{source.folder}: cannot be written as {form.model_type}: tensor {differ[0]!r} has shape "
            f"{list(found.get(differ[0], ())) or 'none'} here, but {list(expected.get(differ[0], ())) or 'none'} there."
        )
