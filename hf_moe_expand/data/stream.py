"""Blocks from text that is read, shuffled, tokenised and packed while a model trains.

Each language's shards come in a seeded order, pass after pass, read in shuffled windows. Units, which are shards,
or every n-th row of a large one, are dealt in turn to the readers: the workers of all ranks. A reader that starts from
another's place (unit, window, document, token) gives the blocks that follow.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import fsspec
import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..core.errors import InputError
from .packing import collate_blocks
from .sources import LanguageText
from .stream_reader import OnBadShard, Reader, random_numbers
from .tokens import begin_tokens

_EVEN = 64  # draws among which each language has its share, to one draw


def as_they_are(batch: Any) -> Any:
    """A loader's `collate_fn`, whose own would make tensors of arrays."""
    return batch


class TextStream(IterableDataset):  # type: ignore[type-arg]
    """Batches of blocks of `block_size` tokens, each of one language: those of one rank, without end.

    Each batch carries the place of its reader, which `received` keeps; `state` has those of all readers of this rank.

    Args:
        texts: text of each language.
        languages: the order of the language ids; that of `texts` by default.
        on_bad_shard: what happens at a shard that is broken, empty or of another schema: `stop`, or `skip` the rest of
            it.

    Raises:
        InputError: a text is missing, or its place does not answer.
    """

    column_names = ("input_ids", "language_ids")

    def __init__(
        self, texts: Mapping[str, LanguageText], tokenizer: Any, block_size: int, seed: int,
        languages: Sequence[str] | None = None, on_bad_shard: OnBadShard = "stop",
    ) -> None:  # fmt: skip
        self.tokenizer, self.block_size, self.seed = tokenizer, block_size, seed
        self.languages, self.on_bad_shard = list(languages or texts), on_bad_shard
        self.shards = {code: text.shards() for code, text in texts.items()}

    def begin(
        self,
        mix: Any,
        rows: int,
        accumulation: int = 1,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 0,
        collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]] = collate_blocks,
        saved: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Sets what the batches hold, and from where they go on.

        Args:
            mix: the weight and the schedule of each language, in the order of the texts: a `LanguageMix`.
            rows: blocks of a batch.
            accumulation: batches of a rank in an optimizer step.
            workers: processes of this rank that read; 0 for this one.
            saved: the `state` of each rank from which to go on.

        Raises:
            InputError: the state is one of other text, or of another number of ranks or workers.
        """
        self.mix, self.rows, self.accumulation, self.collate = mix, rows, accumulation, collate
        self.rank, self.workers = rank, max(workers, 1)
        self.readers, own = ranks * self.workers, range(rank * self.workers, (rank + 1) * self.workers)
        self.taken = 0  # batches of this rank
        self.places = [{code: {"open": [], "next": one, "counts": {}} for code in self.shards} for one in own]
        if not saved:
            return
        before = saved[0]
        if before["shards"] != self._sizes():
            raise InputError("The text has other shards than before the interruption: undo the change, or start anew.")
        readers = before["ranks"] * before["workers"]
        if (before["workers"], readers, before.get("dealt_to", readers)) != (self.workers, self.readers, self.readers):
            raise InputError(
                f"The text was read by {before['ranks']} ranks with {before['workers']} workers each before the "
                f"interruption, and is by {ranks} with {self.workers} now: resume with as many, or start anew."
            )
        self.taken, self.places = before["taken"], list(saved[rank]["places"])

    def _sizes(self) -> dict[str, int]:
        return {code: len(shards) for code, shards in self.shards.items()}

    def state(self) -> dict[str, Any]:
        """The places of this rank's readers after the batches that were received; JSON."""
        ranks = self.readers // self.workers
        counts = {"ranks": ranks, "workers": self.workers, "taken": self.taken, "shards": self._sizes()}
        return {**counts, "places": self.places}

    def received(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The batches as a model takes them; keeps the places that they carry. Collated here: a tensor takes a worker
        a millisecond more to hand over than an array.

        Raises:
            InputError: a reader met an error.
        """
        for batch in batches:
            if "error" in batch:
                raise InputError(batch["error"])
            worker, self.places[worker] = batch["place"]
            self.taken += 1
            shape = batch["input_ids"].shape
            columns = {name: np.broadcast_to(batch[name], shape) for name in self.column_names}
            yield self.collate([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = 0
        if info := get_worker_info():
            worker = info.id
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            fsspec.asyn.reset_lock()  # it may be held in the process from which this one was forked
        own = (worker + self.taken) % self.workers  # a loader's first batch is its first worker's
        number = self.rank * self.workers + own
        readers = [
            Reader(
                code, self.languages.index(code), shards, self.tokenizer, self.seed, self.on_bad_shard,
                self.places[own][code], self.readers, says=number == 0,
            )
            for code, shards in self.shards.items()
        ]  # fmt: skip
        before = begin_tokens(self.tokenizer)[: self.block_size]
        try:
            for batch in count(self.taken + worker, self.workers):
                taken = [readers[language] for language in self._languages(batch)]
                ids = np.stack([reader.take(self.block_size) for reader in taken])
                ids[:, : len(before)] = before
                languages = np.array([[reader.number] for reader in taken], dtype=ids.dtype)
                places = {reader.language: reader.state() for reader in readers}
                yield {"input_ids": ids, "language_ids": languages, "place": (own, places)}
        except InputError as error:  # a worker's would come with its traceback
            yield {"error": str(error)}

    def _languages(self, batch: int) -> list[int]:
        """The language of each block of a batch of this rank."""
        mix, step = self.mix, batch // self.accumulation
        amounts = np.array(mix.rows, dtype=float)
        entered = np.array(mix.entry or [0] * len(amounts)) <= step
        weights = np.where(entered, (amounts / amounts[entered].max()) ** (1 / mix.temperature), 0.0)
        if mix.groups is not None:
            groups = np.array(mix.groups)
            weights[groups != _chosen(np.bincount(groups, weights), self._even(3, batch))] = 0
        return [_chosen(weights, self._even(4, batch * self.rows + row)) for row in range(self.rows)]

    def _even(self, purpose: int, number: int) -> float:
        """A random number from 0 to 1; `_EVEN` of them that follow one another are spread evenly."""
        deck, place = divmod(number, _EVEN)
        numbers = random_numbers(self.seed, purpose, self.rank, deck)
        return (numbers.permutation(_EVEN)[place] + numbers.random()) / _EVEN


def _chosen(weights: np.ndarray, number: float) -> int:
    ends = np.cumsum(weights)
    return int(np.searchsorted(ends, number * ends[-1], side="right"))
