"""Watches a training for what would otherwise pass in silence: steps that train nothing, steps without a target, a best
step that is not saved, and a checkpoint that cannot resume exactly."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel, is_compiled_module

from ..core.errors import InputError
from ..core.saying import say_once
from .freezing import TrainerBase

WATCHED = 20  # steps
_NOTHING = 1e-8  # a norm of the gradient that is rounding; the epsilon of AdamW
# Columns that would change the loss; TRL reads the last two.
_CHANGE_THE_LOSS = (
    "loss_mask", "loss_masks", "loss_weight", "loss_weights", "sample_weight", "token_weights", "weight", "weights",
    "completion_mask", "assistant_masks",
)  # fmt: skip
_STATES = ("optimizer*", "global_step*")  # of an optimizer; DeepSpeed's


def check_columns(columns: Iterable[str], read: Collection[str], name: str) -> None:
    """Refuses columns of a data set that would change the loss, and that nobody reads; says the others once."""
    left = [column for column in columns if column not in read]
    if changes := [column for column in left if column in _CHANGE_THE_LOSS]:
        raise InputError(
            f"{name} has a column `{changes[0]}`, which nothing reads, although it would change the loss: give "
            "`labels` with -100 where a token does not count, or remove the column."
        )
    if left:
        say_once(f"{name}: nothing reads the column{'s' * (len(left) > 1)} {', '.join(left)}")


def without_compiler(model: Any) -> Any:
    """The model inside one that `torch.compile` gave: a Trainer saves its keys, and asks it for its own methods."""
    if not is_compiled_module(model):
        return model
    print("the model is compiled: it trains as it was before that; torch_compile=True compiles a training")
    return extract_model_from_parallel(model, keep_torch_compile=False)


class WatchingMixin(TrainerBase):
    """Put in front of a Trainer class.

    Raises:
        InputError: no trained parameter had a gradient in the first 20 steps, or in all if they are fewer.
    """

    _largest_norm: torch.Tensor | None = None  # of the gradient, over the steps that are watched
    _watched = _without_target = 0  # steps
    _last_watched = -1

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._largest_norm, self._watched, self._without_target, self._last_watched = None, 0, 0, -1
        result = super().train(*args, **kwargs)
        if 0 < self._watched < WATCHED and self._watched == self.state.global_step:
            self._check_reached()
        if self._without_target and self.is_world_process_zero():
            steps = f"{self._without_target:,} of {self.state.global_step:,} steps"
            print(f"{steps} had no label to learn from, and were skipped")
        return result

    def training_step(self, model: Any, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if (
            num_items_in_batch is not None
            and self.accelerator.sync_gradients
            and not torch.as_tensor(num_items_in_batch).any()
        ):
            self._without_target += 1
            if not self.args.fp16:  # whose scaler wants a gradient
                for parameter in model.parameters():
                    parameter.grad = None  # then an optimizer leaves the parameter and its momentum alone
        return loss

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self._watched < WATCHED and self._last_watched != self.state.global_step:
            self._last_watched = self.state.global_step
            self._watched += 1
            norm = torch.as_tensor(0.0 if grad_norm is None else grad_norm)
            norm = getattr(norm, "full_tensor", lambda: norm)().detach().nan_to_num(nan=1.0)
            self._largest_norm = norm if self._largest_norm is None else self._largest_norm.maximum(norm)
            if self._watched == WATCHED:
                self._check_reached()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _check_reached(self) -> None:
        if self._largest_norm is None or self._largest_norm.item() > _NOTHING:
            return
        raise InputError(
            f"In {self._watched} steps no trained parameter had a gradient, so that nothing would be learned: "
            f"{self._why_not_reached()}."
        )

    def _why_not_reached(self) -> str:
        if self._without_target >= self._watched:
            return "the rows have no label to predict (each is -100, or the first token's)"
        model = self.accelerator.unwrap_model(self.model)
        control = getattr(model, "routing_control", None)
        request = None if control is None else control.request
        if request is not None and (request.expert, request.expansion, request.classes) != (None, None, None):
            return (
                "the training is inside `use_languages`, `use_expert` or `use_expansion`, under which no trained "
                "expert runs; leave that block"
            )
        if getattr(getattr(model, "config", None), "exclusive_experts", False):
            return "no row is in a language whose experts train; give text in the new languages"
        return "the loss depends on frozen parameters alone"

    def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True  # else the last step's weights would stand for the best
        return is_best

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        states = [path for pattern in _STATES for path in Path(checkpoint or "").glob(pattern)]
        if checkpoint is not None and not states and self.is_world_process_zero():
            print(
                f"warning: {checkpoint} has weights alone (save_only_model): optimizer and learning rate begin anew, "
                "so the training goes on otherwise than without the interruption"
            )
