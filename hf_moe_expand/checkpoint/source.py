"""Finds the folder of a checkpoint, for a folder or hub id, and reads its configuration, checked."""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from pydantic import Field
from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .. import modeling
from ..core.errors import InputError, first_line
from ..core.jsonfile import read_json
from ..core.private import in_one_line
from ..core.schema import Count, Flag, Positive, Schema, Text, Whole, read
from ..modeling import ExpandedConfig, language_models, stack_sizes
from ..planning.plan import MOST_EXPERTS
from .local import ADAPTER, EXPANDED, MOST_LAYERS, local_checkpoint, not_expanded, refuse_adapter
from .proven import reason_left_out
from .records import History, StageRecord

# Files of the tokenizer and the generation config, by the names that transformers writes and reads.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v[0-9]*", "tokenizer.tiktoken",
    "qwen.tiktoken", "tekken.json", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "vocab.json",
    "vocab.txt", "vocab.bpe", "merges.txt", "source.spm", "target.spm", "target_vocab.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "generation_config.json",
)  # fmt: skip
# The fields of gates that an earlier version fitted in all layers.
OLD_GATES = ("prefix_gate", "gate_languages")
# The code that travels inside an expanded checkpoint, by file name.
CODE = tuple(sorted(file.name for file in Path(modeling.__file__).parent.glob("[!_]*.py")))
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


_Size = Annotated[Positive, Field(le=MOST_ELEMENTS)]
_Each = dict[Text, _Size | list[dict[Text, _Size] | None]]  # of all expansions, or `each`


class _Parts(Schema):
    """The settings of optional parts."""

    encoder_decoder: dict[Text, Any] | None = None
    mixture: dict[Text, Any] | None = None
    gate: dict[Text, Any] | None = None
    cmr: Flag | None = None
    lora: _Each | None = None
    added: _Each | None = None
    adapters: list[dict[Text, Any]] | None = None
    joined: list[_Experts] | None = None
    expansion_only: dict[Text, Text | None] | None = None


class _OwnFields(Schema):
    """The fields of config.json that this package adds, each of which may be missing or null."""

    num_experts_per_layer: list[_Experts] | None = None
    earlier_experts_per_layer: list[list[_Experts]] | None = None
    classifier_layers: list[_Layer] | None = None
    new_layers: list[_Layer] | None = None
    parts: _Parts | None = None
    packs: list[_Experts] | None = None
    # Rank and alpha of a pack's updates, the width of its added FFNs, or null.
    updates_of_packs: list[Annotated[list[Positive], Field(min_length=1, max_length=2)] | None] | None = None
    language_gate: dict[Text, Any] | None = None
    exclusive_experts: Flag | None = None
    router_top_k: _Experts | None = None
    language_groups: list[list[Text]] | None = None
    conditional_routing: Flag | None = None
    history: list[StageRecord] | None = None


def resolve_checkpoint(name: str | os.PathLike, revision: str | None = None, weights: bool = True) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded (safetensors and JSON, no pickles).

    Args:
        weights: False leaves the weights on the hub.
    """
    folder = local_checkpoint(name, revision)
    if folder is not None:
        return folder
    snapshot = _downloaded(
        name, revision, ["*.json", "*.py", *TOKENIZER_FILES] + (["*.safetensors"] if weights else [])
    )
    refuse_adapter(snapshot, name)
    return snapshot


def resolve_adapter(name: str | os.PathLike) -> Path:
    """The local folder of an adapter of PEFT, from a folder or a hub id.

    Raises:
        InputError: there is none; the message says what is there instead.
    """
    folder = Path(name)
    if folder.is_file():
        raise InputError(f"{name}: is a file; give the adapter's folder.")
    if not folder.is_dir():
        local_checkpoint(name)  # refuses what is no hub id either
        folder = _downloaded(name, None, [ADAPTER, "adapter_model.safetensors"])
    if (folder / ADAPTER).is_file():
        return folder
    inside = sorted(file.parent.name for file in folder.glob(f"*/{ADAPTER}"))
    raise InputError(
        f"{name}: has no {ADAPTER}, so it is no adapter of PEFT"
        + (f"; its folder {inside[-1]} has one: give that." if inside else ": give the folder that PEFT wrote.")
    )


def _downloaded(name: str | os.PathLike, revision: str | None, patterns: list[str]) -> Path:
    """The snapshot of a repository on the hub, of which some files are fetched."""
    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
    except Exception as error:  # the library raises many types
        raise InputError(f"{name}: no such folder, and the hub does not give it: {in_one_line(error)}.") from None


def lies_inside(folder: Path, file: Path) -> bool:
    """Whether a file of a checkpoint folder, links followed, lies inside the folder."""
    home = folder.resolve()
    # The hub's cache keeps a snapshot's files as links to its `blobs`.
    home = home.parents[1] if home.parent.name == "snapshots" else home
    return home in file.resolve().parents


def base_config_at_hand(name: str, revision: str | None = None) -> PreTrainedConfig | None:
    """A dense checkpoint's configuration from its folder or the hub's cache, without the network; None without one."""
    folder = local_checkpoint(name)
    if folder is not None:
        return load_base_config(folder)
    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    return load_base_config(Path(cached).parent) if isinstance(cached, str) else None


def load_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a checkpoint folder; runs none of its code."""
    fields = read_json(folder / "config.json", "a configuration")
    check_fields(fields, folder)
    model_type = fields.get("model_type")
    if fields.get("auto_map") and isinstance(model_type, str) and model_type not in (*CONFIG_MAPPING, *EXPANDED):
        raise InputError(
            f"{folder}: its architecture {model_type!r} is code inside the checkpoint (auto_map), which "
            "no command runs: give a model whose architecture transformers itself has."
        )
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if hasattr(config, "validate"):
            config.validate()  # as `save_pretrained` does, before the work that is then saved
    except Exception as error:  # the library raises many types for wrong values
        raise InputError(f"{folder}: its configuration cannot be read ({first_line(error)}).") from error
    check_values(config, folder)
    return config


def differences(
    one: PreTrainedConfig, other: PreTrainedConfig, ignored: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Each field that differs between two configurations, in order, with its two values; those `ignored` left out."""
    ours, theirs = one.to_dict(), other.to_dict()
    for name in sorted({*ours, *theirs}.difference(ignored)):
        if ours.get(name) != theirs.get(name):
            yield name, ours.get(name), theirs.get(name)


def load_expanded_config(folder: Path) -> Any:
    """The configuration of an expanded checkpoint."""
    config = load_config(folder)
    if not isinstance(config, ExpandedConfig):
        raise not_expanded(folder, config.model_type)
    return config


def load_base_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a dense checkpoint that can be expanded."""
    config = text_config(load_config(folder))
    check_base_config(config, folder)
    return config


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text decoder inside a model of several kinds of input, or the configuration itself."""
    if config.is_encoder_decoder:
        return config
    inner = config.get_text_config(decoder=True)
    if inner is config or type(inner) not in language_models(inner):
        return config
    inner.dtype = inner.dtype or config.dtype
    inner.tie_word_embeddings = inner.tie_word_embeddings or config.tie_word_embeddings
    inner.name_or_path = config.name_or_path
    return inner


def check_base_config(config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Refuses the configuration of a model that cannot be expanded; messages use `name` for the model."""
    if isinstance(config, ExpandedConfig):
        raise InputError(f"{name}: is an expanded checkpoint already; give the dense model that it came from.")
    reason = reason_left_out(config)
    if not reason and type(config) not in language_models(config):
        reason = "not a language model that transformers knows"
    if reason:
        raise InputError(
            f"{name}: a {config.model_type} checkpoint cannot be expanded: it is {reason}; give a dense decoder or "
            "encoder-decoder (docs/backbones.md)."
        )
    if foreign := [field for field in ExpandedConfig.__annotations__ if hasattr(config, field)]:
        raise InputError(
            f"{name}: its configuration has {foreign[0]}, a field of expanded models, but it is a "
            f"{config.model_type} checkpoint: take the field out of config.json."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"{name}: the weights are quantised; expand the unquantised checkpoint.")
    if getattr(config, "slow_but_exact", False) and config.pretraining_tp > 1:  # then the FFN slices whole sequences
        raise InputError(
            f"{name}: slow_but_exact with pretraining_tp {config.pretraining_tp} computes the FFN in slices, which "
            "experts cannot. Set slow_but_exact to false in config.json."
        )


def grown_from(name: str) -> tuple[list[int], list[str], int, bool]:
    """Of an expanded checkpoint that can grow: experts of each layer, languages, number of the encoder's layers, and
    whether its experts are exclusive."""
    config = load_expanded_config(resolve_checkpoint(name, weights=False))
    if config.model_type == "dmoe":
        raise InputError(f"{name}: is a DMoE checkpoint, which does not grow by plans: `train adapt` adds a language.")
    languages, encoder = History.of(config).languages, stack_sizes(config).get("encoder", 0)
    return config.num_experts_per_layer, languages, encoder, config.exclusive_experts


def check_fields(fields: Mapping[str, Any], folder: Path) -> None:
    """Checks the fields of config.json that decide how large a model is, and those that this package adds."""
    for where, mapping in [("", fields), *((f"{key}.", value) for key, value in fields.items())]:
        if not isinstance(mapping, Mapping):
            continue
        for names, most in ((_LAYERS, MOST_LAYERS), (_SIZES, MOST_ELEMENTS)):
            for name in names:
                value = mapping.get(name)
                by_layer = value if isinstance(value, list) and names is _SIZES else [value]
                counts = [type(one) is int and 1 <= one <= most for one in by_layer]
                if value is not None and not (counts and all(counts)):
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
    if any(fields.get(name) is not None for name in OLD_GATES):
        raise InputError(
            f"{folder}: has gates in all layers, of an earlier version: fit the one gate that takes their place, with "
            f"`hf-moe-expand gates {folder} OUT --data LANGUAGE=FILE ...`."
        )
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
    """Checks the configuration that transformers read from config.json for contradictions that it does not notice."""
    inner = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    if not isinstance(inner, PreTrainedConfig):
        raise InputError(
            f"{folder}: its configuration cannot be read (a {config.model_type} model has no text decoder inside, but "
            "config.json describes one: text_config or the like)."
        )
    if isinstance(config, ExpandedConfig):
        if config.backbone_model_type is None:
            raise InputError(f"{folder}: config.json does not say which backbone was expanded (backbone_model_type).")
        earlier, packs = getattr(config, "earlier_experts_per_layer", None) or [], getattr(config, "packs", None) or []
        recorded = len(History.of(config))
        if earlier and recorded and len(earlier) != recorded - 1:
            wanted = f"the counts before the last of {recorded} expansions"
            raise _wrong(folder, "earlier_experts_per_layer", earlier, wanted)
        if packs and not recorded:
            raise _wrong(folder, "packs", packs, "left out, where config.json records no expansion")


def _wrong(folder: Path, name: str, value: Any, wanted: str) -> InputError:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:60]}..."
    return InputError(f"{folder}: its configuration cannot be read ({name} is {text}, not {wanted}).")
