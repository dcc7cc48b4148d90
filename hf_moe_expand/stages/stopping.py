"""Saves a training that a signal stops, and every ten minutes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

SECONDS_BETWEEN_SAVES = 600  # the most between two training checkpoints
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# `timeout` and torchrun pass on a signal that the process got already: the same one at once is no second one.
_SAME = 0.5  # seconds


class Stops(TrainerCallback):
    """Finishes and saves the step at which SIGINT, SIGTERM or SIGHUP comes, then does what the signal does; a second
    one stops at once. Without `save_steps` and `save_strategy`, saves also `SECONDS_BETWEEN_SAVES` after the last
    checkpoint. All ranks do so at the same step. `save_strategy: "no"`, and another thread than the main one, stop as
    usual."""

    def __init__(self, trainer: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.trainer, self.clock = trainer, clock
        self.number = 0  # of the first signal, on this or another rank
        self.is_last, self.saved_step = False, -1  # whether all ranks stop after this step
        self._came = self._saved = 0.0
        self._before: dict[int, Any] = {}

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Inside, a signal is kept until the step is saved; at the end it does what it did before."""
        saves = self.trainer.args.save_strategy != SaveStrategy.NO
        process, self.number = os.getpid(), 0

        def stop(number: int, frame: FrameType | None) -> None:
            if os.getpid() != process:  # a forked worker, whose batches finish the step
                return
            if not self.number:
                self.number, self._came = number, time.monotonic()
                if self.trainer.is_world_process_zero():
                    words = f"{signal.Signals(number).name}: saves this step and stops; once more stops at once\n"
                    with suppress(OSError):  # stderr may be closed; print is not re-entrant
                        os.write(2, words.encode())
            elif number != self.number or time.monotonic() - self._came > _SAME:
                self._put_back()
                signal.raise_signal(number)

        if saves and threading.current_thread() is threading.main_thread():
            taken = {number: signal.getsignal(number) for number in SIGNALS}
            # Ignored ones, as under nohup, stay ignored; None is a handler that Python did not set.
            self._before = {n: handler for n, handler in taken.items() if handler not in (signal.SIG_IGN, None)}
            for number in self._before:
                signal.signal(number, stop)
        try:
            yield
        finally:
            before = self._put_back()
        if self.number:
            self._leave(before.get(self.number))

    def _put_back(self) -> dict[int, Any]:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
        self._workers_get(signal.SIG_UNBLOCK)
        return before

    def _leave(self, handler: Any) -> None:
        """Ends the training as the signal would have ended it, once all ranks have saved: a launcher ends the others
        with the first."""
        trainer, name = self.trainer, signal.Signals(self.number).name
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            state = trainer.state
            print(f"{name}: step {state.global_step} of {state.max_steps} is saved in {trainer.args.output_dir}; a "
                  "training that resumes goes on from there")  # fmt: skip
        if callable(handler):
            handler(self.number, None)
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.number)

    def _workers_get(self, how: int) -> None:
        """Blocks signals while worker processes start, which inherit that: a signal to the whole group would end them
        in the middle of the step."""
        if self.trainer.args.dataloader_num_workers and hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(how, SIGNALS)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved, self.is_last, self.saved_step = self.clock(), False, -1
        self._by_clock = not getattr(args, "says_when_to_save", True)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._before:
            self._workers_get(signal.SIG_BLOCK)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._before:
            self._workers_get(signal.SIG_UNBLOCK)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.save_strategy == SaveStrategy.NO:
            return
        is_due = self._by_clock and self.clock() - self._saved >= SECONDS_BETWEEN_SAVES
        if args.world_size > 1:  # the highest number, and the first clock, of all ranks
            asked = torch.tensor([[self.number, is_due]], device=args.device)
            self.number, is_due = self.trainer.accelerator.gather(asked).amax(0).tolist()
        if self.number:
            self.is_last = control.should_training_stop = True
        if self.number or is_due:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved, self.saved_step = self.clock(), state.global_step
