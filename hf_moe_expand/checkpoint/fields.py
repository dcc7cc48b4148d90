"""Checks config.json before a model is built from it: sizes within reason, histories of the right shape."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..errors import InputError
from ..modeling import ExpandedConfig
from ..planning.plan import MOST_EXPERTS
from ..records import History, StageRecord
from ..schema import Count, Declared, Flag, Positive, Text, Whole, read
from .local import MOST_LAYERS

# No model comes near these numbers; building larger lists and modules would take for ever.
MOST_ELEMENTS = 1 << 31

_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
)  # fmt: skip
_SIZES = (
    "hidden_size", "n_embd", "d_model", "vocab_size", "intermediate_size", "n_inner", "ffn_hidden_size", "head_dim",
    "num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads", "num_kv_heads", "n_positions",
    "max_position_embeddings", "max_seq_len", "expansion_ratio", "lora_rank", "expert_width", "encoder_ffn_dim",
    "decoder_ffn_dim", "encoder_attention_heads", "decoder_attention_heads", "d_ff", "d_kv",
)  # fmt: skip
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "activation")
_DTYPES = ("dtype", "torch_dtype")


_Experts = Annotated[Count, Field(le=MOST_ELEMENTS)]
_Layer = Annotated[Whole, Field(ge=0, le=MOST_LAYERS)]


class _OwnFields(Declared):
    """The fields of config.json that this package adds, each of which may be missing or null."""

    num_experts_per_layer: list[_Experts] | None = None
    earlier_experts_per_layer: list[list[_Experts]] | None = None
    classifier_layers: list[_Layer] | None = None
    new_layers: list[_Layer] | None = None
    packs: list[_Experts] | None = None
    # Rank and alpha of a pack's updates, the width of its added FFNs, or null.
    updates_of_packs: list[Annotated[list[Positive], Field(min_length=1, max_length=2)] | None] | None = None
    prefix_gate: dict[Text, Any] | None = None
    gate_languages: list[list[Text]] | None = None
    router_top_k: _Experts | None = None
    language_groups: list[list[Text]] | None = None
    conditional_routing: Flag | None = None
    history: list[StageRecord] | None = None


def check_fields(fields: Mapping[str, Any], folder: Path) -> None:
    """Checks the fields of config.json that decide how large a model is, and those that this package adds.

    Raises:
        InputError: a count is not a whole number within reason, a type or an activation is unknown, or a history is
            malformed; the message names the field.
    """
    for where, mapping in [("", fields), *((f"{key}.", value) for key, value in fields.items())]:
        if not isinstance(mapping, Mapping):
            continue
        for names, most in ((_LAYERS, MOST_LAYERS), (_SIZES, MOST_ELEMENTS)):
            for name in names:
                value = mapping.get(name)
                by_layer = value if isinstance(value, list) and names is _SIZES else [value]
                if value is not None and not (by_layer and all(_is_count(one, most=most) for one in by_layer)):
                    raise _wrong(folder, where + name, value, f"a whole number from 1 to {most:,}")
        for name in _ACTIVATIONS:
            if isinstance(value := mapping.get(name), str) and value not in ACT2FN:
                raise _wrong(folder, where + name, value, "an activation that transformers knows")
        for name in _DTYPES:
            value = mapping.get(name)
            if isinstance(value, str) and not isinstance(
                getattr(torch, value.removeprefix("torch."), None), torch.dtype
            ):
                raise _wrong(folder, where + name, value, "a type that torch knows")
    if "transformers_weights" in fields:
        raise InputError(
            f"{folder}: config.json names a weights file of its own (transformers_weights), which is not read: rename "
            "that file to model.safetensors and take the field out."
        )
    try:
        read(_OwnFields, {name: value for name, value in fields.items() if name in _OwnFields.model_fields})
        History.of(fields)
    except InputError as error:
        raise InputError(f"{folder}: its configuration cannot be read ({str(error).rstrip('.')}).") from None
    experts = fields.get("num_experts_per_layer") or []
    if sum(experts) > MOST_EXPERTS:
        raise _wrong(folder, "num_experts_per_layer", sum(experts), f"at most {MOST_EXPERTS:,} experts in all")


def check_values(config: Any, folder: Path) -> None:
    """Checks the configuration that transformers read from config.json for contradictions that it does not notice.

    Raises:
        InputError: an expanded model lacks a backbone, or its history has other expansions than its counts; the message
            names the field; or a part that the model type does not have stands in the configuration.
    """
    inner = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    if not isinstance(inner, PreTrainedConfig):
        raise InputError(
            f"{folder}: its configuration cannot be read (a {config.model_type} model has no text decoder inside, but "
            "config.json describes one: text_config or the like)."
        )
    if isinstance(config, ExpandedConfig):
        if config.backbone_model_type is None:
            raise InputError(f"{folder}: config.json does not say which backbone was expanded (backbone_model_type).")
        _check_history(config, folder)


def _check_history(config: Any, folder: Path) -> None:
    """Refuses counts and packs of more or fewer expansions than config.json records."""
    earlier, packs = getattr(config, "earlier_experts_per_layer", None) or [], getattr(config, "packs", None) or []
    recorded = len(History.of(config))
    if earlier and recorded and len(earlier) != recorded - 1:
        raise _wrong(
            folder, "earlier_experts_per_layer", earlier, f"the counts before the last of {recorded} expansions"
        )
    if packs and not recorded:
        raise _wrong(folder, "packs", packs, "left out, where config.json records no expansion")


def _wrong(folder: Path, name: str, value: Any, wanted: str) -> InputError:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:60]}..."
    return InputError(f"{folder}: its configuration cannot be read ({name} is {text}, not {wanted}).")


def _is_count(value: Any, least: int = 1, most: int = MOST_ELEMENTS) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
