"""How architectures of transformers store an expanded model, and which of them computes the same as a given model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import InputError
from .routed import check_counts, check_routing, needs_bias
from .stored import StoredModel


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
        turned: whether it rotates neighbouring elements of queries and keys, not the halves of a head.
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
    turned: bool = False
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
    turned=True,
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


def native_form(source: StoredModel, merge_lora: bool) -> NativeForm:
    """The form in which a model is written.

    Raises:
        InputError: no architecture of transformers computes the same; the message says why.
    """
    config, folder = source.config, source.folder
    backbone = config.backbone_model_type
    if backbone not in NATIVE_FORMS:
        why = _NEAR_MISSES.get(backbone, "none has this backbone's attention and FFN")
        raise InputError(
            f"{folder}: no mixture-of-experts architecture of transformers is equivalent to an expanded {backbone} "
            f"model: {why}. Native forms exist for {', '.join(NATIVE_FORMS)}."
        )
    check_routing(config, folder, "transformers", merge_lora)
    counts = config.num_experts_per_layer
    top_k = min(config.router_top_k, max(counts))
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
    check_counts(counts, top_k, folder, bool(biased), no_bias)
    if needs_bias(counts, top_k):
        return biased[0]
    if 1 in counts:
        return next((form for form in forms if form.dense_layers), forms[0])
    return forms[0]
