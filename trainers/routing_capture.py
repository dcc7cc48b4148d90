"""Captures the routing for the losses, that of the trained model on tokens of text, and the metrics of it that trainers
log. Each is a ratio of two sums, which add up over micro-batches, steps and ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..modeling import LayerRouting
from .losses import LossBatch, where_counted


class FirstPass(dict):
    """The routing of the loss's forward pass. A later pass without gradients does not replace it, such as that of DPO's
    reference model if it is the same model without its adapter."""

    def __setitem__(self, layer: int, routing: Any) -> None:
        if torch.is_grad_enabled() or layer not in self:
            super().__setitem__(layer, routing)


def without_virtual_tokens(layer: LayerRouting, input_ids: torch.Tensor) -> LayerRouting:
    """Removes the virtual tokens that prompt tuning puts before each sequence: router losses do not count them."""
    batch, length = input_ids.shape
    if layer.router_logits.shape[0] == batch * length:
        return layer

    def text_only(name: str) -> Any:
        of_tokens = getattr(layer, name)
        return None if of_tokens is None else of_tokens.unflatten(0, (batch, -1))[:, -length:].flatten(0, 1)

    names = ("router_logits", "classifier_logits", "allowed")
    return replace(layer, **{name: text_only(name) for name in names})


class Metrics:
    """The metrics' sums in training and in evaluation, each kept until it is logged."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, torch.Tensor]] = {"train": {}, "eval": {}, "eval_loss": {}}

    def record(self, mode: str, name: str, numerator: torch.Tensor, denominator: torch.Tensor) -> None:
        """Adds to a metric of `mode`: "train", "eval", or "eval_loss", the parts of that loss. Every rank must record
        the same names in the same order."""
        pair = torch.stack([numerator.detach().double(), denominator.detach().double()])
        sums = self._sums[mode]
        sums[name] = sums[name] + pair if name in sums else pair

    def forget(self, mode: str) -> None:
        """Drops the sums of `mode`."""
        self._sums[mode] = {}

    def ratios(self, mode: str, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[str, float]]:
        """Name and value of each metric since the last call, without metrics whose denominator is 0."""
        sums, self._sums[mode] = self._sums[mode], {}
        if not sums:
            return
        table = sum_over_ranks(torch.stack(list(sums.values()))).tolist()
        for name, (numerator, denominator) in zip(sums, table, strict=True):
            if denominator:
                yield name, numerator / denominator


def record_routing(batch: LossBatch, expert_0_is_old: bool) -> None:
    """Records the share of the selections that each expert gets (where tokens do not take all), expert 0's mean score
    for old and for new tokens, and the mean openness of the gates.

    Args:
        expert_0_is_old: whether expert 0 belongs to the old languages; with the group loss it belongs to one group.
    """
    record, tokens, local = batch.record, batch.tokens, batch.local
    for layer, selections_N in zip(batch.routing, batch.selections, strict=True):
        for expert, count in enumerate(selections_N if batch.has_choice else (), start=int(layer.shared)):
            record(f"expert_{expert}_share", count, selections_N.sum())
        score_T = layer.scored_logits.detach().softmax(-1)[:, 0]
        if layer.shared:
            record("gate", where_counted(tokens.counted_T, 1 - score_T).sum(), local.counted)
        if expert_0_is_old:
            record("expert_0_score_old", where_counted(tokens.old_T, score_T).sum(), local.old)
            record("expert_0_score_new", where_counted(tokens.new_T, score_T).sum(), local.tagged - local.old)
