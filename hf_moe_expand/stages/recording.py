"""RecordingTrainer: a Trainer that stops when training is over or diverges, and records the training."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from ..data.lost import lost_lines
from ..data.packing import PackedText, small_shares
from ..errors import DivergedError
from ..records import StageRecord, without_folders
from ..trainers.encoder_decoder import sides
from ..trainers.pieces import PiecewiseLossMixin

# Seconds to the first word of progress, and between later ones in a log.
_FIRST, _LATER = 10, 600


class _SaysProgress(TrainerCallback):
    """Says how long the training is, and from which step an interrupted one goes on. Then says within half a minute,
    and at least every ten minutes, how far it is: steps, tokens a second of this attempt, and the time that is left.
    Where a progress bar shows the steps, it says so once."""

    def __init__(self, trainer: "RecordingTrainer", clock: Callable[[], float] = time.monotonic) -> None:
        self.trainer, self.clock = trainer, clock

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.begun, self.first, self.printed = self.clock(), state.global_step, 0.0
        self.wait: float = _FIRST
        if not state.is_world_process_zero:
            return
        trainer = self.trainer
        rows, size = trainer.get_total_train_batch_size(args), getattr(args, "block_size", None)
        pairs = trainer._is_encoder_decoder  # whose lengths differ
        self.amount: int = rows if pairs else rows * (size or 1)  # of a step
        self.unit = "sentence pairs" if pairs else "tokens" if size else "rows"
        scheduler = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        rate = f"learning rate {args.learning_rate:g} ({scheduler})"
        print(f"{trainer.trained_as}: {state.max_steps:,} steps of {self.amount:,} {self.unit}, {rate}")
        if trainer.packed is not None and getattr(trainer, "mix", None) is None:
            print("\n".join(_shares(trainer.packed.tokens)))
        if trainer.packed is not None and trainer.packed.lost:
            print("\n".join(lost_lines(trainer.packed.lost)))
        if state.global_step:
            print(f"resumes at step {state.global_step} of {state.max_steps}")

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        now = self.clock() - self.begun
        # The first step is slower than the others: one alone says little, unless nothing else comes for long.
        if not state.is_world_process_zero or now - self.printed < self.wait or state.global_step >= state.max_steps:
            return
        done = state.global_step - self.first
        speed = done * self.amount / now
        left = (state.max_steps - state.global_step) * now / done
        print(
            f"step {state.global_step:,} of {state.max_steps:,}, {speed:,.0f} {self.unit} a second, "
            f"about {_duration(left)} left",
            flush=True,
        )
        self.printed = now
        self.wait = _LATER if args.disable_tqdm or os.environ.get("TQDM_DISABLE") else float("inf")


def _shares(tokens: Mapping[str, int]) -> list[str]:
    """Each language's share of the tokens, and a warning that names those with little."""
    whole = sum(tokens.values())
    lines = ["tokens: " + ", ".join(f"{code} {count / whole:.0%}" for code, count in tokens.items())]
    if little := small_shares(tokens):
        named = ", ".join(f"{code} ({share:.1%})" for code, share in little.items())
        lines.append(f"warning: little of the text is {named}: give more text of it, or less of the others")
    return lines


def _duration(seconds: float) -> str:
    """A time in words, such as `3 h 20 min`."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


class SeenText(TrainerCallback, ExportableState):
    """The blocks and tokens that passed through training, kept in the Trainer's state, so that a resumed one counts on.

    Attributes:
        blocks: blocks seen, over all ranks.
        tokens: tokens seen, padding excluded: first those of no known language, then those of each language id. None if
            the training was resumed from a checkpoint that did not count.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.tokens: list[int] | None = [0]
        self._here: torch.Tensor | None = None  # of this rank since the last gathering: blocks, then `tokens`

    def state(self) -> dict[str, Any]:
        """What the Trainer's state keeps; call `gather` before."""
        return {"args": {}, "attributes": {"blocks": self.blocks, "tokens": self.tokens}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        saved = (state.stateful_callbacks or {}).get(type(self).__name__) if state.global_step else None
        self.blocks, self.tokens, self._here = 0, None if state.global_step else [0], None
        if saved:
            self.blocks, self.tokens = saved["attributes"]["blocks"], saved["attributes"]["tokens"]

    def add(self, inputs: Any, languages: int) -> None:
        """Counts a batch of this rank, without waiting for the device.

        Args:
            inputs: `input_ids`, and perhaps `attention_mask` and `language_ids`, all `[batch, sequence]`; an
                encoder-decoder's `labels` and `decoder_language_ids`, both `[batch, target]`.
            languages: number of language ids.
        """
        if inputs.get("input_ids") is None or self.tokens is None:
            return
        here = torch.zeros(2 + languages, dtype=torch.long, device=inputs["input_ids"].device)
        here[0] = len(inputs["input_ids"])
        for counted, ids in sides(inputs, both=inputs.get("decoder_language_ids") is not None):
            ids = torch.full_like(counted, -1, dtype=torch.long) if ids is None else ids.long()
            ids = ids.where((ids >= 0) & (ids < languages), -1)
            here[1:] += torch.stack([(counted & (ids == language)).sum() for language in range(-1, languages)])
        self._here = here if self._here is None else self._here + here

    def gather(self, trainer: Any, languages: int) -> None:
        """Adds what all ranks have counted since the last call. Every rank must call this."""
        if self.tokens is None:
            return
        here = self._here
        if here is None:
            here = torch.zeros(2 + languages, dtype=torch.long, device=trainer.args.device)
        # Ranks that share the parts of one batch all count it.
        blocks, *tokens = (trainer.accelerator.reduce(here, "sum") // trainer.get_tp_size()).tolist()
        before = self.tokens + [0] * (len(tokens) - len(self.tokens))
        self.blocks, self.tokens = self.blocks + blocks, [a + b for a, b in zip(before, tokens, strict=True)]
        self._here = None


class RecordingTrainer(PiecewiseLossMixin, Trainer):
    """`transformers.Trainer` for the stages.

    Attributes:
        packed: the packed text on which it trains, if known.
        trained_as: the training's name in the history.
        settings: the stage's settings as its history has them; None if the arguments are no stage's.
        record: the training's record for the history, after the training.
    """

    _is_encoder_decoder = False
    packed: PackedText | None = None
    trained_as = "training"
    settings: dict[str, Any] | None = None
    record: StageRecord | None = None

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        before = getattr(getattr(model, "config", None), "use_cache", None)
        super().__init__(model, *args, **kwargs)
        self._use_cache_before = before  # the library sets it to false, and a saved model would generate slowly
        self.add_callback(_SaysProgress(self))
        self.add_callback(SeenText())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """The library warns of tied weights, which a training checkpoint holds once."""
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", ())
        missing = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        if self.state.global_step >= self.state.max_steps:  # resumed from the last step's checkpoint
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, model: Any, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        self.seen.add(inputs, self._languages())
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise DivergedError(
                f"{self.trained_as}: the loss is {loss.item()} at step {self.state.global_step + 1}: the training "
                "diverged, and no checkpoint is written. Lower the learning rate, add warmup steps, or train in bf16 "
                "instead of fp16."
            )
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        norm = logs.get("grad_norm")
        if norm is not None and not norm < float("inf") and not self.args.fp16:  # fp16's scaler skips such a step
            raise DivergedError(
                f"{self.trained_as}: the norm of the gradient is {norm} at step {self.state.global_step}: the training "
                "diverged, and no checkpoint is written. Lower the learning rate, or add warmup steps."
            )
        super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, and sets `record` if the arguments are a stage's configuration."""
        try:
            result = super().train(*args, **kwargs)
        finally:
            if self._use_cache_before is not None:
                self.accelerator.unwrap_model(self.model).config.use_cache = self._use_cache_before
        self.seen.gather(self, self._languages())
        if self.settings is not None:
            documents, tokens = (self.packed.documents, self.packed.tokens) if self.packed is not None else ({}, {})
            # Validation affects neither the weights nor the history.
            settings = {name: value for name, value in self.settings.items() if name != "validation"}
            self.record = StageRecord(
                stage=self.trained_as, steps=result.global_step, documents=documents, tokens=tokens,
                seed=self.args.seed, settings=without_folders(settings), **self._seen_text(),
            )  # fmt: skip
        return result

    @property
    def seen(self) -> SeenText:
        """The text that the training has seen."""
        return next(callback for callback in self.callback_handler.callbacks if isinstance(callback, SeenText))

    def _languages(self) -> int:
        return 0 if self.packed is None else len(self.packed.languages)

    def _seen_text(self) -> dict[str, Any]:
        """The text that the training has seen, for its record; empty if it was not counted from the beginning."""
        if self.seen.tokens is None:
            return {}
        counts: dict[str, Any] = {"blocks_seen": self.seen.blocks, "tokens_seen": sum(self.seen.tokens)}
        _, *by_language = self.seen.tokens
        if self.packed is not None and any(by_language):
            named = zip(self.packed.languages, by_language, strict=True)
            counts["tokens_seen_by_language"] = {code: tokens for code, tokens in named if tokens}
        return counts

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.seen.gather(self, self._languages())
        super()._save_checkpoint(*args, **kwargs)
