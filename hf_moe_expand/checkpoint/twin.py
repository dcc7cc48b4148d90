"""A tiny twin of a dense model: its configuration class and its switches, with small sizes."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..auto_class import auto_class
from ..modeling.expanded_config import DECODER_LAYERS

LAYERS = 4
VOCABULARY = 257
_HIDDEN, _HEADS, _HEAD = 32, 4, 8
# Sizes by their canonical names; a configuration class translates its own names (`n_embd`).
_SIZES: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "num_attention_heads": _HEADS,
    "head_dim": _HEAD,
    "max_position_embeddings": 64,
    "rotary_dim": _HEAD // 2,
    # latent attention
    "kv_lora_rank": 16,
    "qk_nope_head_dim": _HEAD,
    "qk_rope_head_dim": _HEAD,
    "v_head_dim": _HEAD,
    # linear attention and state spaces
    "linear_key_head_dim": _HEAD,
    "linear_value_head_dim": _HEAD,
    "linear_head_dim": _HEAD,
    "linear_num_heads": _HEADS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": _HEADS,
    "mamba_d_ssm": _HIDDEN,
    "mamba_n_heads": _HEADS,
    "mamba_d_head": _HEAD,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 1,
    "mamba_chunk_size": 8,
    "lru_width": _HIDDEN,
    # mixtures of experts in some of the layers
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    # further widths
    "word_embed_proj_dim": _HIDDEN,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
}
# Of encoder-decoders; layers that are left out at random (layerdrop) would get no gradient.
_OF_DECODER: dict[str, float] = {
    "encoder_attention_heads": _HEADS, "decoder_attention_heads": _HEADS, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "decoder_vocab_size": VOCABULARY,
}  # fmt: skip
# Sizes of parts that a model may lack: none, or 0.
_OPTIONAL_SIZES: dict[str, int] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "q_lora_rank": 16,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 16,
    "attention_window_size": 16,
    "window_size": 16,
}
_MOST_WEIGHTS = 1 << 25
_WIDTHS = ("intermediate_size", "ffn_hidden_size", "d_ff", "dim_ff")
_LEFT_OUT = ("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path", "quantization_config")


def tiny_twin(config: PreTrainedConfig) -> Any:
    """A dense model of the configuration's class with at most a few million weights, drawn with a fixed seed.

    Raises:
        ValueError: no small model of this class can be built; the message has the library's reason.
    """
    reason: Exception | None = None
    for values in _candidates(config):
        try:
            small = type(config)(**values)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                with torch.device("meta"):
                    weights = auto_class(small).from_config(small, trust_remote_code=False).num_parameters()
                if weights > _MOST_WEIGHTS:
                    raise ValueError(f"with small sizes it still has {weights:,} weights")
                model = auto_class(small).from_config(small, dtype=torch.float32, trust_remote_code=False).eval()
            with torch.no_grad():
                ids = torch.arange(8)[None]
                model(ids, **({"decoder_input_ids": ids} if small.is_encoder_decoder else {}))
            return model
        except Exception as error:  # the library raises many types for sizes that do not fit
            reason = error
    raise ValueError(f"no small model of its class can be built ({reason}).")


def _candidates(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Fields of small configurations, those nearest to the original first."""
    original = {name: value for name, value in config.to_dict().items() if name not in _LEFT_OUT}
    switches = {name: value for name, value in original.items() if isinstance(value, bool | str)}
    defaults = type(config)()
    for base, layered in ((original, config), (switches, config), (switches, defaults), ({}, defaults)):
        for rope in (True, False):
            values = {**base, **_sizes(layered), **_by_layer(layered)}
            if "layer_types" in _field_names(config) and not _value(layered, "layer_types"):
                values["layer_types"] = ["full_attention"] * LAYERS  # the class has no default
            if not rope:
                values = {name: value for name, value in values.items() if not name.startswith("rope_")}
            yield values


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """The small sizes that the configuration's class knows."""
    known = _field_names(config)
    sizes: dict[str, Any] = {name: size for name, size in _SIZES.items() if name in known}
    sizes |= {name: size for name, size in _OPTIONAL_SIZES.items() if name in known and _value(config, name)}
    sizes |= {name: 48 for name in _WIDTHS if name in known and isinstance(_value(config, name), int)}
    if "num_experts_per_tok" in known:  # 1 in a model that takes no other number
        sizes["num_experts_per_tok"] = min(2, _value(config, "num_experts_per_tok") or 2)
    heads, groups = (_value(config, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if "num_key_value_heads" in known:
        groups = heads if groups is None else groups
        sizes["num_key_value_heads"] = _HEADS if groups == heads else 1 if groups == 1 else 2
    if config.is_encoder_decoder:
        encoder = type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")
        sizes |= {name: size for name, size in _OF_DECODER.items() if name in known}
        sizes |= {name: LAYERS // 2 for name in (encoder, *DECODER_LAYERS) if name in known}
        return sizes | {"decoder_start_token_id": 2}
    return sizes | {"num_hidden_layers": LAYERS}


def _by_layer(config: PreTrainedConfig) -> dict[str, list]:
    """The fields with a value for each layer, for few layers, each kind of layer among them."""
    shortened = {}
    for name, value in config.to_dict().items():
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers and value:
            firsts = [i for i, item in enumerate(value) if item not in value[:i]]
            layers = sorted(
                {*firsts[:LAYERS], *[i for i in range(len(value)) if i not in firsts][: LAYERS - len(firsts)]}
            )
            # A width is an integer of more than the twin's own sizes.
            shortened[name] = [48 + 16 * (i % 2) if name in _WIDTHS else value[i] for i in layers]
    return shortened


def _field_names(config: PreTrainedConfig) -> set[str]:
    fields = set(config.to_dict()) | set(getattr(type(config), "__dataclass_fields__", {}))
    return fields | {name for name, own in type(config).attribute_map.items() if own in fields}


def _value(config: PreTrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # the library refuses fields that differ from layer to layer
        return None
