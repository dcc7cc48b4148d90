"""Shows how a training goes: a bar of its steps, and a line for what is logged."""

import time
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..core.progress import Bar, duration

# What the Trainer logs besides losses and metrics: the step's number says it, or the end of a training.
_NOT_SHOWN = ("epoch", "total_flos", "num_input_tokens_seen")


class LogLines(ProgressCallback):
    """The library's bars, which are lines where there is no terminal, and above them a line for each log, with the step
    and the time that is left.

    Args:
        shows: False where another callback shows it, such as a notebook's.
        clock: seconds.
    """

    not_shown: tuple[str, ...] = _NOT_SHOWN
    training_bar: Any

    def __init__(self, shows: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.shows, self.clock, self.begun, self.first = shows, clock, 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun, self.first, self.current_step = self.clock(), state.global_step, state.global_step
        no_bar = args.disable_tqdm or not (self.shows and state.is_world_process_zero)
        self.training_bar = Bar(total=state.max_steps, initial=self.first, dynamic_ncols=True, disable=no_bar)

    def on_prediction_step(self, args: Any, *rest: Any, **kwargs: Any) -> None:
        if self.shows and not args.disable_tqdm:
            super().on_prediction_step(args, *rest, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not (self.shows and state.is_world_process_zero):
            return
        if "train_runtime" in logs:
            steps, took = state.global_step - self.first, duration(logs["train_runtime"])
            tqdm.write(f"trained {steps:,} steps in {took}, mean loss {logs.get('train_loss', float('nan')):.4g}")
            return
        shown = {name: value for name, value in logs.items() if name not in self.not_shown}
        said = ", ".join(f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in shown.items())
        step = f"step {state.global_step:,} of {state.max_steps:,}{self.speed(state)}: " if state.max_steps else ""
        tqdm.write(step + said)

    def speed(self, state: Any) -> str:
        """The time that is left, by the speed of this attempt."""
        done = state.global_step - self.first
        if not done or state.global_step >= state.max_steps:
            return ""
        return f", {duration((state.max_steps - state.global_step) * (self.clock() - self.begun) / done)} left"

    def close(self) -> None:
        """Takes away the bar of a training that ended with an error."""
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


def took_away_usual(trainer: Any) -> bool:
    """Removes the library's callbacks that show what is logged; False where a notebook's or a user's own do, which
    stay."""
    usual = [one for one in trainer.callback_handler.callbacks if type(one) in (PrinterCallback, ProgressCallback)]
    for callback in usual:
        trainer.remove_callback(callback)
    return bool(usual)
