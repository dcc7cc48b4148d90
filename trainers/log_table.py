"""Shows how a training goes: what is logged, where it is, and how long is left."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import has_length

from ..core.progress import EARLY, Heartbeat, duration, shows_bars

# What the Trainer logs besides losses and metrics: the step's number says it, or the end of a training.
NOT_SHOWN = ("epoch", "total_flos", "num_input_tokens_seen")


class LogTable(ProgressCallback):
    """Shows what a Trainer logs, with the step and the time that is left: beside a progress bar as a row of a table,
    elsewhere as a line with names. Without a bar, a line says at least every 15 seconds where the training is.

    Args:
        clock: seconds.
        shows: False where another callback shows it, such as a notebook's.
    """

    not_shown: tuple[str, ...] = NOT_SHOWN

    def __init__(self, clock: Callable[[], float] = time.monotonic, shows: bool = True) -> None:
        super().__init__()
        self.shows = shows
        self.clock, self.begun, self.first, self.printed = clock, 0.0, 0, 0.0
        self.headed: list[str] = []  # the names at the table's head
        self.has_bar = False
        self.scored = 0  # batches of an evaluation
        self.state: Any = None
        self.heart: Heartbeat | None = None

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Inside, it says something also while a step is long."""
        self.heart = Heartbeat(self._beat) if self.shows else None
        try:
            yield
        finally:
            if self.heart is not None:
                self.heart.stop()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun, self.first, self.headed, self.state = self.clock(), state.global_step, [], state
        self.printed = 0.0
        self.has_bar = self.shows and not args.disable_tqdm and shows_bars()
        if self.has_bar:
            super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.has_bar:
            super().on_step_end(args, state, control, **kwargs)
        elif self._is_due() and state.global_step < state.max_steps and not getattr(control, "should_log", False):
            self.say(self.where(state))

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        self.scored += 1
        if self.scored == 1:
            self.printed = self.clock() - self.begun
        of = f" of {len(eval_dataloader):,}" if has_length(eval_dataloader) else ""
        if self.training_bar is not None:  # a second bar below it would jump
            self.training_bar.set_postfix_str(f"evaluation: {self.scored:,}{of}")
        elif self.shows and not args.disable_tqdm and shows_bars():
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)
        elif self._is_due() and state.is_world_process_zero:
            self.say(f"evaluation: {self.scored:,}{of} batches")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.scored = 0
        if self.training_bar is not None:
            self.training_bar.set_postfix_str("")
        super().on_evaluate(args, state, control, **kwargs)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.scored = 0
        super().on_predict(args, state, control, metrics=metrics, **kwargs)

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

    def where(self, state: Any) -> str:
        """The step, and the time that is left."""
        if state.global_step == self.first:
            return f"step {state.global_step:,} of {state.max_steps:,}, {duration(self.clock() - self.begun)} so far"
        return f"step {state.global_step:,} of {state.max_steps:,}, about {self.left(state)} left"

    def left(self, state: Any) -> str:
        """The time that is left, by the speed of this attempt."""
        done = state.global_step - self.first
        return duration((state.max_steps - state.global_step) * (self.clock() - self.begun) / done) if done else "?"

    def say(self, line: str) -> None:
        """Prints a line above the progress bar."""
        tqdm.write(line)
        sys.stdout.flush()
        self.printed = self.clock() - self.begun
        if self.heart is not None:
            self.heart.said()

    def _is_due(self) -> bool:
        """Whether a line is wanted before another step that may be long."""
        return self.shows and self.clock() - self.begun - self.printed >= EARLY

    def _beat(self) -> None:
        if self.training_bar is not None:
            self.training_bar.refresh()
        elif self.state is not None and self.state.is_world_process_zero and self.state.max_steps:
            self.say(self.where(self.state))


def took_away_usual(trainer: Any) -> bool:
    """Removes the library's callbacks that show what is logged; False where a notebook's or a user's own do, which
    stay."""
    usual = [one for one in trainer.callback_handler.callbacks if type(one) in (PrinterCallback, ProgressCallback)]
    for callback in usual:
        trainer.remove_callback(callback)
    return bool(usual)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
