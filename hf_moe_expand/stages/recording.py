"""RecordingTrainer: a Trainer that stops when training is over or diverges, and records the training."""

from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from ..data.packing import PackedText
from ..errors import InputError
from ..records import StageRecord, without_folders


class _SaysWhereItGoesOn(TrainerCallback):
    """Says from which step an interrupted training goes on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step and state.is_world_process_zero:
            print(f"resumes at step {state.global_step} of {state.max_steps}")


class RecordingTrainer(Trainer):
    """`transformers.Trainer` for the stages.

    Attributes:
        packed: the packed text on which it trains, if known.
        trained_as: the training's name in the history.
        settings: the stage's settings as its history has them; None if the arguments are no stage's.
        record: the training's record for the history, after the training.
    """

    packed: PackedText | None = None
    trained_as = "training"
    settings: dict[str, Any] | None = None
    record: StageRecord | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_SaysWhereItGoesOn())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """The library warns of tied weights, which a training checkpoint holds once."""
        super()._issue_warnings_after_load(
            load_result._replace(missing_keys=[key for key in load_result.missing_keys if key not in self._tied()])
        )

    def _tied(self) -> set[str]:
        """The names of weights that are another weight under a further name."""
        model: Any = self.accelerator.unwrap_model(self.model)
        return set(getattr(model, "all_tied_weights_keys", ()))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        if self.state.global_step >= self.state.max_steps:  # resumed from the last step's checkpoint
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, model: Any, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise InputError(
                f"{self.trained_as}: the loss is {loss.item()} at step {self.state.global_step + 1}: the training "
                "diverged, and no checkpoint is written. Lower the learning rate, add warmup steps, or train in bf16 "
                "instead of fp16."
            )
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        norm = logs.get("grad_norm")
        if norm is not None and not norm < float("inf") and not self.args.fp16:  # fp16's scaler skips such a step
            raise InputError(
                f"{self.trained_as}: the norm of the gradient is {norm} at step {self.state.global_step}: the training "
                "diverged, and no checkpoint is written. Lower the learning rate, or add warmup steps."
            )
        super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, and sets `record` if the arguments are a stage's configuration."""
        result = super().train(*args, **kwargs)
        if self.settings is not None:
            documents, tokens = (self.packed.documents, self.packed.tokens) if self.packed is not None else ({}, {})
            # Validation affects neither the weights nor the history.
            settings = {name: value for name, value in self.settings.items() if name != "validation"}
            self.record = StageRecord(
                self.trained_as, result.global_step, documents, tokens, self.args.seed, without_folders(settings)
            )
        return result
