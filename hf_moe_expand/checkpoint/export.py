"""Exports an expanded checkpoint as a native architecture of transformers, or one expert as a dense model; streamed."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from ..core.errors import InputError
from ..modeling import layer_names
from ..modeling.routing_control import classes_of
from ..modeling.vocabulary import FOLDER
from .records import StageRecord, add_stage
from .routed import (
    active_experts,
    check_routing,
    interleaved,
    lora_updates,
    merged,
    needs_bias,
    other_tensors,
    stacked,
    stored_ffns,
)
from .source import TOKENIZER_FILES, load_expanded_config, resolve_checkpoint
from .stored import StoredModel, network_of
from .vocabulary import longer
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, write_checkpoint, zeros

# The files of a language's own tokenizer (`save_tokenizer`), without its empty configuration.
_OWN_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja")
_NOT_INHERITED = ("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path")


@dataclass(frozen=True)
class NativeForm:
    """How a native architecture of transformers stores the tensors of an expanded layer.

    Attributes:
        model_type: model type of the architecture.
        dense_layers: whether any of its layers may be dense; else dense layers become copies of their FFN.
        router: name of the router's weight in a layer.
        expert: prefix of an expert's tensors in a layer.
        parts: its names of an expert's tensors, where they differ from ours.
        stacks: stacked tensors `[experts, rows, columns]` in place of one tensor for each expert, with the parts that
            each concatenates along the rows.
        bias: name in a layer of a bias that is added to the scores for the choice alone.
        interleaved: whether it rotates neighbouring elements of queries and keys, not the halves of a head.
        zero: further tensors of a layer, which must be zero to have no effect, with their shapes in terms of fields.
        zero_once: the same, outside the layers.
        fields: fields of the configuration with which it computes the same.
    """

    model_type: str
    dense_layers: bool = False
    router: str = "mlp.gate.weight"
    expert: str = "mlp.experts.{}."
    parts: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bias: str | None = None
    interleaved: bool = False
    zero: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    zero_once: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
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
_QWEN2_MOE_WITHOUT_BIAS = replace(_QWEN2_MOE, fields={**_QWEN2_MOE.fields, "qkv_bias": False})
_GRANITE_MOE = NativeForm(
    "granitemoe",
    router="block_sparse_moe.router.layer.weight",
    stacks={
        "block_sparse_moe.input_linear.weight": ("gate_proj.weight", "up_proj.weight"),
        "block_sparse_moe.output_linear.weight": ("down_proj.weight",),
    },
)
# It chooses by score plus bias and weighs by the score.
_ERNIE = NativeForm(
    "ernie4_5_moe",
    bias="mlp.moe_statics.e_score_correction_bias",
    interleaved=True,
    fields={"moe_num_shared_experts": 0, "moe_layer_start_index": 0, "use_bias": False},
)
# With biases on queries, keys and values come two that Qwen2 does not have.
_ERNIE_WITH_BIASES = replace(
    _ERNIE,
    zero={"self_attn.o_proj.bias": ("hidden_size",)},
    zero_once={"lm_head.bias": ("vocab_size",)},
    fields={**_ERNIE.fields, "use_bias": True},
)
# The first form of a backbone that fits the model is taken.
NATIVE_FORMS: dict[str, tuple[NativeForm, ...]] = {
    "granite": (_GRANITE_MOE,),
    "llama": (_MIXTRAL, _QWEN2_MOE_WITHOUT_BIAS, _ERNIE),
    "mistral": (_MIXTRAL, _QWEN2_MOE_WITHOUT_BIAS, _ERNIE),
    "olmo2": (NativeForm("flex_olmo"),),
    "qwen2": (_QWEN2_MOE, _ERNIE_WITH_BIASES),
    "qwen3": (NativeForm("qwen3_moe", dense_layers=True),),
}
_NEAR_MISSES = {
    "cohere": "Cohere2-MoE has no rotary positions where attention is full",
    "gemma": "Gemma 4's mixture has other attention and norms",
    "gemma2": "Gemma 4's mixture has other attention and norms",
    "gemma3_text": "Gemma 4's mixture has other attention and norms",
    "phi3": "PhiMoE has other norms and another router",
}
# Why a backbone has no form with a selection bias.
_WITHOUT_BIAS = {
    "granite": "no architecture of transformers with Granite's multipliers has one",
    "olmo2": "no architecture of transformers with OLMo 2's norms has one",
    "qwen3": "of the architectures of transformers with Qwen3's attention, those that have one score experts by "
    "sigmoid in place of softmax",
}


def export_native(
    model: str | os.PathLike,
    out: str | os.PathLike,
    *,
    expert: int | None = None,
    language: str | None = None,
    merge_lora: bool = False,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> str:
    """Writes an expanded checkpoint as a native architecture of transformers, which serving back ends support.

    In float32 its logits equal the expanded model's up to rounding. In bfloat16 these architectures compute their
    routers in bfloat16, while ours stay in float32: tokens with nearly tied experts may be routed to the other one.

    Args:
        model: expanded checkpoint without classifiers. Layers with fewer experts than others are filled up where that
            changes no output (see `routed`).
        out: folder to write.
        expert: write the dense model that has this expert of every expanded layer as its FFN, byte for byte. Expert 0
            of a model whose base was frozen gives the base. A LoRA expert's updates are added to expert 0's weights in
            float32 and rounded once.
        language: write the dense model of a language: the base for one of its own, and for a new one the base with the
            FFNs that its tokens take alone (exclusive experts), and with its own tokens and tokenizer, if it has some.
        merge_lora: make FFN experts of LoRA experts.

    Returns:
        The architecture's name.
    """
    folder = resolve_checkpoint(model)
    check_output(out, overwrite, folder)
    source = StoredModel(model, load_expanded_config(folder))
    chosen = dense_experts(source, expert, language)
    if chosen is None:
        form = native_form(source, merge_lora)
        config = _native_config(source, form)
        tensors = list(_native_tensors(source, form, config))
        _check_fits(source, form, config, tensors)
    else:
        config, tensors = dense_config(source.config, language), expert_tensors(source, chosen, language)
    own = {name: value for name, value in (("expert", expert), ("language", language)) if value is not None}
    settings = {"model": source.name, **own, "expansions": source.config.expansions}
    add_stage(config, StageRecord(stage="export", settings=settings))
    tokenizer: list[tuple[Path, Sequence[str]]] = [(folder, TOKENIZER_FILES)]
    if has_own_tokens(source.config, language):
        tokenizer = [(folder, ("generation_config.json",)), (folder / FOLDER / str(language), _OWN_TOKENIZER)]
    write_checkpoint(out, config, tensors, tokenizer, "export", max_shard_size, overwrite)
    return config.architectures[0]


def has_own_tokens(config: Any, language: str | None) -> bool:
    """Whether the dense model of a language has the languages' own tokens."""
    return language in (config.vocabularies or {})


def dense_experts(source: StoredModel, expert: int | None, language: str | None) -> list[int] | None:
    """The expert of each layer in the dense model of one expert or of one language; None if neither is asked for."""
    config = source.config
    if language is not None:
        try:
            (number,) = classes_of(config, language)
        except ValueError as error:
            raise InputError(f"{source.folder}: {error}") from None
        experts = {layer: ffn.expert_of(number or 0) for layer, ffn in source.network.expanded_ffns().items()}
        if mixed := [layer for layer, one in experts.items() if one is None]:
            raise InputError(
                f"{source.folder}: in layer {mixed[0]} a token of {language} has several experts, which no dense model "
                "has: only exclusive experts (`exclusive: true` in a plan) become one."
            )
        return [experts.get(layer) or 0 for layer in range(len(config.num_experts_per_layer))]
    if expert is None:
        return None
    for layer, count in enumerate(config.num_experts_per_layer):
        if not 0 <= expert < count and count > 1:
            name = layer_names(config)[layer]
            raise InputError(f"{source.folder}: layer {name} has no expert {expert}; give one of 0..{count - 1}.")
    return [expert] * len(config.num_experts_per_layer)


def expert_tensors(source: StoredModel, experts: Sequence[int], language: str | None = None) -> list[OutputTensor]:
    """The tensors of the dense model that has one expert of every expanded layer as its FFN, by layer; with the rows of
    the languages' own tokens, if `language` has some."""
    if any(experts) and source.config.has_kind("added"):
        raise InputError(
            f"{source.folder}: its experts are added to expert 0's output, and the backbone has no FFN for both: only "
            "expert 0, the base, is written (--expert 0)."
        )
    # The library saves some tensors under other names than the model's (GPT-NeoX's `embed_out`).
    rules = get_model_conversion_mapping(network_of(dense_config(source.config)), add_legacy=False)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming) and not isinstance(rule, PrefixChange)]
    reverse: Any = [rule.reverse_transform() for rule in reversed(renamings)]
    tensors, updates = [], lora_updates(source, experts)
    for key, place in source.places.items():
        expert = experts[place.layer] if place.layer >= 0 else 0
        has_ffn = source.config.kind_of(place.layer, expert).has_ffn
        if key in source and place.dense is not None and place.expert in (None, expert if has_ffn else 0):
            name, _ = rename_source_key(place.dense, reverse, [], reverse=True)
            if key in updates:
                tensors.append(merged(source, key, updates, name))
            elif place.layer < 0 and has_own_tokens(source.config, language):
                tensors.append(longer(source, key, name))
            else:
                tensors += source.copies(key, name)
    return tensors


def dense_config(config: Any, language: str | None = None) -> Any:
    """The backbone's own configuration inside that of an expanded model; of the dense model of a language."""
    backbone = config.backbone_config_class
    ours = {f.name for f in dataclasses.fields(config)} - {f.name for f in dataclasses.fields(backbone)}
    values = {name: value for name, value in config.to_dict().items() if name not in {*ours, *_NOT_INHERITED}}
    causal, encoder_decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    architecture = (encoder_decoder if config.is_encoder_decoder else causal)[backbone.model_type]
    if has_own_tokens(config, language):
        values["vocab_size"] = config.num_tokens
    return backbone(**values, architectures=[architecture])


def native_form(source: StoredModel, merge_lora: bool) -> NativeForm:
    """The form in which a model is written: an architecture that computes the same."""
    config, folder = source.config, source.folder
    backbone = config.backbone_model_type
    if backbone not in NATIVE_FORMS:
        why = _NEAR_MISSES.get(backbone, "none has this backbone's attention and FFN")
        raise InputError(
            f"{folder}: no mixture-of-experts architecture of transformers is equivalent to an expanded {backbone} "
            f"model: {why}. Native forms exist for {', '.join(NATIVE_FORMS)}."
        )
    check_routing(config, folder, "transformers", merge_lora)
    forms = NATIVE_FORMS[backbone]
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if backbone == "qwen3" and sliding:
        raise InputError(
            f"{folder}: has sliding-window attention, which {forms[0].model_type} does not have in this form."
        )
    if backbone == "mistral" and config.sliding_window is not None:
        forms = (_MIXTRAL,)
        no_bias = "the one with Mistral's sliding windows, Mixtral, has none"
    else:
        no_bias = _WITHOUT_BIAS.get(backbone, "")
    biased = [form for form in forms if form.bias]
    if needs_bias(config, folder, bool(biased), no_bias):
        return biased[0]
    if 1 in config.num_experts_per_layer:
        return next((form for form in forms if form.dense_layers), forms[0])
    return forms[0]


def _native_config(source: StoredModel, form: NativeForm) -> Any:
    dense = dense_config(source.config)
    counts = source.config.num_experts_per_layer
    experts, active = max(counts), active_experts(source.config)
    wanted = {
        "num_experts": experts,
        "num_local_experts": experts,
        "num_experts_per_tok": active,
        "moe_num_experts": experts,
        "moe_k": active,
        "moe_intermediate_size": dense.intermediate_size,
        "norm_topk_prob": True,
        "mlp_only_layers": [layer for layer, count in enumerate(counts) if count == 1 and form.dense_layers],
        **form.fields,
    }
    native_class = CONFIG_MAPPING[form.model_type]
    # `head_dim` is read by all of them, whether they declare it or not.
    known = {f.name for f in dataclasses.fields(native_class)} | {"head_dim"}
    wanted["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[form.model_type]]
    values = {name: value for name, value in dense.to_dict().items() if name not in _NOT_INHERITED}
    return native_class(**{name: value for name, value in {**values, **wanted}.items() if name in known})


def _native_tensors(source: StoredModel, form: NativeForm, config: Any) -> Iterator[OutputTensor]:
    ffns = stored_ffns(source)
    others = other_tensors(source, ffns)
    yield from (interleaved(tensor, config) if form.interleaved else tensor for tensor in others)
    yield from _zeros(form.zero_once, "", config, source[source.tensors[0]].dtype)
    for ffn in ffns:
        layer = ffn.name.rpartition(".")[0]
        if ffn.router is None and form.dense_layers:
            yield from ffn.dense()
            continue
        yield ffn.padded_router(f"{layer}.{form.router}", config.hidden_size)
        if form.bias:
            yield replace(ffn.selection_bias(f"{layer}.{form.bias}"), shape=(1, len(ffn.at)))
        yield from _zeros(form.zero, f"{layer}.", config, ffn.dtype)
        inside = {part for parts in form.stacks.values() for part in parts}
        for place, expert in enumerate(ffn.at):
            for part in (part for part in ffn.experts[0] if part not in inside):
                name = f"{layer}.{form.expert.format(place)}{form.parts.get(part, part)}"
                yield replace(ffn.part(expert, part), name=name)
        for name, parts in form.stacks.items():
            tensors = [ffn.part(expert, part) for expert in ffn.at for part in parts]
            rows = sum(tensor.shape[0] for tensor in tensors) // len(ffn.at)
            yield stacked(f"{layer}.{name}", tensors, (len(ffn.at), rows, *tensors[0].shape[1:]))


def _zeros(tensors: Mapping[str, tuple[str, ...]], prefix: str, config: Any, dtype: str) -> Iterator[OutputTensor]:
    for name, fields in tensors.items():
        shape = tuple(int(size) if size.isdecimal() else getattr(config, size) for size in fields)
        yield zeros(f"{prefix}{name}", dtype, shape)


def _check_fits(source: StoredModel, form: NativeForm, config: Any, tensors: list[OutputTensor]) -> None:
    """Refuses tensors for which the architecture has no place, such as biases."""
    network = network_of(config)
    tied = set(network.all_tied_weights_keys)
    state = {name: value for name, value in network.state_dict().items() if name not in tied}
    expected = {name: tuple(value.shape) for name, value in revert_weight_conversion(network, state).items()}
    actual = {tensor.name: tensor.shape for tensor in tensors if tensor.name not in tied}
    if differ := sorted(name for name in {*expected, *actual} if expected.get(name) != actual.get(name)):
        raise InputError(
            f"{source.folder}: cannot be written as {form.model_type}: tensor {differ[0]!r} has shape "
            f"{list(actual.get(differ[0], ())) or 'none'} here, but {list(expected.get(differ[0], ())) or 'none'} "
            "there."
        )
