"""Captures the routing for the losses: that of the trained model, on tokens of text."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..modeling import LayerRouting
from ..modeling.prefix_gate import RunningText, TextMarks


class FirstPass(dict):
    """The routing of the loss's forward pass. A later pass without gradients does not replace it, such as that of DPO's
    reference model if it is the same model without its adapter."""

    def __setitem__(self, layer: int, routing: Any) -> None:
        if torch.is_grad_enabled() or layer not in self:
            super().__setitem__(layer, routing)


def without_virtual_tokens(layer: LayerRouting, input_ids: torch.Tensor) -> LayerRouting:
    """Removes the virtual tokens that prompt tuning puts before each sequence: router losses do not count them."""
    batch, length = input_ids.shape
    if layer.router_logits.shape[0] == batch * length:
        return layer

    def text_only(logits: Any) -> Any:
        return None if logits is None else logits.unflatten(0, (batch, -1))[:, -length:].flatten(0, 1)

    return replace(
        layer, router_logits=text_only(layer.router_logits), classifier_logits=text_only(layer.classifier_logits)
    )


def judged_by_text(layer: LayerRouting, inputs: Mapping[str, Any]) -> LayerRouting:
    """Adds up the evidence of a prefix gate along the texts of the batch (`modeling/prefix_gate.py`)."""
    if layer.prefix_rule is None or layer.classifier_logits is None:
        return layer
    ids = inputs["input_ids"]
    marks = TextMarks.of(tuple(ids.shape), ids.device, inputs.get("attention_mask"), inputs.get("position_ids"))
    log_odds_TC = RunningText(layer.prefix_rule, marks).judge(0, layer.classifier_logits)
    return replace(layer, classifier_logits=log_odds_TC, prefix_rule=None)
