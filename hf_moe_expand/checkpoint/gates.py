"""Writes fitted gates into a checkpoint, in place of its classifiers; streamed, all other tensors byte for byte."""

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..modeling import LayerMoEConfig, decoder_ffns
from ..modeling.prefix_gate import PrefixRule
from ..records import History, StageRecord
from .packs import ROUTING, Rows
from .reader import TORCH_DTYPES
from .source import COMPANIONS, load_expanded_config, resolve_checkpoint
from .stored import StoredModel
from .writer import DEFAULT_SHARD_SIZE, check_output, in_memory, write_checkpoint

# The fields of a configuration and of an expansion's record.
GATE_FIELDS = ("classifier_layers", "prefix_gate", "gate_languages")


@dataclass(frozen=True)
class Gates:
    """Gates of several layers.

    Attributes:
        languages: the languages of each class, in the order of the rows; class 0 stays home.
        rows: weights `[R, h]` and biases `[R]`, by layer and inner name.
        rule: how the gates judge the text so far; None if they judge single tokens.
    """

    languages: list[list[str]]
    rows: Rows
    rule: PrefixRule | None


def check_gated(model: str | os.PathLike) -> Any:
    """The configuration of a checkpoint that takes gates: not a DMoE's or an encoder-decoder's."""
    config = load_expanded_config(resolve_checkpoint(model, weights=False))
    if not isinstance(config, LayerMoEConfig):
        raise InputError(f"{model}: is a DMoE, which keeps no language of its base: gates have nothing to send home.")
    if config.is_encoder_decoder:
        raise InputError(
            f"{model}: is an encoder-decoder: gates judge a text from its first token on (docs/encoder_decoder.md)."
        )
    return config


def write_gates(
    model: str | os.PathLike,
    out: str | os.PathLike,
    gates: Gates,
    record: StageRecord,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Path:
    """Writes an expanded checkpoint with these gates, and the step's `record` into its history."""
    stored = StoredModel(model)
    check_output(out, overwrite, stored.folder)
    config: Any = stored.config
    places = [ffn.place for ffn in decoder_ffns(stored.network)]
    outputs = [one for key in stored.tensors if ".classifier." not in key for one in stored.copies(key)]
    for (layer, inner), rows in gates.rows.items():
        dtype = TORCH_DTYPES[stored[f"{places[layer]}.router.weight"].dtype]
        outputs.append(in_memory(f"{places[layer]}.{inner}", rows.to(dtype)))
    set_gates(config, gates)
    parameters = sum(tensor.numel for tensor in outputs)
    fields = {name: getattr(config, name) for name in GATE_FIELDS}
    History.of(config).with_last(parameters=parameters, **fields).with_stage(record).write(config)
    return write_checkpoint(out, config, outputs, [(stored.folder, COMPANIONS)], "gates", max_shard_size, overwrite)


def set_gates(config: Any, gates: Gates) -> None:
    """Writes into a configuration which layers have gates, how they judge, and the languages of their rows."""
    config.classifier_layers = sorted({layer for layer, _ in gates.rows})
    config.prefix_gate = asdict(gates.rule) if gates.rule else None
    config.gate_languages = gates.languages if gates.rows else None


def stored_gates(stored: StoredModel) -> Gates | None:
    """The fitted gates of a checkpoint; None if it has none."""
    config: Any = stored.config
    if getattr(config, "gate_languages", None) is None:
        return None
    places = {key: place for key, place in stored.places.items() if place.inner in ROUTING[1:]}
    rows = {(place.layer, place.inner): stored.tensor(key) for key, place in places.items()}
    return Gates(config.gate_languages, rows, PrefixRule.of(config))


def without_classes(gates: Gates, gone: Collection[int]) -> Gates:
    """The gates without the rows of some classes; the later classes move up."""
    classes = [number for number, codes in enumerate(gates.languages) for _ in codes]
    rows = torch.tensor([row for row, number in enumerate(classes) if number not in gone])
    languages = [codes for number, codes in enumerate(gates.languages) if number not in gone]
    return Gates(languages, {place: old[rows] for place, old in gates.rows.items()}, gates.rule)
