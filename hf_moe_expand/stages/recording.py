"""What a stage's Trainer says and counts while it trains: its progress, and the text that it has seen."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..data.lost import lost_lines
from ..trainers.log_lines import LogLines


class Progress(LogLines):
    """Says how long a stage's training is, and from which step it goes on; then shows what is logged, with the tokens a
    second of this attempt."""

    def __init__(self, trainer: Any, shows: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(shows, clock)
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        if not trainer.router_losses:
            self.not_shown = (*LogLines.not_shown, "next_token_loss")  # it is the loss
        rows, size = trainer.get_total_train_batch_size(args), trainer.row_tokens
        pairs = trainer._is_encoder_decoder  # whose lengths differ
        self.amount: int = rows if pairs else rows * (size or 1)  # of a step
        self.unit = "sentence pairs" if pairs else "tokens" if size else "rows"
        if state.is_world_process_zero:
            scheduler = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
            rate = f"learning rate {args.learning_rate:g} ({scheduler})"
            print(f"{trainer.trained_as}: {state.max_steps:,} steps of {self.amount:,} {self.unit}, {rate}")
            if trainer.packed is not None and trainer.mix is None:
                tokens = trainer.packed.tokens
                print("tokens: " + ", ".join(f"{code} {n / sum(tokens.values()):.0%}" for code, n in tokens.items()))
            if trainer.packed is not None and trainer.packed.lost:
                print("\n".join(lost_lines(trainer.packed.lost)))
            if state.global_step:
                print(f"resumes at step {state.global_step} of {state.max_steps}")
        super().on_train_begin(args, state, control, **kwargs)

    def speed(self, state: Any) -> str:
        left, done = super().speed(state), state.global_step - self.first
        speed = f"{done * self.amount / (self.clock() - self.begun):,.0f}" if left else ""
        return f", {speed} {self.unit} a second{left}" if left else ""


class SeenText(TrainerCallback, ExportableState):
    """The blocks and tokens that passed through training, over all ranks, kept in the Trainer's state."""

    def __init__(self) -> None:
        self.blocks = 0
        # Padding excluded: those of no known language, then those of each language id. None where the training was
        # resumed from a checkpoint that did not count.
        self.tokens: list[int] | None = [0]
        self._since: torch.Tensor | None = None  # since the numbers were last read

    def state(self) -> dict[str, Any]:
        self.read()
        return {"args": {}, "attributes": {"blocks": self.blocks, "tokens": self.tokens}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = (state.stateful_callbacks or {}).get(type(self).__name__) if state.global_step else None
        self.blocks, self.tokens, self._since = 0, None if state.global_step else [0], None
        if saved:
            self.blocks, self.tokens = saved["attributes"]["blocks"], saved["attributes"]["tokens"]

    def add(self, counts: torch.Tensor) -> None:
        """Adds the counts of a step, `[..., 2 + languages]` as `RouterLossMixin` counts them, without waiting for the
        device."""
        of_step = torch.cat([counts[:1, :1], counts[:, 1:].sum(0, keepdim=True)], -1)
        self._since = of_step if self._since is None else self._since + of_step

    def read(self) -> None:
        """Brings `blocks` and `tokens` up to date."""
        if self.tokens is None or self._since is None:
            return
        blocks, *tokens = self._since.round().long().flatten().tolist()
        before = self.tokens + [0] * (len(tokens) - len(self.tokens))
        self.blocks, self.tokens = self.blocks + blocks, [a + b for a, b in zip(before, tokens, strict=True)]
        self._since = None

    def recorded(self, languages: Sequence[str]) -> dict[str, Any]:
        """The numbers for a history; empty if they were not counted from the beginning."""
        self.read()
        if self.tokens is None:
            return {}
        counts: dict[str, Any] = {"blocks_seen": self.blocks, "tokens_seen": sum(self.tokens)}
        _, *by_language = self.tokens
        if languages and any(by_language):
            named = zip(languages, by_language, strict=True)
            counts["tokens_seen_by_language"] = {code: tokens for code, tokens in named if tokens}
        return counts
