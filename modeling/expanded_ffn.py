"""One expanded layer: routes each token, and runs the experts.

Shape suffixes as in `routing.py`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from .conditional_routing import ConditionalGate, beside_shared, with_shared_expert
from .dispatch import dispatch, run_alone
from .ffn_expert import copy_ffn
from .routing import Choice, Classifier, LayerRouting, Router, experts_allowed, select_experts
from .routing_control import RoutingControl


class ExpandedFFN(nn.Module):
    """A layer's FFN grown into N experts (`experts[0]` is the original), a router and, optionally, a classifier.

    Args:
        ffn: the backbone's FFN, which becomes expert 0 and the template of the other experts.
        hidden_size: h.
        num_experts: N >= 2.
        top_k: K.
        layer_index: this layer's number in the decoder.
        has_classifier: whether a routing classifier precedes the router.
        control: the model's `RoutingControl`.
        earlier_counts: number of the layer's experts after each expansion before the last.
        conditional: whether all tokens share expert 0, and a gate weighs the routed experts 1..N-1.
        new_expert: function that makes each further expert from `ffn`.

    Attributes:
        experts_of_class: number of experts before any expansion (1), and after each expansion.
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
        self.layer_index = layer_index
        self.control = control

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., h] -> [..., h]`. `residual` is for BLOOM, whose FFN adds the residual itself; it is added once."""
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
        """The routing of each token, from its hidden states `[T, h]`.

        Raises:
            ValueError: `use_expert` names an expert that the layer does not have.
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
                f"Layer {self.layer_index} has no expert {expert}; give one of 0..{len(self.experts) - 1}."
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
        """Weights and expert indices of each token."""
        conditional = self.conditional_gate is not None
        routed_TN = logits_TN[:, int(conditional) :]
        routed_allowed_T, closed_T = allowed_T, None
        if conditional and allowed_T is not None:
            routed_allowed_T, closed_T = (allowed_T - 1).clamp(min=1), allowed_T < 2
        choice = Choice(*select_experts(routed_TN, self.top_k, routed_allowed_T), routed_TN.shape[-1], closed_T)
        if self.training and self.control.change_choice is not None:
            choice = self.control.change_choice(self.layer_index, choice)
        if not conditional:
            return choice.weights, choice.experts
        return beside_shared(logits_TN, choice.weights, choice.experts, choice.closed)
