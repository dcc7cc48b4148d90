"""One expanded layer: decides where each token goes, and runs the experts.

Shape suffixes as in `routing.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .conditional_routing import ConditionalGate, beside_shared, with_shared_expert
from .dispatch import dispatch, run_alone
from .ffn_expert import copy_ffn
from .routing import (
    Classifier,
    LayerRouting,
    Router,
    experts_allowed,
    local_experts,
    mask_outputs,
    select_experts,
)
from .routing_control import RoutingControl


class ExpandedFFN(nn.Module):
    """A layer's FFN grown into N experts (`experts[0]` is the original), a router and, optionally, a classifier.

    Args:
        ffn: the backbone's FFN; becomes expert 0 and the template of the others.
        hidden_size: h.
        num_experts: N >= 2.
        top_k: K.
        layer_index: this layer's number in the decoder.
        has_classifier: put a routing classifier in front of the router.
        control: the model's `RoutingControl`.
        earlier_counts: experts that the layer had after each expansion before the last.
        masking: what says how training masks (`expert_output_masking` and the like): the model's configuration.
        conditional: expert 0 is shared by all tokens, and a gate says how much the routed experts 1..N-1 add.
        new_expert: makes each further expert from `ffn`.

    Attributes:
        experts_of_class: experts that existed before any expansion (1), and after each.
        draws_for_all: gating dropout, which takes whole batches, is drawn here: in a model, in its first layer.
    """

    def __init__(
        self,
        ffn: nn.Module,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        layer_index: int,
        has_classifier: bool,
        control: RoutingControl,
        earlier_counts: Sequence[int] = (),
        masking: Any = None,
        conditional: bool = False,
        new_expert: Callable[[nn.Module], nn.Module] = copy_ffn,
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList([ffn, *(new_expert(ffn) for _ in range(num_experts - 1))])
        self.router = Router(hidden_size, num_experts)
        self.experts_of_class = (1, *earlier_counts, num_experts)
        self.classifier = Classifier(hidden_size, len(self.experts_of_class)) if has_classifier else None
        self.conditional_gate = ConditionalGate(hidden_size, 1) if conditional else None
        self.top_k = min(top_k, num_experts - conditional)
        self.masking = masking
        self.layer_index = layer_index
        self.control = control
        self.draws_for_all = True

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., h] -> [..., h]`. BLOOM's FFN adds the residual itself: then it is passed, and added once."""
        x_Th = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing = self.route(x_Th)
        if self.control.capture is not None:
            self.control.capture.layers[self.layer_index] = routing
        if self.control.forced_expert is not None:
            return run_alone(self.experts, self.control.forced_expert, hidden_states, residual, self.training)
        y_Th = dispatch(self.experts, x_Th, routing.weights, routing.experts, residual is not None, self.training)
        y = y_Th.view(hidden_states.shape)
        return y if residual is None else y + residual

    def route(self, x_Th: torch.Tensor) -> LayerRouting:
        """The decision for each token, from its hidden states `[T, h]`.

        Raises:
            ValueError: every token is to go to an expert that the layer does not have.
        """
        logits_TN = self.router(x_Th)
        classifier_logits_TC = None if self.classifier is None else self.classifier(x_Th)
        conditional = self.conditional_gate is not None
        if self.control.change_logits is not None:
            shared_TN, routed_TN = logits_TN.tensor_split([int(conditional)], dim=-1)
            logits_TN = torch.cat([shared_TN, self.control.change_logits(routed_TN, self.top_k)], -1)
            classifier_logits_TC = None
        if self.conditional_gate is not None:
            logits_TN = with_shared_expert(logits_TN, self.conditional_gate(x_Th).squeeze(-1))
        if self.control.forced_expert is not None:
            allowed_T, (weights_TK, index_TK) = None, self._forced(logits_TN, self.control.forced_expert)
        else:
            allowed_T = self._allowed(logits_TN, classifier_logits_TC)
            weights_TK, index_TK = self._choose(logits_TN, allowed_T)
        return LayerRouting(logits_TN, classifier_logits_TC, self.top_k, weights_TK, index_TK, allowed_T, conditional)

    def _forced(self, logits_TN: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        if expert >= len(self.experts):
            raise ValueError(
                f"Expert {expert} was asked for, but layer {self.layer_index} has experts 0..{len(self.experts) - 1}."
            )
        ones_T1 = torch.ones_like(logits_TN[:, :1])
        return ones_T1, torch.full_like(ones_T1, expert, dtype=torch.long)

    def _allowed(self, logits_TN: torch.Tensor, classifier_logits_TC: torch.Tensor | None) -> torch.Tensor | None:
        allowed_T = None
        if classifier_logits_TC is not None and not self.training:
            allowed_T = experts_allowed(classifier_logits_TC, self.experts_of_class)
        if self.control.expansion is None:
            return allowed_T
        most = self.experts_of_class[self.control.expansion]
        if allowed_T is None:
            return torch.full_like(logits_TN[:, 0], most, dtype=torch.long)
        return allowed_T.clamp(max=most)

    def _choose(self, logits_TN: torch.Tensor, allowed_T: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and expert indices of each token; in training with what the configuration masks."""
        conditional = self.conditional_gate is not None
        masking = self.masking if self.training else None
        routed_TN = logits_TN[:, int(conditional) :]
        routed_allowed_T = (allowed_T - 1).clamp(min=1) if conditional and allowed_T is not None else allowed_T
        if masking is not None and self.draws_for_all:
            # Recomputation, before the next batch, draws the same number again.
            self.control.local = bool(masking.gating_dropout) and torch.rand(()).item() < masking.gating_dropout
        if masking is not None and self.control.local:
            weights_TK, index_TK = local_experts(routed_TN)
        else:
            weights_TK, index_TK = select_experts(routed_TN, self.top_k, routed_allowed_T)
        if masking is not None:
            weights_TK, index_TK = mask_outputs(
                weights_TK, index_TK, routed_TN.shape[-1], masking.expert_output_masking, masking.final_output_masking
            )
        if not conditional:
            return weights_TK, index_TK
        closed_T = None if allowed_T is None else allowed_T < 2
        if masking is not None and masking.conditional_routing_masking:
            masked_T = torch.rand_like(logits_TN[:, 0]) < masking.conditional_routing_masking
            closed_T = masked_T if closed_T is None else closed_T | masked_T
        return beside_shared(logits_TN, weights_TK, index_TK, closed_T)
