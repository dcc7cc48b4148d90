"""Returns a checkpoint to an earlier expansion: leaves out later experts, keeps the rest byte for byte; streamed."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..errors import InputError
from ..modeling import LayerMoEConfig, decoder_ffns, layer_names
from ..records import ExpansionRecord, History
from .folder import write_checkpoint
from .grow import KEPT_ROUTERS
from .reader import CheckpointReader
from .source import COMPANIONS, load_expanded_config, resolve_checkpoint
from .stored import check_complete
from .writer import DEFAULT_SHARD_SIZE, check_output, copy_of, in_memory, made


@dataclass(frozen=True)
class ShrinkReport:
    """Result of `shrink_checkpoint`.

    Attributes:
        routers_restored: whether routers and classifiers are restored byte for byte; else they are the first rows of
            the later ones, which later stages retrained.
        classifiers_lost: layers whose classifier could not be restored.
        names_lost: the names of these layers.
    """

    out: Path
    routers_restored: bool
    classifiers_lost: list[int]
    names_lost: list[str]


def shrink_checkpoint(
    model: str | os.PathLike,
    out: str | os.PathLike,
    to: int,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> ShrinkReport:
    """Writes the checkpoint as it was after expansion `to` (1 is the first).

    Raises:
        InputError: the checkpoint was not grown, or has no such expansion.
    """
    folder = resolve_checkpoint(model)
    check_output(out, overwrite, folder)
    config: Any = load_expanded_config(folder)
    history = list(getattr(config, "earlier_experts_per_layer", None) or [])
    if not isinstance(config, LayerMoEConfig) or not 1 <= to <= len(history):
        raise InputError(
            f"{folder}: expansion {to} was asked for, but "
            + (f"only 1..{len(history)} came before its last." if history else "it was expanded once only.")
        )
    if config.packs and to < sum(config.packs):
        raise InputError(f"{folder}: joins language packs, which have no order: take one out with --without PACK.")
    expansions = History.of(config).expansions
    _check_left_alone(expansions[to:], folder)
    prefixes = [ffn.place for ffn in decoder_ffns(check_complete(folder, config))]
    reader = CheckpointReader(folder)
    kept_file = folder / KEPT_ROUTERS.format(to)
    routers = load_file(kept_file) if kept_file.is_file() else None
    grown: Any = config.num_experts_per_layer
    config.num_experts_per_layer = history[to - 1]
    config.earlier_experts_per_layer = history[: to - 1] or None
    kept_history = History(expansions[:to])
    kept_history.write(config)
    config.classifier_layers = kept_history.last.classifier_layers
    config.prefix_gate = kept_history.last.prefix_gate
    known, config.gate_languages = config.gate_languages, kept_history.last.gate_languages
    lost = []
    outputs = {name: copy_of(reader, name) for name in reader.tensors if ".classifier." not in name}
    for layer, prefix in enumerate(prefixes):
        if grown[layer] == 1:  # never expanded; it may have experts of the backbone's own
            continue
        count = config.num_experts_per_layer[layer]
        for name in reader.tensors:
            inside = name.removeprefix(f"{prefix}.experts.")
            if inside != name and int(inside.split(".", 1)[0]) >= count:
                del outputs[name]
        of_classes = to + 1 if known is None else sum(map(len, known[: to + 1]))
        rows = {"router.weight": count, "classifier.weight": of_classes if layer in config.classifier_layers else 0}
        rows["classifier.bias"] = rows["classifier.weight"] if config.gate_languages else 0
        rows["conditional_gate.weight"] = int(config.conditional_routing and count > 1)
        for inner, number in rows.items():
            name = f"{prefix}.{inner}"
            if routers is not None and name in routers:
                outputs[name] = in_memory(name, routers[name])
            elif number and name in reader.tensors and bool(known) == bool(config.gate_languages):
                info = reader.tensors[name]
                first = partial(_first_rows, reader, name, number)
                outputs[name] = made(name, info.dtype, (number, *info.shape[1:]), first)
            elif number:
                lost.append(layer)
    if lost:
        config.classifier_layers = [layer for layer in config.classifier_layers if layer not in lost]
        config.prefix_gate = config.prefix_gate if config.classifier_layers else None
    companions = [pattern for pattern in COMPANIONS if pattern != KEPT_ROUTERS.format("*")]
    companions += [KEPT_ROUTERS.format(earlier) for earlier in range(1, to)]
    write_checkpoint(out, config, outputs.values(), [(folder, companions)], "shrink", max_shard_size, overwrite)
    names = layer_names(config)
    return ShrinkReport(Path(out), routers is not None, lost, [names[layer] for layer in lost])


def _check_left_alone(later: Sequence[ExpansionRecord], folder: Path) -> None:
    """Refuses a checkpoint in which a later expansion changed tensors of the earlier model."""
    for stage in (stage for expansion in later for stage in expansion.stages):
        if stage.changes_everything:
            raise InputError(
                f"{folder}: `{stage.stage}` changed the earlier experts and shared weights: leaving out the later "
                "experts does not restore the earlier model. Shrink the checkpoint from before that stage."
            )


def _first_rows(reader: CheckpointReader, name: str, number: int) -> torch.Tensor:
    return reader.tensor(name)[:number]
