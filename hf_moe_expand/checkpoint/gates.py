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
from ..schema import changed
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
        rows: by layer, weights `[R, h]` and biases `[R]`.
        rule: how the gates judge the text so far; None if they judge single tokens.
    """

    languages: list[list[str]]
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]]
    rule: PrefixRule | None


NO_GATES = Gates([], {}, None)


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
    for layer in gates.rows:
        dtype = TORCH_DTYPES[stored.info(f"{places[layer]}.router.weight").dtype]
        for inner, tensor in gate_tensors(gates, layer, dtype).items():
            outputs.append(in_memory(f"{places[layer]}.{inner}", tensor))
    set_gates(config, gates)
    history = History.of(config)
    parameters = sum(tensor.numel for tensor in outputs)
    fields = {name: getattr(config, name) for name in GATE_FIELDS}
    last = changed(history.last, parameters=parameters, **fields)
    History([*history.expansions[:-1], last]).with_stage(record).write(config)
    return write_checkpoint(out, config, outputs, [(stored.folder, COMPANIONS)], "gates", max_shard_size, overwrite)


def set_gates(config: Any, gates: Gates) -> None:
    """Writes into a configuration which layers have gates, how they judge, and the languages of their rows."""
    config.classifier_layers = sorted(gates.rows)
    config.prefix_gate = asdict(gates.rule) if gates.rule else None
    config.gate_languages = gates.languages if gates.rows else None


def gate_tensors(gates: Gates, layer: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A layer's gate as it is stored, by inner name."""
    kinds = ("classifier.weight", "classifier.bias")
    return {kind: rows.to(dtype) for kind, rows in zip(kinds, gates.rows[layer], strict=True)}


def stored_gates(stored: StoredModel) -> Gates | None:
    """The fitted gates of a checkpoint; None if it has none."""
    config: Any = stored.config
    if getattr(config, "gate_languages", None) is None:
        return None
    places = [ffn.place for ffn in decoder_ffns(stored.network)]
    rows = {
        layer: tuple(stored.tensor(f"{places[layer]}.classifier.{kind}") for kind in ("weight", "bias"))
        for layer in config.classifier_layers
    }
    return Gates(config.gate_languages, rows, PrefixRule.of(config))  # type: ignore[arg-type]


def without_classes(gates: Gates, gone: Collection[int]) -> Gates:
    """The gates without the rows of some classes; the later classes move up."""
    classes = [number for number, codes in enumerate(gates.languages) for _ in codes]
    rows = torch.tensor([row for row, number in enumerate(classes) if number not in gone])
    languages = [codes for number, codes in enumerate(gates.languages) if number not in gone]
    return Gates(languages, {layer: (w[rows], b[rows]) for layer, (w, b) in gates.rows.items()}, gates.rule)
