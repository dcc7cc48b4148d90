"""One expanded layer: the class of each token, its routing, and the run of its experts.

Shape suffixes as in `routing.py`.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .dispatch import dispatch, is_traced, run_expert
from .routing import (
    Choice,
    Classifier,
    LayerRouting,
    Router,
    TokenClasses,
    expert_ranges,
    experts_allowed,
    select_experts,
    token_classes,
)
from .routing_control import RoutingControl, RoutingRequest


class ExpandedLayer(nn.Module):
    """A layer with N experts, of which expert 0 is the layer as it was.

    Args:
        config: the model's configuration.
        layer_index: the layer's number in the model, by which the configuration knows it.
        control: the model's `RoutingControl`.

    Attributes:
        experts: the N experts.
        experts_after_expansion: number of experts before any expansion (1), and after each expansion.
        expert_ranges: the experts that each class may use, as `(first, end)`, besides expert 0 or, with exclusive
            experts, in its place.
        router, classifier: None where the layer has none.
    """

    experts: nn.ModuleList
    is_mixture, top_k = False, 1
    in_turn = False  # whether its experts run one after the other on any shapes
    shares_expert_0 = False  # whether all tokens take expert 0, outside the routed set

    def __init__(self, config: Any, layer_index: int, control: RoutingControl) -> None:
        super().__init__()
        self.experts_after_expansion = (1, *(counts[layer_index] for counts in config.counts_of_expansions))
        self.exclusive = bool(config.exclusive_experts)
        self.expert_ranges = expert_ranges(self.experts_after_expansion, self.exclusive)
        self.layer_index, self.control, self.model_config = layer_index, control, config
        self.router: Any = None
        self.classifier: Any = None

    @property
    def scorers(self) -> list[nn.Module]:
        """Its modules beside the experts: the router, the classifier, and those of parts."""
        return [module for module in self.children() if hasattr(module, "init_part")]

    def expert_of(self, number: int) -> int | None:
        """The expert that a class's tokens take alone; None if they have several."""
        first, end = self.expert_ranges[number]
        if end <= first:
            return 0
        return first if self.exclusive and end - first == 1 else None


class ExpandedFFN(ExpandedLayer):
    """A layer's FFN grown into N experts (`experts[0]` is the original), a router where a token has a choice and,
    optionally, a classifier.

    Args:
        ffn: the backbone's FFN, which becomes expert 0 and the template of the other experts.
        is_mixture: whether `ffn` is a mixture of experts of the backbone's own. It runs as in inference, without noise
            in its router, in training too.

    Attributes:
        top_k: K.
    """

    def __init__(
        self, ffn: nn.Module, config: Any, layer_index: int, control: RoutingControl, *, is_mixture: bool = False
    ) -> None:
        super().__init__(config, layer_index, control)
        count, classes = config.num_experts_per_layer[layer_index], len(self.experts_after_expansion)
        self.experts = nn.ModuleList([ffn, *(config.make_expert(layer_index, n)(ffn) for n in range(1, count))])
        self.is_mixture = is_mixture
        has_choice = not self.exclusive or any(end - first > 1 for first, end in self.expert_ranges)
        self.router = Router(config.hidden_size, count) if has_choice else None
        self.classifier = Classifier(config.hidden_size, classes) if layer_index in config.classifier_layers else None
        self.top_k = min(config.router_top_k, count - self.shares_expert_0) if has_choice else 1

    def train(self, mode: bool = True) -> "ExpandedFFN":
        super().train(mode)
        if self.is_mixture:
            self.experts[0].eval()
        return self

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """`[..., h] -> [..., h]`. `residual` is for BLOOM, whose FFN adds the residual itself; it counts once.

        Raises:
            ValueError: `use_expert` names an expert that the layer does not have.
        """
        request, x_Th = self.control.request, hidden_states.reshape(-1, hidden_states.shape[-1])
        logits_TC = None if self.classifier is None else self.classifier(x_Th)
        known = self._known(request, hidden_states, logits_TC)
        single, routing = self._single_expert(request, known), None
        # In training a recomputation, which nothing captures, must save what the first pass saved.
        if self.router is not None and (single is None or self.training or request.capture is not None):
            routing = self.route(request, x_Th, known, None if request.change_logits else logits_TC, single)
            if request.capture is not None:
                request.capture.layers[self.layer_index] = routing
        if single is not None:
            return self._run_single(single, hidden_states, residual, self.training)
        if routing is None:
            return self._run_classes(known, hidden_states, residual)  # type: ignore[arg-type]
        home_T = None if known is None else self._home(request, known)
        return self._run_chosen(routing, home_T, hidden_states, residual)

    # The class of each token.

    def _known(
        self, request: RoutingRequest, hidden_states: torch.Tensor, logits_TC: torch.Tensor | None
    ) -> TokenClasses | None:
        """The tokens' classes before they are routed; None where nothing says them.

        A class is the one that is told (by the user, a part that judges, or a batch), or else the layer's classifier's,
        or else, with exclusive experts or beside sequences that are told, that of `RoutingControl.untold`.
        """
        if request.change_logits is not None and not self.exclusive:  # whose classes are no choice of a router
            return None
        rows, known = request.classes, None
        if request.expert is None and (rows is None or not rows.complete):
            known = self._told(request, hidden_states)
            if known is None and logits_TC is not None and not self.training and not request.as_in_training:
                class_T = token_classes(logits_TC)
                can_read = class_T.device.type == "cpu" and not is_traced(class_T)
                known = TokenClasses(class_T, [0] if can_read and not class_T.any() else None)
        if known is None and (rows is not None or self.exclusive):
            number = self.control.untold(len(self.experts_after_expansion) - 1, self.training)
            known = TokenClasses(torch.full_like(hidden_states[..., 0], number, dtype=torch.long).flatten(), [number])
        if rows is not None and known is not None:
            known = rows.over(known)
        if known is not None and self.exclusive and (most := request.expansion) is not None:
            present = None if known.present is None else sorted({min(number, most) for number in known.present})
            known = TokenClasses(known.class_T.clamp(max=most), present)
        return known

    def _told(self, request: RoutingRequest, hidden_states: torch.Tensor) -> TokenClasses | None:
        """The classes of a pass's tokens that a part judged or, for exclusive experts in a Trainer, those of the
        batch."""
        if (judged := self.control.judged) is not None:
            return judged.on(hidden_states.device)
        if (given := request.token_classes) is None or not self.exclusive:
            return None
        missing = hidden_states.shape[:-1].numel() - len(given.class_T)
        if missing <= 0 or hidden_states.dim() != 3:
            return None if missing else given
        # Virtual tokens of prompt tuning, which stand before each row: they have its first token's class.
        class_BS = given.class_T.view(len(hidden_states), -1)
        virtual_BV = class_BS[:, :1].expand(-1, hidden_states.shape[1] - class_BS.shape[1])
        return TokenClasses(torch.cat([virtual_BV, class_BS], 1).flatten(), given.present)

    def _single_expert(self, request: RoutingRequest, known: TokenClasses | None) -> int | None:
        """The expert that runs alone for every token, as far as the host knows; None if several may run."""
        if (forced := request.expert) is not None:
            if forced >= len(self.experts):
                raise ValueError(f"Layer {self.layer_index} has no expert {forced}.")
            return forced
        if request.expansion == 0 and not self.training:
            return 0
        return None if known is None or known.only is None else self.expert_of(known.only)

    def _home(self, request: RoutingRequest, known: TokenClasses) -> torch.Tensor | None:
        """`[T]` bool, the tokens that are sent to expert 0; None where there are none, or expert 0 has the dense
        layer's shapes anyway, as all experts run on all tokens."""
        if self.training or (self.classifier is not None and request.classes is None):
            return None
        if len(self.experts) <= self.top_k or (known.present is not None and 0 not in known.present):
            return None
        return known.class_T == 0

    # Their experts.

    def score(self, request: RoutingRequest, x_Th: torch.Tensor) -> torch.Tensor:
        """The router's logits, `[T, N]`."""
        logits_TN, first = self.router(x_Th), int(self.shares_expert_0)
        if request.change_logits is None:
            return logits_TN
        return torch.cat([logits_TN[:, :first], request.change_logits(logits_TN[:, first:], self.top_k)], -1)

    def route(
        self, request: RoutingRequest, x_Th: torch.Tensor, known: TokenClasses | None, logits_TC: torch.Tensor | None,
        single: int | None,
    ) -> LayerRouting:  # fmt: skip
        """The routing of each token, from its hidden states `[T, h]` and what `_known` says of its language; `single`
        is the expert that all tokens take."""
        logits_TN, class_T = self.score(request, x_Th), None if known is None else known.class_T
        allowed_TN = None
        if request.expert is None and class_T is not None:
            allowed_TN = experts_allowed(class_T, self.expert_ranges, self.exclusive)
        if request.expert is None and request.expansion is not None and not self.exclusive:
            number_N = torch.arange(logits_TN.shape[-1], device=logits_TN.device)
            earlier_N = number_N < self.experts_after_expansion[request.expansion]
            allowed_TN = earlier_N.expand_as(logits_TN) if allowed_TN is None else allowed_TN & earlier_N
        if single is None:
            choice = self.choose(request, logits_TN, allowed_TN)
            weights_TK, index_TK = choice.weights, choice.experts
        else:
            weights_TK = torch.ones_like(logits_TN[:, :1])
            index_TK = torch.full_like(weights_TK, single, dtype=torch.long)
        given_T = class_T if self.classifier is None else None
        most = max(end - first for first, end in self.expert_ranges) if self.exclusive else None
        return LayerRouting(
            logits_TN, logits_TC, self.top_k, weights_TK, index_TK, allowed_TN, self.shares_expert_0, given_T, most
        )

    def choose(
        self, request: RoutingRequest, logits_TN: torch.Tensor, allowed_TN: torch.Tensor | None,
        closed_T: torch.Tensor | None = None,
    ) -> Choice:  # fmt: skip
        """The experts of each token, and their weights."""
        choice = Choice(*select_experts(logits_TN, self.top_k, allowed_TN), logits_TN.shape[-1], closed_T)
        if self.training and request.change_choice is not None:
            choice = request.change_choice(self.layer_index, choice)
        return choice

    def _run_chosen(
        self, routing: LayerRouting, home_T: torch.Tensor | None, hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> Any:  # fmt: skip
        """The weighted sum of each token's experts; a token that goes home gets expert 0's output."""
        changes = self.training and self.control.request.change_choice is not None
        takes_all = self.top_k == len(self.experts) and routing.allowed is None and not changes
        index_TK = None if takes_all else routing.experts
        if index_TK is not None and home_T is not None:
            index_TK = index_TK.masked_fill(home_T.unsqueeze(-1), len(self.experts))
        has_residual = residual is not None
        y_Th = dispatch(
            self.experts, hidden_states, routing.weights, index_TK, has_residual, self.training, self.in_turn
        )
        y = y_Th.view(hidden_states.shape)
        y = y if residual is None else y + residual
        # On all tokens, as in the dense layer: on a part of them a matrix product may round in another way.
        return y if home_T is None else chosen(home_T, self._run_single(0, hidden_states, residual), y)

    def _run_classes(self, known: TokenClasses, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        """Each class's expert on all tokens, with the dense layer's shapes; every token gets its own class's output."""
        # In training all experts are in the graph, so that all ranks have the same graph.
        present = None if self.training else known.present
        y = self._run_single(0, hidden_states, residual)
        for number in range(len(self.experts_after_expansion)) if present is None else present:
            if expert := self.expert_of(number):
                y = chosen(known.class_T == number, self._run_single(expert, hidden_states, residual), y)
        return y

    def _run_single(
        self, number: int, hidden_states: torch.Tensor, residual: torch.Tensor | None, training: bool = False
    ) -> Any:
        """One expert on all tokens, called as the dense layer calls its FFN, so that the output is the same bit for
        bit. The output includes the residual, if the FFN takes one."""
        y = run_whole(self.experts[number], hidden_states, residual)
        if training:  # idle experts stay in the graph, as in `run_in_turn`
            nothing_0h = hidden_states.flatten(0, -2)[:0]
            idle = [run_expert(other, nothing_0h, residual is not None) for other in self.experts]
            y = torch.cat([y.flatten(0, -2), *idle]).view(y.shape)
        return y


def run_whole(expert: nn.Module, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
    """An expert's output, called as the dense layer calls its FFN."""
    return expert(hidden_states) if residual is None else expert(hidden_states, residual)


def chosen(mask_T: torch.Tensor, yes: Any, no: Any) -> Any:
    """Of two outputs, the first one's hidden states for the tokens of a mask, `[T]` bool."""
    if isinstance(yes, tuple):
        return chosen(mask_T, yes[0], no[0]), *yes[1:]
    return torch.where(mask_T.view(yes.shape[:-1]).unsqueeze(-1), yes, no)


def shared_config(ffn: nn.Module) -> dict[int, Any]:
    """The second argument that makes `copy.deepcopy` of an FFN share its configuration: a later switch of the
    attention implementation must reach all copies."""
    return {id(value): value for value in vars(ffn).values() if isinstance(value, PreTrainedConfig)}


def copy_ffn(ffn: nn.Module) -> nn.Module:
    """A copy of a backbone's FFN that shares its configuration."""
    memo = shared_config(ffn)
    # While DeepSpeed's ZeRO-3 loads a model, a parameter is an empty shell (`ds_shape` is its shape), which
    # `copy.deepcopy` cannot copy. Copies are made whole, to be loaded later, and are then passed to ZeRO-3.
    shells: list[Any] = [parameter for parameter in ffn.parameters() if hasattr(parameter, "ds_shape")]
    for shell in shells:
        memo[id(shell)] = nn.Parameter(torch.empty(shell.ds_shape, dtype=shell.dtype, device=shell.device))
    copied = copy.deepcopy(ffn, memo)
    if shells:
        shells[0].convert_to_zero_parameters(param_list=[memo[id(shell)] for shell in shells])
    return copied
