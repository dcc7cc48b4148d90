"""Branch-Train-Mix: dense models that were fine-tuned separately become the experts of one model; streamed."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.expand import check_dense_plan, expansion_rule, planned_config, planned_record
from ..checkpoint.records import History
from ..checkpoint.source import load_base_config
from ..checkpoint.stored import Place, check_alike
from ..checkpoint.table import Copy, Mix, opened, rewrite
from ..checkpoint.writer import DEFAULT_SHARD_SIZE
from ..core.errors import InputError
from ..modeling import decoder_ffns
from ..planning.plan import Plan


def expand_branches(
    branches: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    plan: Plan,
    *,
    seed: int = 0,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Path:
    """Writes a DMoE checkpoint whose expert `e` is branch `e`'s FFN (Branch-Train-Mix, DMoE's comparison).

    All other weights, including the FFNs of layers that stay dense, are the branches' mean, computed in float32.
    Routers are drawn as `expand_checkpoint` draws them and still have to be trained (`train joint`).

    Args:
        branches: dense checkpoints fine-tuned separately from one base, one for each of the plan's groups, in order.
    """
    if len(branches) != len(plan.groups):
        raise InputError(f"{len(branches)} branches were given, but the plan has {len(plan.groups)} groups.")
    models = opened(branches, out, overwrite, load_base_config)
    first = models[0]
    for model in models[1:]:
        check_alike(first, model)
    check_dense_plan(plan, first.config, first.folder)
    config: Any = planned_config(first.config, plan)
    counts = zip(decoder_ffns(first.network), config.num_experts_per_layer, strict=True)
    if any(ffn.is_mixture and count > 1 for ffn, count in counts):
        raise InputError(f"{first.folder}: has experts of its own in layers of the plan; branches are dense there.")
    weights, begin = [1 / len(models)] * len(models), expansion_rule(first, "copy", seed)

    def rule(place: Place) -> Any:
        if place.dense is None:
            return begin(place)
        if place.expert is None:
            return Mix([Copy(place.dense, number) for number in range(len(models))], weights)
        return Mix([Copy(place.dense, place.expert)], lambda piece: piece)

    record = planned_record(
        plan, old_languages=plan.old, base_model=first.name, expert_init="branches",
        branches=[model.name for model in models], seed=seed,
        base_parameters=sum(info.numel for info in first.reader.tensors.values()),
    )  # fmt: skip
    return rewrite(
        models, config, rule, out, record=History([record]), title="expand-branches", max_shard_size=max_shard_size,
        overwrite=overwrite,
    )  # fmt: skip
