"""One expanded layer: routes each token, and runs the experts.

Shape suffixes as in `routing.py`.
"""

from typing import Any

import torch
from torch import nn

from .dispatch import dispatch, run_expert
from .expanded_layer import ExpandedLayer, chosen
from .experts import AddedExpert, activation_of, copy_ffn, lora_expert
from .routing import (
    Choice,
    Classifier,
    ConditionalGate,
    LayerRouting,
    Router,
    TokenClasses,
    beside_shared,
    experts_allowed,
    select_experts,
    with_shared_expert,
)
from .routing_control import RoutingControl, RoutingRequest


class ExpandedFFN(ExpandedLayer):
    """A layer's FFN grown into N experts (`experts[0]` is the original), a router where a token has a choice and,
    optionally, a classifier.

    Args:
        ffn: the backbone's FFN, which becomes expert 0 and the template of the other experts.
        config: the model's configuration.
        layer_index: the layer's number in the model, by which the configuration knows it.
        control: the model's `RoutingControl`.
        is_mixture: whether `ffn` is a mixture of experts of the backbone's own. It runs as in inference, without noise
            in its router, in training too.

    Attributes:
        is_added: whether the new experts are added to expert 0's output (`experts.py`).
        top_k: K.
        conditional_gate: where all tokens share expert 0, the gate that weighs the routed experts 1..N-1.
    """

    def __init__(
        self, ffn: nn.Module, config: Any, layer_index: int, control: RoutingControl, *, is_mixture: bool = False
    ) -> None:
        super().__init__(config, layer_index, control)
        num_experts, hidden_size = config.num_experts_per_layer[layer_index], config.hidden_size
        others = range(1, num_experts)
        self.experts = nn.ModuleList([ffn, *(_new_expert(ffn, config, layer_index, number) for number in others)])
        self.is_added, self.is_mixture = isinstance(self.experts[1], AddedExpert), is_mixture
        has_choice = not self.exclusive or any(end - first > 1 for first, end in self.expert_ranges)
        self.router = Router(hidden_size, num_experts) if has_choice else None
        classes = len(self.experts_after_expansion)
        self.classifier = Classifier(hidden_size, classes) if layer_index in config.classifier_layers else None
        self.conditional_gate = ConditionalGate(hidden_size, 1) if config.conditional_routing else None
        self.top_k = min(config.router_top_k, num_experts - config.conditional_routing) if has_choice else 1

    def train(self, mode: bool = True) -> "ExpandedFFN":
        super().train(mode)
        if self.is_mixture:
            self.experts[0].eval()
        return self

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """`[..., h] -> [..., h]`. `residual` is for BLOOM, whose FFN adds the residual itself; it is added once. What a
        mixture returns beside its output (its router's logits) comes with it.

        Raises:
            ValueError: `use_expert` names an expert that the layer does not have.
        """
        request, x_Th = self.control.request, hidden_states.reshape(-1, hidden_states.shape[-1])
        classifier_logits_TC = None if self.classifier is None else self.classifier(x_Th)
        known = self._known(request, hidden_states, classifier_logits_TC)
        if request.change_logits is not None:
            classifier_logits_TC = None
        single_expert = self._single_expert(request, known)
        routing = None
        # In training a recomputation, which nothing captures, must save what the first pass saved.
        if self.router is not None and (single_expert is None or self.training or request.capture is not None):
            routing = self.route(request, x_Th, known, classifier_logits_TC, single_expert)
            if request.capture is not None:
                request.capture.layers[self.layer_index] = routing
        if single_expert is not None:
            return self._run_single(single_expert, hidden_states, residual, self.training)
        if routing is None:
            y = self._run_classes(known, hidden_states, residual)  # type: ignore[arg-type]
        elif self.is_added:
            y = self._run_added(hidden_states, residual, routing)
        else:
            y = self._run_chosen(request, known, hidden_states, residual, routing)
        return y

    def _run_chosen(
        self, request: RoutingRequest, known: TokenClasses | None, hidden_states: torch.Tensor,
        residual: torch.Tensor | None, routing: LayerRouting,
    ) -> Any:  # fmt: skip
        """The weighted sum of each token's experts; a token that goes home gets expert 0's output."""
        home_T = self._home(request, known)
        changes = self.training and request.change_choice is not None
        takes_all = self.top_k == len(self.experts) and routing.allowed is None and not changes
        index_TK = None if takes_all else routing.experts
        if index_TK is not None and home_T is not None:
            index_TK = index_TK.masked_fill(home_T.unsqueeze(-1), len(self.experts))
        y_Th = dispatch(
            self.experts, hidden_states, routing.weights, index_TK, residual is not None, self.training,
            self.model_config._experts_implementation,
        )  # fmt: skip
        y = y_Th.view(hidden_states.shape)
        y = y if residual is None else y + residual
        # On all tokens, as in the dense layer: on a part of them a matrix product may round in another way.
        return y if home_T is None else chosen(home_T, self._run_single(0, hidden_states, residual, False), y)

    def _run_classes(self, known: TokenClasses, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        """Each class's expert on all tokens, with the dense layer's shapes; every token gets its own class's output."""
        # In training all experts are in the graph, so that all ranks have the same graph.
        present = None if self.training else known.present
        y = self._run_single(0, hidden_states, residual, training=False)
        for number in range(len(self.experts_after_expansion)) if present is None else present:
            if expert := self.expert_of(number):
                own = self._run_single(expert, hidden_states, residual, training=False)
                y = chosen(known.class_T == number, own, y)
        return y

    def _run_added(self, hidden_states: torch.Tensor, residual: torch.Tensor | None, routing: LayerRouting) -> Any:
        """The output of a layer with added experts. A token's weights sum to 1, hence `y = E_0(x) + sum_e w_e D_e(x)`:
        the block runs once for all tokens, called as the dense layer calls it, and a token that takes expert 0 alone
        gets its bits. Whatever expert 0 returns beside its output is passed on."""
        added = list(self.experts)[1:]
        # In the list without expert 0 the others are one number lower, and "no expert", at its end, is expert 0 too.
        others_TK = torch.where(routing.experts == 0, len(added), routing.experts - 1)
        y_Th = dispatch(added, hidden_states, routing.weights, others_TK, False, self.training)
        return _plus(_run_whole(self.experts[0], hidden_states, residual), y_Th)

    def _run_single(
        self, number: int, hidden_states: torch.Tensor, residual: torch.Tensor | None, training: bool
    ) -> Any:
        """One expert on all tokens, called as the dense layer calls its FFN, so that the output is the same bit for
        bit. The output includes the residual, if the FFN takes one."""
        nothing_0h = hidden_states.flatten(0, -2)[:0]  # in training idle experts stay in the graph, as in `run_in_turn`
        y = _run_whole(self.experts[0 if self.is_added else number], hidden_states, residual)
        if self.is_added:
            y = _plus(y, self.experts[number](hidden_states)) if number else y
            return _plus(y, sum(other(nothing_0h).sum() for other in list(self.experts)[1:])) if training else y
        if training:
            idle = [run_expert(other, nothing_0h, residual is not None) for other in self.experts]
            y = torch.cat([y.flatten(0, -2), *idle]).view(y.shape)
        return y

    def route(
        self, request: RoutingRequest, x_Th: torch.Tensor, known: TokenClasses | None,
        classifier_logits_TC: torch.Tensor | None, single_expert: int | None,
    ) -> LayerRouting:  # fmt: skip
        """The routing of each token, from its hidden states `[T, h]` and what `_known` says of its language;
        `single_expert` is the expert that all tokens take."""
        logits_TN, class_T = self.router(x_Th), None if known is None else known.class_T  # type: ignore[misc]
        conditional = self.conditional_gate is not None
        if request.change_logits is not None:
            shared_TN, routed_TN = logits_TN.tensor_split([int(conditional)], dim=-1)
            logits_TN = torch.cat([shared_TN, request.change_logits(routed_TN, self.top_k)], -1)
        if self.conditional_gate is not None:
            logits_TN = with_shared_expert(logits_TN, self.conditional_gate(x_Th).squeeze(-1))
        allowed_TN = None if request.expert is not None else self._allowed(request, logits_TN, class_T)
        if single_expert is not None:
            weights_TK = torch.ones_like(logits_TN[:, :1])
            index_TK = torch.full_like(weights_TK, single_expert, dtype=torch.long)
        else:
            weights_TK, index_TK = self._choose(request, logits_TN, allowed_TN)
        given_T = class_T if self.classifier is None else None
        return LayerRouting(
            logits_TN, classifier_logits_TC, self.top_k, weights_TK, index_TK, allowed_TN, conditional, given_T,
            max(end - first for first, end in self.expert_ranges) if self.exclusive else None,
        )  # fmt: skip

    def _home(self, request: RoutingRequest, known: TokenClasses | None) -> torch.Tensor | None:
        """`[T]` bool, the tokens that the gate or the user sends to expert 0; None where there are none, or expert 0
        has the dense layer's shapes anyway, as all experts run on all tokens."""
        if known is None or self.training or (self.classifier is not None and request.classes is None):
            return None
        if len(self.experts) <= self.top_k or (known.present is not None and 0 not in known.present):
            return None
        return known.class_T == 0

    def _allowed(
        self, request: RoutingRequest, logits_TN: torch.Tensor, class_T: torch.Tensor | None
    ) -> torch.Tensor | None:
        """`[T, N]` bool: the experts that each token may use; None for all."""
        allowed_TN = None
        if class_T is not None:
            allowed_TN = experts_allowed(class_T, self.expert_ranges, self.exclusive)
        if request.expansion is None or self.exclusive:
            return allowed_TN
        earlier_N = (
            torch.arange(logits_TN.shape[-1], device=logits_TN.device)
            < (self.experts_after_expansion[request.expansion])
        )
        return earlier_N.expand_as(logits_TN) if allowed_TN is None else allowed_TN & earlier_N

    def _choose(
        self, request: RoutingRequest, logits_TN: torch.Tensor, allowed_TN: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and expert indices of each token."""
        conditional = self.conditional_gate is not None
        routed_TN = logits_TN[:, int(conditional) :]
        routed_allowed_TN, closed_T = allowed_TN, None
        if conditional and allowed_TN is not None:
            routed_allowed_TN = allowed_TN[:, 1:]
            closed_T = ~routed_allowed_TN.any(-1)
            routed_allowed_TN = routed_allowed_TN | closed_T.unsqueeze(-1)
        choice = Choice(*select_experts(routed_TN, self.top_k, routed_allowed_TN), routed_TN.shape[-1], closed_T)
        if self.training and request.change_choice is not None:
            choice = request.change_choice(self.layer_index, choice)
        if not conditional:
            return choice.weights, choice.experts
        return beside_shared(logits_TN, choice.weights, choice.experts, choice.closed)


def _run_whole(expert: nn.Module, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
    return expert(hidden_states, *(() if residual is None else (residual,)))


def _plus(output: Any, change: Any) -> Any:
    """Expert 0's output with a change of its hidden states, `[T, h]` or a number."""
    if isinstance(output, tuple):
        return _plus(output[0], change), *output[1:]
    return output + (change.view(output.shape) if change.dim() else change).to(output.dtype)


def _new_expert(ffn: nn.Module, config: Any, layer: int, number: int) -> nn.Module:
    kind = config.kind_of(layer, number)
    if kind.name == "lora":
        return lora_expert(ffn, kind.rank, kind.alpha)
    if kind.name == "added":
        return AddedExpert(config.hidden_size, kind.width, activation_of(config))
    return copy_ffn(ffn)
