"""The routing that a loss is computed from: that of the trained model, on tokens of text."""

from dataclasses import replace
from typing import Any

import torch

from ..modeling import LayerRouting


class FirstPass(dict):
    """Routing of the forward pass that the loss comes from: a later one without gradients (that of DPO's reference
    model, where it is the same model without its adapter) does not replace it."""

    def __setitem__(self, layer: int, routing: Any) -> None:
        if torch.is_grad_enabled() or layer not in self:
            super().__setitem__(layer, routing)


def without_virtual_tokens(layer: LayerRouting, input_ids: torch.Tensor) -> LayerRouting:
    """Prompt tuning puts tokens of its own in front of each sequence: no text, so no router loss counts them."""
    batch, length = input_ids.shape
    if layer.router_logits.shape[0] == batch * length:
        return layer

    def text_only(logits: Any) -> Any:
        return None if logits is None else logits.unflatten(0, (batch, -1))[:, -length:].flatten(0, 1)

    return replace(
        layer, router_logits=text_only(layer.router_logits), classifier_logits=text_only(layer.classifier_logits)
    )
