"""Averages checkpoints, or a model's new experts with the FFNs that they copied; streamed."""

import copy
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.errors import InputError
from ..core.schema import checked
from ..modeling import ExpandedConfig, LayerMoEConfig
from ..modeling.part_joined import joins_packs
from .facts import Facts, kind_of
from .graft import dense_names
from .operation_settings import AverageSettings
from .records import History, StageRecord
from .stored import BASE_FIELDS, Place, Source, check_alike
from .table import Copy, Mix, Rule, opened, rewrite
from .writer import DEFAULT_SHARD_SIZE

# Fields that must agree between averaged models, besides all shapes.
_SAME = (
    *BASE_FIELDS, "num_experts_per_layer", "classifier_layers", "language_gate", "exclusive_experts", "router_top_k",
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
_UPDATES = ("lora_B.weight", "lora_B.bias", "down_proj.weight")


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
    stored = opened(models, out, overwrite)
    expanded = [model for model in stored if isinstance(model.config, ExpandedConfig)]
    for model in expanded:
        kind = kind_of(model.config)
        if kind.has_updates:
            what, option = ("adapters", "--language") if kind.name == "adapter" else ("LoRA experts", "--expert")
            raise InputError(
                f"{model.folder}: has {what}, and {_FACTORS}. Average the dense models that `export {option}` writes."
            )
        if kind.name == "added" and len(expanded) < len(stored):
            raise InputError(
                f"{model.folder}: has added experts, which the dense checkpoint lacks: average the model alone, with "
                "the weight of its new experts."
            )
    record = StageRecord(stage="average", settings={"models": [model.name for model in stored], "weights": weights})
    return rewrite(
        stored, copy.deepcopy(stored[0].config), _mean(stored, expanded, weights), out, record=record, title="average",
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip


def _mean(models: Sequence[Source], expanded: Sequence[Source], weights: Sequence[float]) -> Rule:
    """Of what the tensors of the mean are made, under the first model's names."""
    first = models[0]
    dense = [model for model in models if model not in expanded]
    if expanded and first in dense:
        raise InputError(f"{first.folder}: is a dense checkpoint; give an expanded one first, as the mean is expanded.")
    for model in (expanded or dense)[1:]:
        check_alike(first, model, _SAME)
    if not expanded or not dense:
        return lambda place: Mix([Copy(place.key, number) for number in range(len(models))], weights)
    homes = dense_names(first)
    for model in dense:
        check_alike(first, model, keys=homes)
    share = sum(weight for weight, model in zip(weights, models, strict=True) if model in expanded)
    if not share:
        raise InputError(
            "The weights of the expanded checkpoints are 0, but only these have routers: give one a weight above 0."
        )

    def rule(place: Place) -> Mix:
        home = homes.get(place.key)
        of = [number for number, model in enumerate(models) if home is not None or model in expanded]
        names = [Copy(str(home) if models[number] in dense else place.key, number) for number in of]
        return Mix(names, [weights[number] / (share if home is None else 1) for number in of])

    return rule


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
    (stored,) = opened([model], out, overwrite)
    origins = _origins(stored)

    def rule(place: Place) -> Copy | Mix:
        origin = origins.get((place.layer, place.expert))
        if origin is not None and place.dense is not None:
            begun = place.of_expert(origin) if origin else stored.base.get(place.dense, place.dense)
            return Mix([Copy(begun), Copy(place.key)], partial(torch.lerp, weight=weight))
        if origin is not None and place.inner.endswith(_UPDATES):
            return Mix([Copy(place.key)], lambda update: weight * update)
        return Copy(place.key)

    record = StageRecord(stage="average-experts", settings={"weight": weight})
    return rewrite(
        [stored], copy.deepcopy(stored.config), rule, out, record=record, title="average",
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip


def _origins(stored: Source) -> dict[tuple[int, int | None], int]:
    """The expert that each new expert copied, by layer and expert."""
    config = stored.config
    if not isinstance(config, ExpandedConfig):
        raise InputError(f"{stored.folder}: is a dense model: give a second checkpoint to average it with.")
    if not isinstance(config, LayerMoEConfig):
        raise InputError(f"{stored.folder}: {REFUSED['dmoe', 'average-with-the-base']}.")
    history, joined = History.of(config), joins_packs(config)
    records = history.expansions if joined else [history.last]
    if made := next((one.expert_init for one in records if one.expert_init in ("random", "branches")), None):
        raise InputError(
            f"{stored.folder}: its new experts began as {made}, {REFUSED['random', 'average-with-the-base']}."
        )
    copied = {int(layer): expert for one in records for layer, expert in (one.copied_experts or {}).items() if expert}
    if copied and (joined or any(kind.name != "ffn" for kind in Facts(config).kinds)):
        raise InputError(
            f"{stored.folder}: a further expansion copied other experts than expert 0 (copy_from), and of "
            f"{'packs' if joined else 'updates and added experts'} these cannot be told apart any more."
        )
    inside: dict[tuple[int, int | None], int] = {
        (layer, expert): copied.get(layer, 0)
        for layer, ffn in stored.network.expanded_ffns().items()
        for expert in range(1 if joined else ffn.experts_after_expansion[-2], len(ffn.experts))
    }
    first = 1 if joined else len(history)  # of modules outside the layers, which have the number of their class
    return inside | {(-1, number): 0 for number in range(first, len(history) + 1)}
