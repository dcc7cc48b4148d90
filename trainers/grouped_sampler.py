"""Batches of one language group each."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler


class GroupedSampler(Sampler[int]):
    """Row numbers in an order in which each run of `batch_size` rows belongs to one group.

    Rows are shuffled within their group and cut into full batches (remaining rows are dropped for this epoch), and the
    batches of all groups are shuffled. Every epoch has its own order, which the seed determines.

    Args:
        groups: the group of each row.
        batch_size: rows in a batch of one process.
        seed: random seed of the order.

    Raises:
        ValueError: a group has fewer rows than a batch.
    """

    def __init__(self, groups: Sequence[int], batch_size: int, seed: int) -> None:
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        self.rows = [[row for row, g in enumerate(groups) if g == group] for group in sorted(set(groups))]
        for group, rows in zip(sorted(set(groups)), self.rows, strict=True):
            if len(rows) < batch_size:
                raise ValueError(
                    f"Language group {group} has {len(rows)} blocks, less than one batch of {batch_size}: give more "
                    "text, smaller blocks or smaller batches."
                )

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader at the start of each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(len(rows) // self.batch_size for rows in self.rows) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        batches = []
        for rows in self.rows:
            order = [rows[i] for i in torch.randperm(len(rows), generator=generator)]
            full = len(order) // self.batch_size
            batches += [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(full)]
        for batch in torch.randperm(len(batches), generator=generator):
            yield from batches[batch]
