"""Routing metrics that trainers log. Each is a ratio of two sums, which add up over micro-batches, steps and ranks."""

from collections.abc import Callable, Iterator, Sequence

import torch

from ..modeling import LayerRouting
from .losses import TokenCounts, TokenMasks


class Metrics:
    """The metrics' sums in training and in evaluation, each kept until it is logged."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, torch.Tensor]] = {"train": {}, "eval": {}}

    def record(self, mode: str, name: str, numerator: torch.Tensor, denominator: torch.Tensor) -> None:
        """Adds to a metric of `mode`, "train" or "eval". Every rank must record the same names in the same order."""
        pair = torch.stack([numerator.detach().double(), denominator.detach().double()])
        sums = self._sums[mode]
        sums[name] = sums[name] + pair if name in sums else pair

    def ratios(self, mode: str, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[str, float]]:
        """Name and value of each metric since the last call, without metrics whose denominator is 0."""
        sums, self._sums[mode] = self._sums[mode], {}
        if not sums:
            return
        table = sum_over_ranks(torch.stack(list(sums.values()))).tolist()
        for name, (numerator, denominator) in zip(sums, table, strict=True):
            if denominator:
                yield name, round(numerator / denominator, 6)


def record_routing(
    record: Callable[[str, torch.Tensor, torch.Tensor], None],
    routing: Sequence[LayerRouting],
    selections: Sequence[torch.Tensor],
    tokens: TokenMasks,
    local: TokenCounts,
    expert_0_is_old: bool,
) -> None:
    """Records the share of the selections that each expert gets, expert 0's mean score for old and for new tokens, and
    the mean openness of the gates.

    Args:
        selections: for each layer `[N]`, number of this rank's counted tokens that select each of its routed experts.
        local: counts of this rank's micro-batch.
        expert_0_is_old: whether expert 0 belongs to the old languages; with the group loss it belongs to one group.
    """
    for layer, selections_N in zip(routing, selections, strict=True):
        for expert, count in enumerate(selections_N, start=int(layer.conditional)):
            record(f"expert_{expert}_share", count, selections_N.sum())
        score_T = layer.router_logits.detach().softmax(-1)[:, 0]
        if layer.conditional:
            record("gate", (1 - score_T)[tokens.counted_T].sum(), local.counted)
        if expert_0_is_old:
            record("expert_0_score_old", score_T[tokens.old_T].sum(), local.old)
            record("expert_0_score_new", score_T[tokens.new_T].sum(), local.tagged - local.old)
