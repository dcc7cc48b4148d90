"""Shows how a training goes: a bar of its steps, and a line for what is logged."""

import time
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import has_length

from ..core.progress import Bar, duration

# What the Trainer logs besides losses and metrics: the step's number says it, or the end of a training.
_NOT_SHOWN = ("epoch", "total_flos", "num_input_tokens_seen")


class LogLines(ProgressCallback):
    """The library's bars, which are lines where there is no terminal, and above them a line for each log, with the step
    and the time that is left. `shows` is False where another callback shows it, such as a notebook's."""

    not_shown: tuple[str, ...] = _NOT_SHOWN
    training_bar: Any
    prediction_bar: Any

    def __init__(self, shows: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.shows, self.clock, self.begun, self.first = shows, clock, 0.0, 0
        self.scored = 0  # batches of an evaluation

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun, self.first, self.current_step = self.clock(), state.global_step, state.global_step
        self.training_bar = self._bar(args, state, state.max_steps, self.first)

    def _bar(self, args: Any, state: Any, total: int | None, done: int = 0) -> Bar:
        no_bar = args.disable_tqdm or not (self.shows and state.is_world_process_zero)
        return Bar(total=total, initial=done, dynamic_ncols=True, disable=no_bar)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        batches = len(eval_dataloader) if has_length(eval_dataloader) else None
        self.scored += 1
        if self.training_bar is not None:  # a second bar below it would jump
            of = "" if batches is None else f" of {batches:,}"
            self.training_bar.set_postfix_str(f"evaluation: {self.scored:,}{of}")
            return
        if self.prediction_bar is None:
            self.prediction_bar = self._bar(args, state, batches)
        self.prediction_bar.update()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end_evaluation()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.end_evaluation()

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

    def end_evaluation(self) -> None:
        """Takes away what shows an evaluation."""
        self.scored = 0
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None
        elif self.training_bar is not None and self.training_bar.postfix:
            self.training_bar.set_postfix_str("")

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
