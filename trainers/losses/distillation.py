"""Self-distillation: on tokens of old languages the model keeps the base's next-token distribution.

The base is part of the expanded model: every token sent to expert 0 gives its output, so no second model is in memory.

Shape suffixes: B sequences, S tokens of a sequence, T tokens, V vocabulary.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...core.schema import checked
from ..freezing import evaluating
from .layer_loss import LossBatch, RouterLoss


def distillation_loss(
    logits_TV: torch.Tensor,
    base_logits_TV: torch.Tensor,
    old_T: torch.Tensor | None = None,
    count: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """`L_KD = mean over old tokens of KL(p_base || p)`, `p` the distribution of the next token after t, in nats.

    Args:
        logits_TV: logits of the model.
        base_logits_TV: logits of the base on the same tokens; they get no gradient.
        old_T: bool, the tokens of old languages; all by default.
        count: divisor of the sum; the number of old tokens by default (0 tokens give 0).
    """
    if old_T is not None:
        logits_TV, base_logits_TV = logits_TV[old_T], base_logits_TV[old_T]
    log_p, log_base = logits_TV.float().log_softmax(-1), base_logits_TV.detach().float().log_softmax(-1)
    divisor = max(log_p.shape[0], 1) if count is None else count
    return F.kl_div(log_p, log_base, log_target=True, reduction="sum") / divisor


@torch.no_grad()
def base_logits(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """`[B, S, V]`: the logits of the base: expert 0 alone, no adapter of PEFT, no dropout."""
    without_adapter = model.disable_adapter() if hasattr(model, "peft_config") else nullcontext()
    with evaluating(model), model.use_expert(0), without_adapter:
        return model(**inputs, use_cache=False).logits


@checked
@dataclass(frozen=True)
class DistillationLoss(RouterLoss):
    """`distillation_loss` over the old tokens of the step. It costs a forward pass of the base, without gradients, on
    the sequences with old tokens."""

    name = "distillation"
    metrics = ("distillation_loss",)
    needs_languages = True
    needs_outputs = True
    in_pieces = True
    for_encoder_decoders = False
    over = "old"
    logged_at_zero = False

    def __call__(self, batch: LossBatch) -> torch.Tensor:
        inputs: Any = batch.inputs
        B, S = inputs["input_ids"].shape
        old_BS = batch.tokens.old_T.view(B, S)
        rows_B = old_BS.any(-1)
        if torch.distributed.is_initialized() and not rows_B.any():
            rows_B[0] = True  # ranks that share a sharded model run equally many forward passes
        if not rows_B.any():
            return batch.outputs.logits.sum() * 0
        own = {name: value for name, value in inputs.items() if name != "labels"}
        of_rows = [name for name, value in own.items() if isinstance(value, torch.Tensor) and value.shape[:1] == (B,)]
        own |= {name: own[name][rows_B] for name in of_rows}
        pieces = getattr(batch.outputs, "in_pieces", None)
        if pieces is None:
            # Prompt tuning puts virtual tokens in front.
            base_TV = base_logits(batch.model, own)[:, -S:].flatten(0, 1)
            logits_TV = batch.outputs.logits[rows_B][:, -S:].flatten(0, 1)
            loss = distillation_loss(logits_TV, base_TV, old_BS[rows_B].flatten(), batch.step.old)
        else:
            with pieces.head_inputs() as hidden_states:
                base_logits(batch.model, own)
            hidden_TH, base_TH = batch.outputs.hidden_of_head[old_BS], hidden_states[0][old_BS[rows_B]]

            def divergence(logits_TV: torch.Tensor, base_TH: torch.Tensor) -> torch.Tensor:
                return distillation_loss(logits_TV, pieces.logits(base_TH), count=1.0)

            loss = pieces.sum(divergence, hidden_TH, base_TH) / batch.step.old
        batch.record("distillation_loss", loss * batch.step.old, batch.local.old)
        return loss
