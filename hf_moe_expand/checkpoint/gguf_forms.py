"""Which architecture of llama.cpp computes the same as a model, and the names of its tensors there.

By what llama.cpp computes, not by name: `llama` with experts chooses K of N by softmax and renormalises the chosen
weights, as we do, and takes biases on queries, keys and values; so it runs Llama, Mistral and Qwen2. `qwen2moe` does
not renormalise. `ernie4_5-moe` adds a bias to the scores for the choice, and so does `glm4moe`, whose score may be
softmax. Both take layers with different numbers of experts (see `routed`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from .routed import check_counts, check_routing, needs_bias


@dataclass(frozen=True)
class GgufForm:
    """How an architecture of llama.cpp stores a model.

    Attributes:
        architecture: its name.
        turned: whether it rotates neighbouring elements of queries and keys, not the halves of a head.
        bias: whether it adds a bias to the experts' scores for the choice alone.
        shared: whether it adds a shared expert, which must then be zero.
        leading_dense: whether the first layers may be dense; else dense layers become copies of their FFN.
        rope: types of rotary positions that it knows beside the default.
        biases: tensors besides the weights that it takes.
    """

    architecture: str
    turned: bool = False
    bias: bool = False
    shared: bool = False
    leading_dense: bool = False
    rope: tuple[str, ...] = ("linear", "yarn")
    biases: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


_QKV = ("q_proj.bias", "k_proj.bias", "v_proj.bias")
_QKVO = (*_QKV, "o_proj.bias")
_MLP = ("gate_proj.bias", "up_proj.bias", "down_proj.bias")
_LLAMA3 = ("linear", "yarn", "llama3")
_LLAMA = GgufForm("llama", turned=True, rope=_LLAMA3, biases=_QKVO)
_ERNIE = GgufForm("ernie4_5-moe", turned=True, bias=True, leading_dense=True, biases=_QKV)
_DENSE_LLAMA = GgufForm("llama", turned=True, rope=_LLAMA3, biases=(*_QKVO, *_MLP))


@dataclass(frozen=True)
class Backbone:
    """The forms of a backbone: of its dense model, of its mixture, and of its mixture with a selection bias, with the
    reason where there is none."""

    dense: GgufForm
    mixture: GgufForm
    biased: GgufForm | None
    why: str = ""


BACKBONES = {
    "granite": Backbone(
        GgufForm("granite", turned=True, rope=_LLAMA3, biases=(*_QKVO, *_MLP)),
        GgufForm("granitemoe", turned=True, rope=_LLAMA3, biases=_QKVO),
        None,
        "no architecture of llama.cpp with Granite's multipliers has one",
    ),
    "llama": Backbone(_DENSE_LLAMA, _LLAMA, _ERNIE),
    "mistral": Backbone(_DENSE_LLAMA, _LLAMA, _ERNIE),
    "qwen2": Backbone(GgufForm("qwen2", biases=_QKV), _LLAMA, _ERNIE),
    "qwen3": Backbone(
        GgufForm("qwen3"), GgufForm("qwen3moe"), GgufForm("glm4moe", bias=True, shared=True, leading_dense=True)
    ),
}


def gguf_form(config: Any, counts: list[int] | None, folder: Any, merge_lora: bool = False) -> GgufForm:
    """The form in which a model is written.

    Args:
        config: configuration of the expanded model, or of the dense one.
        counts: number of experts of each layer; None for a dense model.

    Raises:
        InputError: no architecture of llama.cpp computes the same; the message says why.
    """
    expanded = counts is not None
    name = config.backbone_model_type if expanded else config.model_type
    if name not in BACKBONES:
        raise InputError(
            f"{folder}: models of {name} are not written as GGUF; those of {', '.join(BACKBONES)} are. llama.cpp's own "
            "converter may know a dense one (`export --expert`)."
        )
    backbone = BACKBONES[name]
    form = backbone.dense
    if counts is not None:
        check_routing(config, folder, "llama.cpp", merge_lora)
        top_k = min(config.router_top_k, max(counts))
        check_counts(counts, top_k, folder, backbone.biased is not None, backbone.why)
        form = backbone.biased if needs_bias(counts, top_k) and backbone.biased else backbone.mixture
    _check_fields(config, form, folder)
    return form


def _check_fields(config: Any, form: GgufForm, folder: Any) -> None:
    where = f"llama.cpp's {form.architecture}"
    if config.hidden_act != "silu":
        raise InputError(f"{folder}: its FFNs have the activation {config.hidden_act}, but those of {where} have silu.")
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    sliding = window is not None if types is None else "sliding_attention" in types
    if sliding and (window or 0) < config.max_position_embeddings:
        raise InputError(
            f"{folder}: has attention in a sliding window of {window} tokens, which {where} does not compute."
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ("default", *form.rope):
        raise InputError(
            f"{folder}: has rotary positions of the type {rope!r}; those of {where} are default, "
            f"{', '.join(form.rope)}."
        )
    if (part := (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)) != 1.0:
        raise InputError(f"{folder}: rotates {part} of each head, but {where} rotates all of it.")
