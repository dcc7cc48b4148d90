"""Averages checkpoints, or a model's new experts with the FFNs that they copied; adds a fine-tune's delta to a dense
model. Streamed."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.errors import InputError
from ..core.schema import checked
from ..modeling import ExpandedConfig, LayerMoEConfig
from ..modeling.backbone import DECODER_LAYERS
from ..modeling.part_joined import joins_packs
from .graft import COMPUTATION, GraftReport, add_delta, check_grew_from, dense_names
from .kinds import kinds_of
from .loaded import check_place, finished, opened
from .records import History, StageRecord, add_stage
from .settings import AverageSettings
from .stored import StoredModel, computed
from .writer import DEFAULT_SHARD_SIZE, OutputTensor

# Fields that must agree between averaged models, besides all shapes.
_SAME = (
    "model_type", "backbone_model_type", "num_hidden_layers", *DECODER_LAYERS, *COMPUTATION, "tie_word_embeddings",
    "num_experts_per_layer", "classifier_layers", "language_gate", "exclusive_experts", "router_top_k",
    "language_groups", "new_layers",
)  # fmt: skip
_FACTORS = "the mean of their updates' factors is not the mean of the updates"
# Why checkpoints, or the experts of one, have no mean.
REFUSED = {
    ("lora", "average"): _FACTORS,
    ("adapters", "average"): _FACTORS,
    ("dmoe", "average-with-the-base"): "all experts of a DMoE train: give a second checkpoint to average it with",
    ("random", "average-with-the-base"): "not as copies of an FFN, with which they could be averaged",
}
# The last matrices of LoRA experts and of added ones, which start at zero: expert 0 is as if theirs were zero.
_UPDATES = ("lora_B.weight", "down_proj.weight")


@checked
def average_checkpoints(
    models: Sequence[str | os.PathLike | PreTrainedModel],
    out: str | os.PathLike | None = None,
    weights: Sequence[float] | None = None,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Any:
    """The weighted mean of checkpoints of one shape, dense (Dense-FT-Avg) or expanded: a folder of them, which is
    written, or a loaded model of loaded ones.

    Dense models of the expanded models' base count too (MoE-CPT-Avg), as if every expert were the dense FFN. Tensors
    that a dense model lacks, such as routers, are the mean of the expanded models' tensors.

    The mean is computed in float32 and rounded once. Configuration, history and tokenizer are the first model's.

    Args:
        models: two or more checkpoints, or loaded models; if any is expanded, the first must be.
        out: folder to write; None of loaded models.
        weights: one weight for each model, from 0 to 1 and with the sum 1; equal by default.

    Returns:
        The folder, or the loaded model, a new one.

    Raises:
        InputError: the models do not fit one another, or the weights are wrong.
    """
    if len(models) < 2:
        raise InputError("An average needs two or more checkpoints.")
    weights = [1 / len(models)] * len(models) if weights is None else list(weights)
    if len(weights) != len(models) or not abs(sum(weights) - 1) <= 1e-6 or min(weights) < 0:
        count, given = len(models), [round(one, 6) for one in weights]
        raise InputError(f"weights is {given}: {count} checkpoints need {count} weights with the sum 1, none below 0.")
    if len({isinstance(model, PreTrainedModel) for model in models}) > 1:
        raise InputError("models holds loaded models and names of checkpoints: give one kind of them.")
    stored = [opened(model) for model in models]
    check_place(models[0], out, overwrite, *(model.folder for model in stored))
    for model in stored:
        kinds = {"lora": ("LoRA experts", "--expert"), "adapter": ("adapters", "--language")}
        for kind, (what, option) in kinds.items() if isinstance(model.config, ExpandedConfig) else ():
            if model.config.expert_kind == kind:
                raise InputError(
                    f"{model.folder}: has {what}, and {_FACTORS}. Average the dense models that `export {option}` "
                    "writes."
                )
        is_mixed = len({isinstance(one.config, ExpandedConfig) for one in stored}) > 1
        if is_mixed and isinstance(model.config, ExpandedConfig) and model.config.expert_kind == "added":
            raise InputError(
                f"{model.folder}: has added experts, which the dense checkpoint lacks: average the model alone, with "
                "the weight of its new experts."
            )
    first = stored[0]
    tensors = _mean_of_expanded_and_dense(stored, weights)
    settings = {"models": [model.name for model in stored], "weights": weights}
    add_stage(first.config, StageRecord(stage="average", settings=settings))
    return finished(first, tensors, out, "average", max_shard_size, overwrite)


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


@checked
def average_experts(
    model: str | os.PathLike | PreTrainedModel,
    out: str | os.PathLike | None = None,
    weight: float = AverageSettings().weight,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Any:
    """A model whose new experts are `weight * expert + (1 - weight) * FFN`, the FFN from which each was copied.

    The new experts are those of the last expansion, or of all packs of a joined model. The update of a LoRA expert and
    the output of an added one are multiplied by `weight`. All other tensors stay byte for byte.

    Args:
        model: a LayerMoE checkpoint, or a loaded one.
        out: folder to write; None of a loaded model.
        weight: from 0 (the experts as they began) to 1 (as they are).

    Returns:
        The folder, or the loaded model, a new one that shares all other tensors.

    Raises:
        InputError: the model is no LayerMoE checkpoint, its new experts are no copies, or `weight` is out of range.
    """
    if not 0 <= weight <= 1:
        raise InputError(f"weight is {weight}: must be from 0 to 1.")
    stored = opened(model)
    check_place(model, out, overwrite, stored.folder)
    origins = _origins(stored)
    tensors = []
    for key in stored.tensors:
        place = stored.places[key]
        origin = origins.get((place.layer, place.expert))
        if origin is None:
            tensors += stored.copies(key)
        elif place.dense is not None:
            beginning = key.removesuffix(place.inner) + f"experts.{origin}." + place.inner.split(".", 2)[2]
            mean = partial(torch.lerp, weight=weight)
            tensors.append(computed(stored[key], [stored[beginning], stored[key]], mean))
        elif place.inner.endswith(_UPDATES):
            tensors.append(computed(stored[key], [stored[key]], lambda update: weight * update))
        else:
            tensors.append(stored.copied(key))
    add_stage(stored.config, StageRecord(stage="average-experts", settings={"weight": weight}))
    return finished(stored, tensors, out, "average", max_shard_size, overwrite)


def _origins(stored: StoredModel) -> dict[tuple[int, int | None], int]:
    """The expert that each new expert copied, by layer and expert."""
    config = stored.config
    if not isinstance(config, LayerMoEConfig):
        is_dmoe = isinstance(config, ExpandedConfig)
        dense = "is a dense model: give a second checkpoint to average it with"
        raise InputError(f"{stored.folder}: {REFUSED['dmoe', 'average-with-the-base'] if is_dmoe else dense}.")
    history, joined = History.of(config), joins_packs(config)
    records = history.expansions if joined else [history.last]
    if made := next((one.expert_init for one in records if one.expert_init in ("random", "branches")), None):
        raise InputError(
            f"{stored.folder}: its new experts began as {made}, {REFUSED['random', 'average-with-the-base']}."
        )
    copied = {int(layer): expert for one in records for layer, expert in (one.copied_experts or {}).items() if expert}
    if copied and (joined or any(not kind.has_ffn for kind in kinds_of(config))):
        raise InputError(
            f"{stored.folder}: a further expansion copied other experts than expert 0 (copy_from), and of "
            f"{'packs' if joined else 'updates and added experts'} these cannot be told apart any more."
        )
    return {
        (layer, expert): copied.get(layer, 0)
        for layer, ffn in stored.network.expanded_ffns().items()
        for expert in range(1 if joined else ffn.experts_after_expansion[-2], len(ffn.experts))
    }


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
