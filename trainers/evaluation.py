"""The losses of `evaluate` and `predict`: means over all targets, or tokens, of all rows, each of which counts once,
whatever the batches and ranks are."""

from collections.abc import Mapping
from typing import Any

import torch

from .freezing import TrainerBase
from .routing_capture import Metrics

_IGNORED = -100


class EvaluationMixin(TrainerBase):
    """Put in front of a Trainer class. Its `compute_loss` records a loss and the number that it is a mean over with
    `_record_loss`; their sum is the `eval_loss`."""

    _router_metrics: Metrics

    def _record_loss(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Adds to a part of the `eval_loss`, the ratio of the sums over batches and ranks."""
        self._router_metrics.record("eval_loss", name, total, count)

    def _targets(self, labels: torch.Tensor) -> torch.Tensor:
        """The number of labels that are predicted: a decoder predicts no first token."""
        return (labels if self._is_encoder_decoder else labels[..., 1:]).ne(_IGNORED).sum()

    def _rows_that_count(self, inputs: Mapping[str, Any]) -> int | None:
        """How many rows of an evaluation's batch count, if not all: to fill the last batch of the ranks, accelerate
        repeats the data set's first rows."""
        state, rows = self.accelerator.gradient_state, len(inputs["input_ids"])
        left = state.remainder - self.accelerator.process_index // self.get_tp_size() * rows
        return max(left, 0) if state.end_of_dataloader and state.remainder > 0 and left < rows else None

    def prediction_step(self, model: Any, inputs: dict, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        labels, kept = inputs.get("labels"), self._rows_that_count(inputs) if "input_ids" in inputs else None
        if labels is not None and kept is not None:
            labels = labels.clone()
            labels[kept:] = _IGNORED
            inputs = {**inputs, "labels": labels}
        # Else the library divides a rank's loss by the targets of all ranks.
        arguments: Any = vars(self.args)
        averages, arguments["average_tokens_across_devices"] = self.args.average_tokens_across_devices, False
        try:
            loss, *others = super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            arguments["average_tokens_across_devices"] = averages
        if self._generates(prediction_loss_only) and loss is not None and labels is not None:
            targets = self._targets(labels).to(loss.device)
            self._record_loss("next_token", (loss * targets).where(targets > 0, 0.0), targets)
        return loss, *others

    def _generates(self, prediction_loss_only: bool) -> bool:
        """Whether Seq2SeqTrainer passes the whole batch to `generate`, and takes the loss from the model itself."""
        return not prediction_loss_only and bool(getattr(self.args, "predict_with_generate", False))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        for mode in ("eval", "eval_loss"):
            self._router_metrics.forget(mode)  # of `predict`, which does not log
        output = super().evaluation_loop(*args, **kwargs)
        parts = dict(self._router_metrics.ratios("eval_loss", self._sum_over_all))
        name = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        if name in output.metrics and "next_token" in parts:
            output.metrics[name] = sum(parts.values())
        return output

    def _sum_over_all(self, sums: torch.Tensor) -> torch.Tensor:
        # A tensor-parallel group's ranks count several times in the numerator and in the denominator.
        return self.accelerator.reduce(sums, reduction="sum")
