"""Averages checkpoints, and adds a fine-tune's delta to a dense one: DeltaMoE's comparisons; streamed."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import InputError
from ..modeling import ExpandedConfig
from ..modeling.expanded_config import DECODER_LAYERS
from ..records import StageRecord, add_stage
from .graft import COMPUTATION, GraftReport, add_delta, check_grew_from, dense_names
from .source import COMPANIONS
from .stored import StoredModel, computed
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, write_checkpoint

# Fields that must agree between averaged models, besides all shapes.
_SAME = (
    "model_type", "backbone_model_type", "num_hidden_layers", *DECODER_LAYERS, *COMPUTATION, "tie_word_embeddings",
    "num_experts_per_layer", "classifier_layers", "prefix_gate", "gate_languages", "router_top_k", "language_groups",
    "new_layers",
)  # fmt: skip


def average_checkpoints(
    models: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    weights: Sequence[float] | None = None,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Path:
    """Writes the weighted mean of checkpoints of one shape, dense (Dense-FT-Avg) or expanded.

    Dense models of the expanded models' base count too (MoE-CPT-Avg), as if every expert were the dense FFN. Tensors
    that a dense model lacks, such as routers, are the mean of the expanded models' tensors.

    The mean is computed in float32 and rounded once. Configuration, history and tokenizer are the first model's.

    Args:
        models: two or more checkpoints; if any is expanded, the first must be.
        out: folder to write.
        weights: one weight for each model, from 0 to 1 and with the sum 1; equal by default.
    """
    if len(models) < 2:
        raise InputError("An average needs two or more checkpoints.")
    weights = [1 / len(models)] * len(models) if weights is None else list(weights)
    if len(weights) != len(models) or not abs(sum(weights) - 1) <= 1e-6 or min(weights) < 0:
        count = len(models)
        raise InputError(
            f"weights is {weights}: {count} checkpoints need {count} weights with the sum 1, none below 0."
        )
    stored = [StoredModel(model) for model in models]
    check_output(out, overwrite, *(model.folder for model in stored))
    for model in stored:
        if isinstance(model.config, ExpandedConfig) and model.config.has_kind("lora"):
            raise InputError(
                f"{model.folder}: has LoRA experts, and the mean of their updates' factors is not the mean of the "
                "updates. Average the dense models that `export --expert` writes."
            )
    first = stored[0]
    tensors = _mean_of_expanded_and_dense(stored, weights)
    settings = {"models": [model.name for model in stored], "weights": weights}
    add_stage(first.config, StageRecord(stage="average", settings=settings))
    return write_checkpoint(
        out, first.config, tensors, [(first.folder, COMPANIONS)], "average", max_shard_size, overwrite
    )


def _mean_of_expanded_and_dense(models: Sequence[StoredModel], weights: Sequence[float]) -> list[OutputTensor]:
    """The tensors of the mean, under the first model's names."""
    first = models[0]
    expanded = [model for model in models if isinstance(model.config, ExpandedConfig)]
    dense = [model for model in models if model not in expanded]
    if expanded and dense and first in dense:
        raise InputError(f"{first.folder}: is a dense checkpoint; give an expanded one first, as the mean is expanded.")
    check_same_shape(expanded or dense)
    if not expanded or not dense:
        return [averaged(models, key, weights) for key in first.tensors]
    homes = dense_names(first)
    for model in dense:
        check_grew_from(first, model, homes)
    of_expanded = [weight for model, weight in zip(models, weights, strict=True) if model in expanded]
    share = sum(of_expanded)
    if not share:
        raise InputError(
            "The weights of the expanded checkpoints are 0, but only these have routers: give one a weight above 0."
        )
    alone = [weight / share for weight in of_expanded]
    return [
        averaged(expanded, key, alone) if home is None
        else averaged(models, key, weights, names=[home if model in dense else key for model in models])
        for key, home in homes.items()
    ]  # fmt: skip


def averaged(
    models: Sequence[StoredModel],
    key: str,
    weights: Sequence[float],
    name: str | None = None,
    names: Sequence[str] | None = None,
) -> OutputTensor:
    """The weighted mean of a tensor over models of one shape; equal tensors stay as they are, bit for bit.

    Args:
        key: name of the tensor in the first model.
        name: name to write it under, if not the first model's.
        names: name of the tensor in each model, where the names differ.
    """
    sources = [model[own] for model, own in zip(models, names or [key] * len(models), strict=True)]
    heaviest = max(range(len(models)), key=lambda number: weights[number])

    def mean(*pieces: torch.Tensor) -> torch.Tensor:
        # The mean is taken around one of the tensors: equal values keep their value, as does a tensor of weight 1.
        middle = pieces[heaviest]
        return middle + sum(weight * (piece - middle) for weight, piece in zip(weights, pieces, strict=True))

    return computed(models[0][key], sources, mean, name)


def check_same_shape(models: Sequence[StoredModel]) -> None:
    """Refuses models that are not of one architecture and one shape."""
    first = models[0]
    for other in models[1:]:
        for name in _SAME:
            ours, theirs = getattr(first.config, name, None), getattr(other.config, name, None)
            if ours != theirs:
                raise InputError(f"{name} is {ours!r} in {first.folder}, but {theirs!r} in {other.folder}.")
        for key in dict.fromkeys([*first.shapes, *other.shapes]):
            shapes = [list(model.shapes[key]) if key in model.shapes else "none" for model in (first, other)]
            if shapes[0] != shapes[1]:
                raise InputError(
                    f"Tensor {key!r} has shape {shapes[0]} in {first.folder}, but {shapes[1]} in {other.folder}."
                )


def merge_delta(
    model: str | os.PathLike,
    out: str | os.PathLike,
    base: str | os.PathLike,
    instruct: str | os.PathLike,
    *,
    scale: float = 1.0,
    keep_tokenizer: bool = False,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> GraftReport:
    """Adds `instruct - base` to a dense checkpoint that was trained from `base` (Dense-FT-Delta), or to the old layers
    of a checkpoint that `expand_depth` made from `base` (LLaMA-Pro). See `graft_delta` for arguments and errors."""
    target = StoredModel(model)
    if isinstance(target.config, ExpandedConfig):
        raise InputError(f"{target.folder}: is an expanded checkpoint; use `graft`.")
    return add_delta(target, out, StoredModel(base), instruct, scale, keep_tokenizer, max_shard_size, overwrite)
