"""What an architecture must keep to be expanded, checked on a tiny twin of the model.

The twin has the model's configuration class and its switches, with small sizes. Architectures in `PROVEN` have passed
the same checks in the tests; any other passes them when `expand` meets it.
"""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ..errors import InputError, first_line
from ..modeling import LayerMoEConfig, auto_class, decoder_ffns
from ..modeling.expanded_config import DECODER_LAYERS
from .proven import is_proven, reason_left_out
from .stored import places

LAYERS = 4
VOCABULARY = 257
_HIDDEN, _HEADS, _HEAD = 32, 4, 8
# The canonical names of the sizes; a configuration class translates its own names (`n_embd`).
_NAMES_BY_SIZE: dict[float, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    64: "max_position_embeddings",
    _HIDDEN: "hidden_size word_embed_proj_dim mamba_d_ssm lru_width",
    16: "kv_lora_rank moe_intermediate_size",
    _HEAD: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim "
    "linear_head_dim mamba_d_head mamba_d_state mamba_chunk_size",
    _HEADS: "num_attention_heads linear_num_heads linear_num_value_heads mamba_n_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts rotary_dim",
    2: "linear_num_key_heads moe_k",
    1: "mamba_n_groups mamba_expand n_shared_experts n_group topk_group",
    0: "num_kv_shared_layers",
}
# Of encoder-decoders; layers that are left out at random (layerdrop) would get no gradient.
_DECODER_NAMES_BY_SIZE: dict[float, str] = {
    _HEADS: "encoder_attention_heads decoder_attention_heads",
    48: "encoder_ffn_dim decoder_ffn_dim",
    VOCABULARY: "decoder_vocab_size",
    0.0: "encoder_layerdrop decoder_layerdrop",
}
# Sizes of parts that a model may lack: none, or 0.
_OPTIONAL_NAMES_BY_SIZE: dict[float, str] = {
    0: "pad_token_id",
    1: "bos_token_id",
    2: "eos_token_id",
    8: "hidden_size_per_layer_input",
    16: "q_lora_rank sliding_window attention_window_size window_size",
}
_MOST_WEIGHTS = 1 << 25
_WIDTHS = ("intermediate_size", "ffn_hidden_size", "d_ff", "dim_ff")
_LEFT_OUT = ("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path", "quantization_config")
_EXPERTS, _WIDTH, _NEW_TOKENS = 3, 16, 4


def tiny_twin(config: PreTrainedConfig) -> Any:
    """A dense model of the configuration's class with at most a few million weights, drawn with a fixed seed."""
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
    sizes: dict[str, Any] = _by_name(_NAMES_BY_SIZE, known)
    optional = _by_name(_OPTIONAL_NAMES_BY_SIZE, known)
    sizes |= {name: size for name, size in optional.items() if _value(config, name)}
    sizes |= {name: 48 for name in _WIDTHS if name in known and isinstance(_value(config, name), int)}
    if "num_experts_per_tok" in known:  # 1 in a model that takes no other number
        sizes["num_experts_per_tok"] = min(2, _value(config, "num_experts_per_tok") or 2)
    heads, groups = (_value(config, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if "num_key_value_heads" in known:
        groups = heads if groups is None else groups
        sizes["num_key_value_heads"] = _HEADS if groups == heads else 1 if groups == 1 else 2
    if config.is_encoder_decoder:
        encoder = type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")
        sizes |= _by_name(_DECODER_NAMES_BY_SIZE, known)
        sizes |= {name: LAYERS // 2 for name in (encoder, *DECODER_LAYERS) if name in known}
        return sizes | {"decoder_start_token_id": 2}
    return sizes | {"num_hidden_layers": LAYERS}


def _by_name(names_by_size: dict[float, str], known: set[str]) -> dict[str, Any]:
    return {name: size for size, names in names_by_size.items() for name in names.split() if name in known}


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


@dataclass(frozen=True)
class Twin:
    """A tiny dense model, the model right after its expansion, and one whose experts and routers have changed since."""

    dense: Any
    expanded: Any
    trained: Any

    @classmethod
    def of(cls, config: PreTrainedConfig) -> list["Twin"]:
        """The twins of a dense model's configuration: one with experts that are FFNs, unless all layers are mixtures of
        experts of the backbone's own, and one with added experts if some are."""
        dense = tiny_twin(config)
        mixtures = [ffn.is_mixture for ffn in decoder_ffns(dense)]
        kinds: list[dict[str, Any]] = []
        if not all(mixtures):
            kinds.append({"num_experts_per_layer": [1 if mixture else _EXPERTS for mixture in mixtures]})
        if any(mixtures):
            added = {"expert_kind": "added", "expert_width": _WIDTH}
            kinds.append({"num_experts_per_layer": [_EXPERTS] * len(mixtures), **added})
        return [cls._expanded(dense, fields) for fields in kinds]

    @classmethod
    def _expanded(cls, dense: Any, fields: dict[str, Any]) -> "Twin":
        own: Any = LayerMoEConfig.from_dense(dense.config, **fields)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            expanded = auto_class(own).from_config(own, dtype=torch.float32).eval()
        weights, where = dense.state_dict(), places(expanded)
        copied = {key: weights[place.dense] for key, place in where.items() if place.dense is not None}
        expanded.load_state_dict(copied, strict=False)
        return cls(dense, expanded, _moved(expanded))


class Promise(NamedTuple):
    """A promise, in the words of a refusal, and the check that it holds for a twin."""

    name: str
    words: str
    holds: Callable[[Twin], bool]


def _tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 1, (rows, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    of_decoder = {"decoder_input_ids": _tokens(length=9)} if model.config.is_encoder_decoder else {}
    return model(_tokens(), **of_decoder).logits


@torch.no_grad()
def _moved(model: Any) -> Any:
    """A copy whose new experts and routers have changed."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    for ffn in model.expanded_ffns().values():
        for module in (*ffn.experts[1:], ffn.router):
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def _starts_as_the_base(twin: Twin) -> bool:
    expected, actual = _logits(twin.dense), _logits(twin.expanded)
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def _keeps_the_base(twin: Twin) -> bool:
    expected = _logits(twin.dense)
    with twin.trained.use_expert(0):
        return torch.equal(_logits(twin.trained), expected)


def _learns(twin: Twin) -> bool:
    model, ids = copy.deepcopy(twin.trained).train(), _tokens(rows=4, length=16)
    model(ids, labels=ids, use_cache=False).loss.backward()
    new = [p for f in model.expanded_ffns().values() for m in (*f.experts[1:], f.router) for p in m.parameters()]
    return all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in new)


def _is_saved_whole(twin: Twin) -> bool:
    with TemporaryDirectory() as folder:
        twin.trained.save_pretrained(folder)
        loaded: Any = auto_class(twin.trained.config).from_pretrained(
            folder, trust_remote_code=False, output_loading_info=True
        )
        again, info = loaded
        expected = twin.trained.state_dict()
        state = again.state_dict()
        same = list(state) == list(expected) and all(torch.equal(state[name], expected[name]) for name in expected)
    return same and not any(info.values())


def _generates_with_a_cache(twin: Twin) -> bool:
    ids = _tokens()
    options: dict[str, Any] = {
        "max_new_tokens": _NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0
    }  # fmt: skip
    if twin.trained.config.is_encoder_decoder:
        options |= {"decoder_start_token_id": 2, "num_beams": 2, "forced_eos_token_id": None}
    with_cache, without = (twin.trained.generate(ids, **options, use_cache=cached) for cached in (True, False))
    return torch.equal(with_cache, without)


PROMISES = (
    Promise("start", "the expanded model computes what the base does", _starts_as_the_base),
    Promise("expert 0", "expert 0 alone is the base, bit for bit", _keeps_the_base),
    Promise("gradients", "every new expert and router learns", _learns),
    Promise("files", "the model is the same after saving and loading", _is_saved_whole),
    Promise("cache", "generation with a cache equals the full forward pass", _generates_with_a_cache),
)


def broken_promise(config: PreTrainedConfig) -> str | None:
    """What the architecture of a dense configuration does not keep; None if it keeps every promise."""
    try:
        twins = Twin.of(config)
    except Exception as error:  # models raise many types
        return first_line(error)
    for twin, promise in product(twins, PROMISES):
        try:
            if not promise.holds(twin):
                return f"it does not hold that {promise.words}"
        except Exception as error:
            return f"it cannot be shown that {promise.words} ({first_line(error)})"
    return None


def in_refusal(config: PreTrainedConfig, reason: str) -> str:
    """What an architecture is, or else the promise that it breaks, for a message."""
    known = reason_left_out(config)
    return f"it is {known}" if known else f"on a tiny twin of the model, {reason}"


def check_architecture(config: PreTrainedConfig, name: Any) -> None:
    """Refuses an architecture that does not keep the promises; messages call the model `name`. A proven one passes at
    once, any other is tried on a tiny twin."""
    if is_proven(config):
        return
    values = config.to_dict()
    if reason := _broken(type(config), json.dumps(values, sort_keys=True, default=str)):  # type: ignore[arg-type]
        why = in_refusal(config, reason)
        raise InputError(f"{name}: a {config.model_type} checkpoint cannot be expanded: {why} (docs/backbones.md).")


@lru_cache(maxsize=8)
def _broken(kind: Any, values: str) -> str | None:
    return broken_promise(kind(**json.loads(values)))
