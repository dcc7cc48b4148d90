"""Exports a language or an expert of an expanded checkpoint as a dense model; streamed."""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from ..core.errors import InputError, library_errors_at
from ..core.jsonfile import read_json
from ..modeling import layer_names
from ..modeling.configuration_dmoe import DMoEConfig
from ..modeling.parts import PARTS
from ..modeling.routing_control import classes_of
from .compare import moved_tensors
from .records import StageRecord
from .source import GENERATION, TEMPLATE, load_expanded_config
from .stored import Place, StoredModel, network_of
from .table import Copy, Mix, New, Rule, opened, rewrite, widened
from .writer import DEFAULT_SHARD_SIZE

# Why a language is no dense model.
REFUSED = {
    ("several", "export-language"): "a token has several experts, which no dense model has",
    ("added", "export-language"): "its experts are added to expert 0's output, and the backbone has no FFN for both",
    ("dmoe", "export-language"): str(DMoEConfig.not_told),
    ("encoder-decoder", "export-language"): str(PARTS["encoder_decoder"].not_told),
}
_NOT_INHERITED = ("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path")


def export_dense(
    model: str | os.PathLike,
    out: str | os.PathLike,
    *,
    expert: int | None = None,
    language: str | None = None,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> str:
    """Writes the dense model of a language or of an expert: an ordinary checkpoint, which every server takes.

    Args:
        expert: write the dense model that has this expert of every expanded layer as its FFN, byte for byte. Expert 0
            of a model whose base was frozen gives the base. A LoRA expert's updates are added to expert 0's weights in
            float32 and rounded once.
        language: write the dense model of a language: the base for one of its own, and for a new one the base with the
            FFNs that its tokens take alone (exclusive experts).

    Returns the architecture's name.
    """
    if (expert is None) == (language is None):
        raise InputError("Give one of --language CODE and --expert NUMBER, or --peft, for adapters.")
    (source,) = opened([model], out, overwrite, load_expanded_config)
    if language is not None:
        own: dict[str, Any] = {"language": language}
        chosen, number = experts_of(source, language)
    else:
        own, number = {"expert": expert}, expert or 0
        chosen = _experts_of_number(source, number)
    config = dense_config(source.config)
    settings = {"model": source.name, **own, "expansions": source.config.expansions}
    rewrite(
        [source], config, _dense(source, chosen, number), out, record=StageRecord(stage="export", settings=settings),
        files=_own_files(source, language, number), title="export",
        names=_names(config), max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip
    if not any(chosen) and (verdict := moved_tensors(source)).moved:
        print(f"{out}: is not the base that was expanded: {verdict.names} moved since")
    return config.architectures[0]


def _own_files(source: StoredModel, language: str | None, number: int) -> dict[str, bytes]:
    """The generation settings and the chat template of the fine-tune that a language came from, if it has its own."""
    entries = (source.config.parts or {}).get("languages") or []
    if language is None or not number or not entries:
        return {}
    files, own = {}, entries[number - 1].get("generation")
    if own:
        fields = {**generation_of(source.folder), **own}
        files[GENERATION] = json.dumps(fields, indent=2, sort_keys=True).encode()
    template = source.folder / "additional_chat_templates" / f"{language}.jinja"
    return {**files, TEMPLATE: template.read_bytes()} if template.is_file() else files


def generation_of(folder: Path) -> dict[str, Any]:
    """The generation settings in a checkpoint's folder."""
    file = folder / GENERATION
    return read_json(file, "a generation configuration") if file.is_file() else {}


def experts_of(source: StoredModel, language: str) -> tuple[list[int], int]:
    """The expert of each layer in the dense model of a language, and its class."""
    with library_errors_at(source.folder, ValueError):
        number = classes_of(source.config, language)[0] or 0
    experts = {layer: ffn.expert_of(number) for layer, ffn in source.network.expanded_ffns().items()}
    if mixed := [layer for layer, one in experts.items() if one is None]:
        raise InputError(f"{source.folder}: {language}, layer {mixed[0]}: {REFUSED['several', 'export-language']}.")
    return [experts.get(layer) or 0 for layer in range(len(source.config.num_experts_per_layer))], number


def _experts_of_number(source: StoredModel, expert: int) -> list[int]:
    counts = source.config.num_experts_per_layer
    for name, count in zip(layer_names(source.config), counts, strict=True):
        if not 0 <= expert < count and count > 1:
            raise InputError(f"{source.folder}: layer {name} has no expert {expert}; give one of 0..{count - 1}.")
    return [expert] * len(counts)


def _names(config: Any) -> Callable[[str], str]:
    """The name under which the library saves a tensor of a dense model (GPT-NeoX's `embed_out`)."""
    rules = get_model_conversion_mapping(network_of(config), add_legacy=False)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming) and not isinstance(rule, PrefixChange)]
    reverse: Any = [rule.reverse_transform() for rule in reversed(renamings)]
    return lambda key: rename_source_key(key, reverse, [], reverse=True)[0]


def _dense(source: StoredModel, experts: Sequence[int], number: int) -> Rule:
    """One expert of every expanded layer is the FFN, and what a class has of its own is in the base's place."""
    if any(experts) and source.config.expert_kind == "added":
        raise InputError(f"{source.folder}: {REFUSED['added', 'export-language']}: take expert 0.")
    own = own_places(source, experts, number)
    keys = source.base | {place.dense: place.key for place in own if place.dense}
    updates = updates_of(source, own)
    biases = {place.updates: place for place in own if place.update is not None and place.factor == "lora_B.bias"}

    def rule(place: Place) -> Copy | Mix | New:
        key = keys.get(place.key, place.key)
        if (bias := biases.get(place.key)) is not None:
            scaling = bias.update.scaling  # type: ignore[union-attr]
            return Mix([Copy(key), Copy(bias.key)], lambda own, added: own + scaling * added)
        update = updates.get(place.key)
        return Copy(key) if update is None else New(partial(_merged, source, key, update), source[key].dtype)

    return rule


def dense_config(config: Any) -> Any:
    """The backbone's own configuration inside that of an expanded model."""
    backbone = config.backbone_config_class
    ours = {f.name for f in dataclasses.fields(config)} - {f.name for f in dataclasses.fields(backbone)}
    values = {name: value for name, value in config.to_dict().items() if name not in {*ours, *_NOT_INHERITED}}
    causal, encoder_decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    architecture = (encoder_decoder if config.is_encoder_decoder else causal)[backbone.model_type]
    return backbone(**values, architectures=[architecture])


@dataclass(frozen=True)
class StoredUpdate:
    """An update `scaling * B A` in a checkpoint: the names of its factors, and its rank."""

    lora_B: str
    lora_A: str
    scaling: float
    rank: int


def own_places(source: StoredModel, experts: Sequence[int], number: int) -> list[Place]:
    """The places of what the experts of each layer, or a class, have of their own."""
    return [
        place
        for place in source.places.values()
        if place.expert and (experts[place.layer] if place.number is None else number) == (place.number or place.expert)
    ]


def updates_of(source: StoredModel, own: Sequence[Place]) -> dict[str, StoredUpdate]:
    """The low-rank updates among these places, by the names in the dense model of the weights that they change."""
    return {
        place.updates or "": StoredUpdate(
            place.key.replace(".lora_A.", ".lora_B."), place.key, place.update.scaling, place.shape[0]
        )
        for place in own
        if place.update is not None and place.factor == "lora_A.weight" and place.key in source
    }


def _merged(source: StoredModel, key: str, update: StoredUpdate) -> torch.Tensor:
    """The tensor `key` with its update, `W + alpha / r * B A`."""
    transposed = isinstance(source.network.get_submodule(key.removesuffix(".weight")), Conv1D)
    b, a, weight = (widened(source[name].load()) for name in (update.lora_B, update.lora_A, key))
    change = b @ a
    return weight + update.scaling * (change.T if transposed else change)
