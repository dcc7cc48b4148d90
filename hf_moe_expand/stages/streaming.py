"""Stages on streamed text: whether a stage streams, and a Trainer's part that reads a stream and saves its places."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, send_to_device
from torch.utils.data import DataLoader
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint

from ..core.errors import InputError
from ..core.jsonfile import read_json, write_json
from ..data.lost import check_lost
from ..data.packing import PackedText, amounts_of
from ..data.places import is_elsewhere
from ..data.sources import LanguageText
from ..data.stream import TextStream, as_they_are
from ..data.stream_reader import estimated, passed_line, summed
from ..trainers.samplers import LanguageMix

# Bytes of text, as the files have them, from which a stage streams: to pack so much takes 20 s (docs/distributed.md).
STREAMED = 32 << 20
WORKERS = 2  # that tokenise beside the steps, of each rank
PREFETCHED = 8  # batches of each: a worker tokenises 64 documents at once
# Settings by which a review takes documents, whose tokens are not counted before.
BY_DOCUMENTS = ("old_documents", "new_per_old", "fewer_documents")


def is_streamed(config: Any, texts: Mapping[str, Any], model_config: Any) -> bool:
    """Whether a stage reads its text while it trains: as `stream` says, or refuses, else by the size of the text."""
    if config.stream is False:
        return False
    why = _hindrance(config, texts, model_config)
    if config.stream and why:
        raise InputError(f"stream: {why}.")
    return not why and bool(texts) and (bool(config.stream) or _is_large(config, texts))


def _hindrance(config: Any, texts: Mapping[str, Any], model_config: Any) -> str | None:
    if model_config.is_encoder_decoder:
        return "is for decoders, but the model is an encoder-decoder: leave it out"
    if named := next((name for name in BY_DOCUMENTS if getattr(config, name, None)), None):
        return f"counts tokens, but {named} counts documents: leave one of them out"
    if any(text is not None and not isinstance(text, LanguageText) for text in texts.values()):
        return "reads files, folders and the hub, but the text is a data set in memory: leave it out"
    return None


def _is_large(config: Any, texts: Mapping[str, LanguageText | None]) -> bool:
    """Whether packing the text first would let the devices wait, or it lies elsewhere and how much is asked of it is
    known."""
    here = [text for text in texts.values() if text is not None]
    if any(text.source.startswith("hub:") or is_elsewhere(text.source) for text in here):
        return bool(config.tokens or getattr(config, "tokens_per_language", None) or config.max_steps > 0)
    return sum(path.stat().st_size for text in here for path in text.files()) > STREAMED


def streamed(
    config: Any, texts: Mapping[str, LanguageText], tokenizer: Any, model_config: Any, allow_lost_text: bool
) -> PackedText:
    """The stage's text as a stream, with about the tokens to take of each language."""
    old, new = config.known_languages(model_config, texts)
    languages = [*old, *new]
    texts = {code: texts[code] for code in languages if code in texts}
    stream = TextStream(texts, tokenizer, config.block_size, config.seed, languages, config.on_bad_shard)
    at_hand: dict[str, int | None] = {}
    lost = {}
    for code, text in texts.items():
        at_hand[code], lost[code] = estimated(text, stream.shards[code], tokenizer, config.on_bad_shard)
    check_lost(lost, allow_lost_text)
    if config.process_index == 0:
        sizes = {code: "of unknown size" if n is None else f"about {n:,} tokens" for code, n in at_hand.items()}
        said = [f"{code} {size} in {len(stream.shards[code]):,} shards" for code, size in sizes.items()]
        print(f"text is read while the model trains: {', '.join(said)}")
    known = [count for count in at_hand.values() if count is not None]
    is_said = config.tokens or config.max_steps > 0 or getattr(config, "tokens_per_language", None)
    if unknown := [texts[code].source for code, count in at_hand.items() if count is None and not is_said]:
        raise InputError(f"{unknown[0]}: its size is not known: set `tokens`, `tokens_per_language` or `max_steps`.")
    usual = sum(known) // len(known) if known else config.block_size  # of a text of unknown size
    amounts = {code: usual if count is None else count or 1 for code, count in at_hand.items()}
    tokens = amounts_of(amounts, **config.amounts(texts, model_config))
    blocks = tuple(max(count // config.block_size, 1) for count in tokens.values())
    return PackedText(stream, tuple(languages), tokens, {}, blocks, lost)


class StreamMixin:
    """Put in front of a Trainer that has `packed`, `mix`, and a `StageConfig` as its arguments."""

    args: Any
    packed: PackedText | None
    mix: LanguageMix | None
    _saved: list[dict[str, Any]] = []  # noqa: RUF012 (replaced, not changed)

    @property
    def stream(self: Any) -> TextStream | None:
        data = self.packed and self.packed.dataset
        return data if isinstance(data, TextStream) else None

    def _begin_steps(self: Any, config: Any) -> None:
        """Before the library's constructor, which asks a stream for its steps, and sets up its workers."""
        streams = self.stream is not None
        if config.dataloader_num_workers is None:
            vars(config)["dataloader_num_workers"] = WORKERS if streams else 0
        self._counts_steps = config.max_steps <= 0 if streams else bool(config.tokens)
        if streams:  # which goes on from its places
            vars(config).update(ignore_data_skip=True, max_steps=max(config.max_steps, 1))

    @property
    def row_tokens(self: Any) -> int | None:
        """The tokens of a row: of rows that were packed before, as many as they have, None where they come one by
        one."""
        rows: Any = None if self.stream is not None else self.train_dataset
        if rows is not None and not hasattr(rows, "__len__"):
            return None
        if rows is not None and len(rows) and "input_ids" in rows[0]:
            return len(rows[0]["input_ids"])
        return getattr(self.args, "block_size", None)

    def _set_steps(self: Any) -> None:
        """The steps of a budget in tokens, or of passes over a stream; a stream that goes on has its own."""
        config = self.args
        if not self._counts_steps or self._saved:
            return
        wanted = config.tokens or config.num_train_epochs * sum(self.packed.tokens.values())
        of_step = self.get_total_train_batch_size(config) * self.row_tokens
        vars(config)["max_steps"] = max(math.ceil(wanted / of_step) if config.tokens else int(wanted / of_step), 1)

    def get_train_dataloader(self: Any) -> Any:
        self._set_steps()  # again for the smaller batch that `auto_find_batch_size` tries
        if self.stream is None:
            return super().get_train_dataloader()  # type: ignore[misc]
        # Accelerate would let the first rank read for all, or every rank read everything.
        config, model_ranks = self.args, self.get_tp_size()
        self.stream.begin(
            self.mix, self._train_batch_size, config.gradient_accumulation_steps,
            config.process_index // model_ranks, config.world_size // model_ranks, config.dataloader_num_workers,
            self.data_collator, self._saved,
        )  # fmt: skip
        ahead = PREFETCHED if config.dataloader_num_workers else None
        return DataLoader(
            self.stream, batch_size=None, num_workers=config.dataloader_num_workers,
            prefetch_factor=config.dataloader_prefetch_factor or ahead,
            collate_fn=as_they_are,
            multiprocessing_context=config.dataloader_multiprocessing_context,
            generator=torch.Generator(),  # the global one's numbers are the training's
        )  # fmt: skip

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        stream = self.stream
        if stream is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        before = stream.state()
        moved = (send_to_device(batch, device) for batch in stream.received(epoch_iterator))
        try:
            return super().get_batch_samples(moved, num_batches, device)  # type: ignore[misc]
        except InputError:
            resumed_at = self._saved[0]["step"] if self._saved else 0
            saves = self.args.save_strategy != SaveStrategy.NO and self.state.global_step > resumed_at
            if saves and self.args.world_size == 1:  # other ranks would wait for this one
                stream.places, stream.taken = before["places"], before["taken"]
                self._save_checkpoint(self.model, trial=None)
            raise

    def _save_rng_state(self: Any, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self.stream is None:
            return
        if self.args.process_index % self.get_tp_size() == 0:
            rows = self.get_total_train_batch_size(self.args)
            state = {"step": self.state.global_step, "rows": rows, **self.stream.state()}
            write_json(Path(output_dir) / f"stream-{self.stream.rank}.json", state)
        # All ranks have written theirs before the first one completes the checkpoint.
        self._passed(says=self.state.global_step < self.state.max_steps)

    def _passed(self: Any, says: bool = True) -> dict[str, dict[str, dict[str, int]]]:
        """What passed of each language on all ranks; all of them call it."""
        stream = self.stream
        places = gather_object(list(stream.places if self.args.process_index % self.get_tp_size() == 0 else []))
        passed = {code: summed(place[code]["counts"] for place in places) for code in stream.shards}
        if says and self.is_world_process_zero():
            print("\n".join(passed_line(code, counts) for code, counts in passed.items()))
        return passed

    def _go_on_from(self: Any, checkpoint: Any) -> None:
        """Takes the places of an interrupted training, before it goes on."""
        self._saved = []
        if self.stream is None or not checkpoint:
            return
        folder = Path(get_last_checkpoint(self.args.output_dir) if checkpoint is True else checkpoint)
        paths = sorted(folder.glob("stream-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
        self._saved = states = [read_json(path, "the places of a stream") for path in paths]
        if not states or len(states) != states[0]["ranks"]:
            raise InputError(f"{folder}: has the places of {len(states)} ranks in its text, not of all: start anew.")
        if self._counts_steps and (rows := self.get_total_train_batch_size(self.args)) != states[0]["rows"]:
            raise InputError(f"{folder}: its steps are of {states[0]['rows']} blocks, not of {rows}: give as many.")
