"""What a stage's Trainer says and counts while it trains: its progress, and the text that it has seen."""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback

from ..data.lost import lost_lines
from ..data.packing import small_shares

# Seconds to the first word of progress, and between later ones in a log.
_FIRST, _LATER = 10, 600
# What the Trainer logs besides losses and metrics: the step's number says it, or the end of a training.
_NOT_SHOWN = ("epoch", "total_flos", "num_input_tokens_seen")


class LogTable(ProgressCallback):
    """Shows what a Trainer logs, with the step and the time that is left: beside a progress bar as a row of a table, in
    a log as a line with names.

    Args:
        clock: seconds.
        shows: False where another callback shows it, such as a notebook's.
    """

    not_shown: tuple[str, ...] = _NOT_SHOWN

    def __init__(self, clock: Callable[[], float] = time.monotonic, shows: bool = True) -> None:
        super().__init__()
        self.shows = shows
        self.clock, self.begun, self.first = clock, 0.0, 0
        self.headed: list[str] = []  # the names at the table's head
        self.has_bar = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun, self.first, self.headed = self.clock(), state.global_step, []
        self.has_bar = self.shows and not (args.disable_tqdm or os.environ.get("TQDM_DISABLE"))
        if self.has_bar:
            super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.has_bar:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if self.has_bar:
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.has_bar:
            super().on_train_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not (self.shows and state.is_world_process_zero):
            return
        if "train_runtime" in logs:
            took, loss = duration(logs["train_runtime"]), logs.get("train_loss", math.nan)
            self.say(f"trained {state.global_step - self.first:,} steps in {took}, mean loss {loss:.4g}")
            return
        shown = {name: value for name, value in logs.items() if name not in self.not_shown}
        values = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in shown.values()]
        step, left = f"{state.global_step:,} of {state.max_steps:,}", self.left(state)
        if not self.has_bar:
            said = ", ".join(f"{name} {value}" for name, value in zip(shown, values, strict=True))
            self.say(f"step {step}, {left} left: {said}" if state.max_steps else said)
            return
        stacks = [name.split("_") for name in shown]
        widths = [len(f"{state.max_steps:,}") * 2 + 4, 11, *(max(8, *map(len, stack)) for stack in stacks)]
        if self.headed != list(shown):
            self.headed, height = list(shown), max(map(len, stacks), default=1)
            lines = [["" if n < height - 1 else "step", "" if n < height - 1 else "left"] for n in range(height)]
            for stack in stacks:
                for line, word in zip(lines, [""] * (height - len(stack)) + stack, strict=True):
                    line.append(word)
            self.say("\n".join(_aligned(line, widths) for line in lines))
        self.say(_aligned([step, left, *values], widths))

    def left(self, state: Any) -> str:
        """The time that is left, by the speed of this attempt."""
        done = state.global_step - self.first
        return duration((state.max_steps - state.global_step) * (self.clock() - self.begun) / done) if done else "?"

    def say(self, line: str) -> None:
        """Prints a line above the progress bar."""
        tqdm.write(line)
        sys.stdout.flush()


def took_away_usual(trainer: Any) -> bool:
    """Removes the library's callbacks that show what is logged; False where a notebook's or a user's own do, which
    stay."""
    usual = [one for one in trainer.callback_handler.callbacks if type(one) in (PrinterCallback, ProgressCallback)]
    for callback in usual:
        trainer.remove_callback(callback)
    return bool(usual)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


class Progress(LogTable):
    """Says how long the training is, and from which step an interrupted one goes on. Then shows what is logged; and
    says within half a minute, and in a log at least every ten minutes, how far it is: steps, tokens a second of this
    attempt, and the time that is left."""

    def __init__(self, trainer: Any, clock: Callable[[], float] = time.monotonic, shows: bool = True) -> None:
        super().__init__(clock, shows)
        self.trainer, self.wait = trainer, math.inf  # until a training begins

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.printed, self.wait = 0.0, float(_FIRST)
        trainer = self.trainer
        if not getattr(trainer, "router_losses", ()):
            self.not_shown = (*_NOT_SHOWN, "next_token_loss")  # it is the loss
        rows, size = trainer.get_total_train_batch_size(args), trainer.row_tokens
        pairs = trainer._is_encoder_decoder  # whose lengths differ
        self.amount: int = rows if pairs else rows * (size or 1)  # of a step
        self.unit = "sentence pairs" if pairs else "tokens" if size else "rows"
        if state.is_world_process_zero:
            scheduler = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
            rate = f"learning rate {args.learning_rate:g} ({scheduler})"
            print(f"{trainer.trained_as}: {state.max_steps:,} steps of {self.amount:,} {self.unit}, {rate}")
            if trainer.packed is not None and getattr(trainer, "mix", None) is None:
                print("\n".join(_shares(trainer.packed.tokens)))
            if trainer.packed is not None and trainer.packed.lost:
                print("\n".join(lost_lines(trainer.packed.lost)))
            if state.global_step:
                print(f"resumes at step {state.global_step} of {state.max_steps}")
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        now = self.clock() - self.begun
        # The first step is slower than the others: one alone says little, unless nothing else comes for long.
        if not state.is_world_process_zero or now - self.printed < self.wait or state.global_step >= state.max_steps:
            return
        speed = (state.global_step - self.first) * self.amount / now
        self.say(
            f"step {state.global_step:,} of {state.max_steps:,}, {speed:,.0f} {self.unit} a second, "
            f"about {self.left(state)} left"
        )
        self.printed, self.wait = now, math.inf if self.has_bar or not self.shows else _LATER

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs, **kwargs)
        if self.wait == _LATER:
            self.printed = self.clock() - self.begun


def _shares(tokens: Mapping[str, int]) -> list[str]:
    """Each language's share of the tokens, and a warning that names those with little."""
    whole = sum(tokens.values())
    lines = ["tokens: " + ", ".join(f"{code} {count / whole:.0%}" for code, count in tokens.items())]
    if little := small_shares(tokens):
        named = ", ".join(f"{code} ({share:.1%})" for code, share in little.items())
        lines.append(f"warning: little of the text is {named}: give more text of it, or less of the others")
    return lines


def duration(seconds: float) -> str:
    """A time in words, such as `3 h 20 min`."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


class SeenText(TrainerCallback, ExportableState):
    """The blocks and tokens that passed through training, over all ranks, kept in the Trainer's state, so that a
    resumed one counts on.

    Attributes:
        blocks: blocks seen.
        tokens: tokens seen, padding excluded: first those of no known language, then those of each language id. None if
            the training was resumed from a checkpoint that did not count.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.tokens: list[int] | None = [0]
        self._since: torch.Tensor | None = None  # since the numbers were last read

    def state(self) -> dict[str, Any]:
        """What the Trainer's state keeps."""
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
