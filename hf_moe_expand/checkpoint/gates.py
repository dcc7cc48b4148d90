"""Writes fitted gates into a checkpoint, in place of its classifiers; streamed, all other tensors byte for byte."""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..modeling import LayerMoEConfig, decoder_ffns
from ..modeling.prefix_gate import PrefixRule
from ..records import History, StageRecord
from .folder import write_checkpoint
from .reader import TORCH_DTYPES
from .source import COMPANIONS, load_expanded_config, resolve_checkpoint
from .stored import StoredModel
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, tensor_bytes


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


def check_gated(model: str | os.PathLike) -> Any:
    """The configuration of a checkpoint that takes gates.

    Raises:
        InputError: it is a DMoE's or an encoder-decoder's.
    """
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
    """Writes the checkpoint with these gates.

    Args:
        model: expanded checkpoint.
        record: the step, for the history.

    Raises:
        InputError: `out` cannot be written.
    """
    stored = StoredModel(model)
    check_output(out, overwrite, stored.folder)
    config: Any = stored.config
    places = [ffn.place for ffn in decoder_ffns(stored.network)]
    outputs = [stored.copied(key) for key in stored.tensors if ".classifier." not in key]
    for layer, rows in gates.rows.items():
        dtype = stored.reader.tensors[stored.home(f"{places[layer]}.router.weight")].dtype
        for kind, values in zip(("weight", "bias"), rows, strict=True):
            tensor = values.to(TORCH_DTYPES[dtype])
            name = f"{places[layer]}.classifier.{kind}"
            outputs.append(OutputTensor(name, dtype, tuple(tensor.shape), lambda t=tensor: [tensor_bytes(t)]))  # type: ignore[misc]
    set_gates(config, gates)
    history = History.of(config)
    parameters = sum(tensor.nbytes // max(TORCH_DTYPES[tensor.dtype].itemsize, 1) for tensor in outputs)
    fields = {name: getattr(config, name) for name in ("classifier_layers", "prefix_gate", "gate_languages")}
    last = replace(history.last, parameters=parameters, **fields)
    History([*history.expansions[:-1], last]).with_stage(record).write(config)
    return write_checkpoint(
        out, config, outputs, [(stored.folder, COMPANIONS)], "gates", max_shard_size=max_shard_size, overwrite=overwrite
    )


def set_gates(config: Any, gates: Gates) -> None:
    """Writes into a configuration which layers have gates, how they judge, and the languages of their rows."""
    config.classifier_layers = sorted(gates.rows)
    config.prefix_gate = asdict(gates.rule) if gates.rule else None
    config.gate_languages = gates.languages
