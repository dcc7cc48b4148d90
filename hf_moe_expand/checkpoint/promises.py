"""Refuses an architecture that cannot be expanded. One that is not in `proven` is tried on a tiny twin of the model:
right after its expansion the twin must compute what it did before, to rounding."""

from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..core.errors import InputError, in_one_line
from ..modeling import LayerMoEConfig, auto_class, decoder_ffns
from ..modeling.backbone import DECODER_LAYERS
from .proven import is_proven
from .stored import places

LAYERS, _WIDTHS = 4, "intermediate_size ffn_hidden_size d_ff dim_ff encoder_ffn_dim decoder_ffn_dim"
# A twin's sizes by the canonical names of the fields; a configuration class translates its own (`n_embd`).
_SIZES = {
    257: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
    64: "max_position_embeddings",
    48: _WIDTHS,
    32: "hidden_size word_embed_proj_dim mamba_d_ssm lru_width",
    16: "kv_lora_rank q_lora_rank moe_intermediate_size sliding_window attention_window_size window_size",
    8: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim "
    "linear_head_dim mamba_d_head mamba_d_state mamba_chunk_size hidden_size_per_layer_input",
    4: "num_attention_heads linear_num_heads linear_num_value_heads mamba_n_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts rotary_dim encoder_attention_heads decoder_attention_heads",
    2: "linear_num_key_heads moe_k eos_token_id",
    1: "mamba_n_groups mamba_expand n_shared_experts n_group topk_group bos_token_id",
    0: "num_kv_shared_layers pad_token_id encoder_layerdrop decoder_layerdrop",
}
_ALWAYS = ("head_dim", "n_routed_experts", "n_shared_experts")  # where a class computes the default from other sizes


def tiny_twin(config: PreTrainedConfig) -> Any:
    """A dense model of the configuration's class with small sizes, drawn with a fixed seed; with the configuration's
    switches if that can be built."""
    own, reason = config.to_dict(), ""
    for name in ("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path"):
        own.pop(name, None)
    switches = {name: value for name, value in own.items() if isinstance(value, bool | str)}
    default = type(config)()
    for fields, layered in ((own, config), (switches, config), (switches, default), ({}, default)):
        try:
            small = type(config)(**{**fields, **_small(layered)})
            with torch.device("meta"):
                weights = auto_class(small).from_config(small, trust_remote_code=False).num_parameters()
            if weights > 1 << 25:
                raise ValueError(f"with small sizes it still has {weights:,} weights")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = auto_class(small).from_config(small, dtype=torch.float32, trust_remote_code=False).eval()
            logits(model)
            return model
        except Exception as error:  # the library raises many types for sizes that do not fit
            reason = str(error)
    raise ValueError(f"no small model of its class can be built ({reason}).")


def _small(config: Any) -> dict[str, Any]:
    """The fields with a size, or a value for each layer."""
    kind, fields = type(config), config.to_dict()
    known = {*fields, *getattr(kind, "__dataclass_fields__", {})}
    known |= {name for name, own in kind.attribute_map.items() if own in known}
    small: dict[str, Any] = {"layer_types": ["full_attention"] * LAYERS} if "layer_types" in known else {}
    for name, size in ((name, size) for size, names in _SIZES.items() for name in names.split() if name in known):
        if name in _ALWAYS or fields.get(kind.attribute_map.get(name, name)):
            small[name] = size
    for name, values in fields.items():
        if isinstance(values, list | tuple) and values and len(values) == config.num_hidden_layers:
            firsts = [i for i, one in enumerate(values) if one not in values[:i]]  # each kind of layer
            layers = sorted(islice(dict.fromkeys([*firsts, *range(len(values))]), LAYERS))
            small[name] = [48 + 16 * (i % 2) if name in _WIDTHS.split() else values[i] for i in layers]
    if "num_experts_per_tok" in known:  # 1 in a model that takes no other number
        small["num_experts_per_tok"] = min(2, config.num_experts_per_tok or 2)
    if "num_key_value_heads" in known:
        groups = config.num_key_value_heads
        small["num_key_value_heads"] = 4 if groups in (None, config.num_attention_heads) else min(groups, 2)
    if not config.is_encoder_decoder:
        return small | {"num_hidden_layers": LAYERS}
    encoder = kind.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    small |= {name: LAYERS // 2 for name in (encoder, *DECODER_LAYERS) if name in known}
    return small | {"decoder_start_token_id": 2}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """What a twin computes for two short texts."""
    ids = torch.arange(3, 27).view(2, 12)
    return model(ids, **({"decoder_input_ids": ids[:, :9]} if model.config.is_encoder_decoder else {})).logits


def expanded_twin(dense: Any, **fields: Any) -> Any:
    """A dense twin right after its expansion; `fields` are those of its configuration."""
    own: Any = LayerMoEConfig.from_dense(dense.config, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        expanded = auto_class(own).from_config(own, dtype=torch.float32).eval()
    weights = dense.state_dict()
    copied = {key: weights[place.dense] for key, place in places(expanded).items() if place.dense is not None}
    expanded.load_state_dict(copied, strict=False)
    return expanded


def starts_as_the_base(dense: Any, expanded: Any) -> bool:
    """Whether the expanded model computes what the base does, to rounding."""
    expected = logits(dense)
    return torch.allclose(logits(expanded), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def check_architecture(config: PreTrainedConfig, name: Any) -> None:
    """Refuses an architecture that cannot be expanded; messages call the model `name`."""
    if is_proven(config):
        return
    reason = "it does not hold that the expanded model computes what the base does"
    try:
        dense = tiny_twin(config)
        mixtures = [ffn.is_mixture for ffn in decoder_ffns(dense)]
        added = {"expert_kind": "added", "expert_width": 16} if any(mixtures) else {}
        if starts_as_the_base(dense, expanded_twin(dense, num_experts_per_layer=[3] * len(mixtures), **added)):
            return
    except Exception as error:  # models raise many types
        reason = in_one_line(error)
    why = f"on a tiny twin of the model, {reason}"
    raise InputError(f"{name}: a {config.model_type} checkpoint cannot be expanded: {why} (docs/backbones.md).")
