"""The order of training rows: by a curriculum or a temperature, or in batches of one language group each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.utils.data import Sampler

from ..core.errors import InputError


@dataclass(frozen=True)
class LanguageMix:
    """The languages of a data set whose rows are sorted by language, in this order."""

    rows: Sequence[int]  # of each language
    # T; languages that train at the same time are drawn in proportion to `rows ** (1 / T)`.
    temperature: float = 1.0
    entry: Sequence[int] | None = None  # the optimizer step at which each language enters; the start by default
    groups: Sequence[int] | None = None  # of each language, if a batch must hold only one group


class CurriculumSampler(Sampler[int]):
    """The `steps * rows_per_step` row numbers of a whole training, as one epoch of the data loader.

    Between two entries of languages, each entered language gets its share of the rows, rounded by largest remainders,
    in random order. At T = 1, without late entries and for one pass over the data, this is an ordinary shuffled epoch.
    All rows of a language come once before any of them comes again.

    The order depends only on the arguments, not on the division of a step into batches and ranks, so that a resumed
    training, which skips its first batches, continues as if it had not been interrupted. With groups the order depends
    on `batch_size` too: each run of `batch_size` rows belongs to one group.

    Args:
        steps: optimizer steps of the training.
        rows_per_step: rows of a step over all ranks and micro-batches.
        batch_size: rows in a batch of one process.

    Raises:
        InputError: no language trains from the start, or a step does not hold whole batches.
    """

    def __init__(self, mix: LanguageMix, steps: int, rows_per_step: int, seed: int, batch_size: int = 1) -> None:
        self.rows, self.temperature = np.array(mix.rows), mix.temperature
        self.entry = np.array(mix.entry or [0] * len(mix.rows))
        self.groups = np.array(mix.groups or [0] * len(mix.rows))
        self.steps, self.rows_per_step, self.seed, self.batch_size = steps, rows_per_step, seed, batch_size
        if self.entry.min() != 0:
            raise InputError(f"No language trains from the start; the first enters at step {self.entry.min()}.")
        if rows_per_step % batch_size:
            raise InputError(f"A step of {rows_per_step} rows does not hold whole batches of {batch_size}.")

    def __len__(self) -> int:
        return self.steps * self.rows_per_step

    def __iter__(self) -> Iterator[int]:
        streams = [self._stream(language) for language in range(len(self.rows))]
        for start, end in pairwise(sorted({*self.entry.clip(max=self.steps).tolist(), self.steps})):
            for language in self._languages(start, end):
                yield next(streams[language])

    def _stream(self, language: int) -> Iterator[int]:
        """A language's rows, repeated for ever, each time in a new order."""
        first, generator = self.rows[:language].sum(), np.random.default_rng([self.seed, 0, language])
        while True:
            yield from (first + generator.permutation(self.rows[language])).tolist()

    def _languages(self, start: int, end: int) -> list[int]:
        """The language of each row from step `start` to step `end`, between which no language enters."""
        generator = np.random.default_rng([self.seed, 1, start])
        entered = self.entry <= start
        weights = np.where(entered, (self.rows / self.rows[entered].max()) ** (1 / self.temperature), 0.0)
        groups = range(self.groups.max() + 1)
        batches = apportion(
            (end - start) * self.rows_per_step // self.batch_size, [weights[self.groups == g].sum() for g in groups]
        )
        drawn = []
        for group, count in zip(groups, batches, strict=True):
            if count:
                counts = apportion(count * self.batch_size, np.where(self.groups == group, weights, 0.0))
                order = generator.permutation(np.repeat(np.arange(len(counts)), counts))
                drawn.append(order.reshape(count, self.batch_size))
        return generator.permutation(np.concatenate(drawn)).flatten().tolist()


class GroupedSampler(Sampler[int]):
    """Row numbers in an order in which each run of `batch_size` rows belongs to one group.

    Rows are shuffled within their group and cut into full batches of one process (remaining rows are dropped for this
    epoch), and the batches of all groups are shuffled. Every epoch has its own order, which the seed determines.

    Raises:
        InputError: a group has fewer rows than a batch.
    """

    def __init__(self, groups: Sequence[int], batch_size: int, seed: int) -> None:
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        names = sorted(set(groups))
        self.rows = [[row for row, g in enumerate(groups) if g == group] for group in names]
        for group, rows in zip(names, self.rows, strict=True):
            if len(rows) < batch_size:
                raise InputError(f"Language group {group} has {len(rows)} blocks, less than a batch of {batch_size}.")

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


def apportion(total: int, weights: Sequence[float] | np.ndarray) -> list[int]:
    """Divides `total` in proportion to `weights`: rounds shares down, and gives the rest to the largest remainders."""
    shares = total * np.asarray(weights, dtype=float) / np.sum(weights)
    counts = np.floor(shares).astype(int)
    largest_first = np.argsort(counts - shares, kind="stable")
    counts[largest_first[: total - counts.sum()]] += 1
    return counts.tolist()
