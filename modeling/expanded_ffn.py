"""One expanded layer: routes each token, and runs the experts.

Shape suffixes as in `routing.py`.
"""

from typing import Any

import torch
from torch import nn

from .dispatch import dispatch, is_traced, run_expert
from .experts import AddedExpert, activation_of, copy_ffn, lora_expert
from .prefix_gate import PrefixRule, RunningText, TextMarks
from .routing import (
    Choice,
    Classifier,
    ConditionalGate,
    LayerRouting,
    Router,
    beside_shared,
    experts_allowed,
    experts_of_classes,
    select_experts,
    token_classes,
    with_shared_expert,
)
from .routing_control import RoutingControl


class ExpandedFFN(nn.Module):
    """A layer's FFN grown into N experts (`experts[0]` is the original), a router and, optionally, a classifier.

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
        experts_of_class: number of experts before any expansion (1), and after each expansion.
        experts_of_classes: the experts that each class may use besides expert 0, as `(first, end)`.
        conditional_gate: where all tokens share expert 0, the gate that weighs the routed experts 1..N-1.
        prefix_rule: how the model's prefix gates judge; None if classifiers judge single tokens.
    """

    def __init__(
        self, ffn: nn.Module, config: Any, layer_index: int, control: RoutingControl, *, is_mixture: bool = False
    ) -> None:
        super().__init__()
        num_experts, hidden_size = config.num_experts_per_layer[layer_index], config.hidden_size
        others = range(1, num_experts)
        self.experts = nn.ModuleList([ffn, *(_new_expert(ffn, config, layer_index, number) for number in others)])
        self.is_added, self.is_mixture = isinstance(self.experts[1], AddedExpert), is_mixture
        self.router = Router(hidden_size, num_experts)
        earlier = [counts[layer_index] for counts in getattr(config, "earlier_experts_per_layer", None) or ()]
        self.experts_of_class = (1, *earlier, num_experts)
        self.experts_of_classes = experts_of_classes(self.experts_of_class, getattr(config, "packs", None) or ())
        self.classifier = None
        if layer_index in config.classifier_layers:
            languages = getattr(config, "gate_languages", None)
            of_classes = None if languages is None else [len(codes) for codes in languages]
            self.classifier = Classifier(hidden_size, len(self.experts_of_class), of_classes)
        self.conditional_gate = ConditionalGate(hidden_size, 1) if config.conditional_routing else None
        self.prefix_rule = PrefixRule.of(config)
        self.top_k = min(config.router_top_k, num_experts - config.conditional_routing)
        self.layer_index = layer_index
        self.control = control
        self.model_config = config

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
        x_Th = hidden_states.reshape(-1, hidden_states.shape[-1])
        alone = self.control.only_expert
        if alone is not None and alone >= len(self.experts):
            raise ValueError(f"Layer {self.layer_index} has no expert {alone}; give one of 0..{len(self.experts) - 1}.")
        text = self._text(hidden_states)
        if alone is not None and self.control.capture is None and not self.training:
            # Not in training: a recomputation, which nothing captures, must save the tensors that the first pass saved.
            if self.classifier is not None and text is not None:
                text.note(self.layer_index, self.classifier(x_Th))  # for the tokens that follow
            return self._run_alone(alone, hidden_states, residual, self.training)
        class_T, classifier_logits_TC, home_T = self._classes(x_Th, text)
        all_home = self._is_all_home(class_T)
        if all_home and self.control.capture is None:
            return self._run_alone(0, hidden_states, residual, training=False)
        routing = self.route(x_Th, class_T, classifier_logits_TC)
        if self.control.capture is not None:
            self.control.capture.layers[self.layer_index] = routing
        alone = 0 if all_home else alone
        if alone is not None:
            return self._run_alone(alone, hidden_states, residual, self.training)
        if self.is_added:
            return self._run_added(hidden_states, residual, routing)
        changes = self.training and self.control.change_choice is not None
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
        if home_T is None:
            return y
        # On all tokens, as in the dense layer: on a part of them a matrix product may round in another way.
        base = self._run_alone(0, hidden_states, residual, training=False)
        return torch.where(home_T.view(hidden_states.shape[:-1]).unsqueeze(-1), base, y)

    def _run_added(self, hidden_states: torch.Tensor, residual: torch.Tensor | None, routing: LayerRouting) -> Any:
        """The output of a layer with added experts. A token's weights sum to 1, hence `y = E_0(x) + sum_e w_e D_e(x)`:
        the block runs once for all tokens, called as the dense layer calls it, and a token that takes expert 0 alone
        gets its bits. Whatever expert 0 returns beside its output is passed on."""
        added = list(self.experts)[1:]
        # In the list without expert 0 the others are one number lower, and "no expert", at its end, is expert 0 too.
        others_TK = torch.where(routing.experts == 0, len(added), routing.experts - 1)
        y_Th = dispatch(added, hidden_states, routing.weights, others_TK, False, self.training)
        return _plus(_run_whole(self.experts[0], hidden_states, residual), y_Th)

    def _run_alone(
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
        self, x_Th: torch.Tensor, class_T: torch.Tensor | None, classifier_logits_TC: torch.Tensor | None
    ) -> LayerRouting:
        """The routing of each token, from its hidden states `[T, h]` and what `_classes` says of its language."""
        logits_TN = self.router(x_Th)
        conditional = self.conditional_gate is not None
        if self.control.change_logits is not None:
            shared_TN, routed_TN = logits_TN.tensor_split([int(conditional)], dim=-1)
            logits_TN = torch.cat([shared_TN, self.control.change_logits(routed_TN, self.top_k)], -1)
        if self.conditional_gate is not None:
            logits_TN = with_shared_expert(logits_TN, self.conditional_gate(x_Th).squeeze(-1))
        if self.control.only_expert is not None:
            ones_T1 = torch.ones_like(logits_TN[:, :1])
            allowed_TN, weights_TK = None, ones_T1
            index_TK = torch.full_like(ones_T1, self.control.only_expert, dtype=torch.long)
        else:
            allowed_TN = self._allowed(logits_TN, class_T)
            weights_TK, index_TK = self._choose(logits_TN, allowed_TN)
        rule = self.prefix_rule if self.training and self.classifier is not None else None
        return LayerRouting(
            logits_TN, classifier_logits_TC, self.top_k, weights_TK, index_TK, allowed_TN, conditional, rule
        )

    def _text(self, hidden_states: torch.Tensor) -> RunningText | None:
        """The texts that prefix gates judge; without the model's own, each sequence is a text."""
        if self.prefix_rule is None or self.training:
            return None
        if self.control.text is not None or self.classifier is None:
            return self.control.text
        B, S = hidden_states.shape[:-1] if hidden_states.dim() == 3 else (1, hidden_states.shape[0])
        return RunningText(self.prefix_rule, TextMarks.of((B, S), hidden_states.device))

    def _classes(
        self, x_Th: torch.Tensor, text: RunningText | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """What is known of the tokens' languages before they are routed.

        Returns:
            The class of each token, `[T]`: the one that the user gives its sequence, or else, but in training, the one
            of the layer's classifier, or else the one of an earlier layer's gate; the classifier's logits, `[T, C]`;
            and the tokens that the user sends to expert 0, `[T]` bool, unless it has the dense layer's shapes anyway.
            Each may be None.
        """
        logits_TC = None if self.classifier is None else self.classifier(x_Th)
        if logits_TC is not None and text is not None:
            logits_TC = text.judge(self.layer_index, logits_TC)
        judged_TC = logits_TC
        if judged_TC is None and text is not None and text.log_odds_TC is not None:
            judged_TC = text.log_odds_TC.to(x_Th.device)
        if self.control.change_logits is not None:
            logits_TC = judged_TC = None
        class_T = None if self.training or judged_TC is None else token_classes(judged_TC)
        home_T = None
        if (told := self.control.classes) is not None:
            last = len(self.experts_of_class) - 1
            class_T = torch.full_like(x_Th[:, 0], last, dtype=torch.long) if class_T is None else class_T
            # Beams of a sequence follow one another.
            each = x_Th.shape[0] // len(told)
            told_B = torch.tensor([-1 if number is None else number for number in told], device=x_Th.device)
            told_T = told_B.repeat_interleave(each)
            class_T = torch.where(told_T < 0, class_T, told_T)
            # Where all experts run on all tokens, expert 0 has the dense layer's shapes already.
            home_T = None if len(self.experts) <= self.top_k or 0 not in told else told_T == 0
        return class_T, logits_TC, home_T

    def _is_all_home(self, class_T: torch.Tensor | None) -> bool:
        """Whether expert 0 alone runs for all tokens, as far as the host knows without waiting for a device."""
        if self.training or self.control.only_expert is not None:
            return False
        if self.control.expansion == 0:
            return True
        can_read = class_T is not None and class_T.device.type == "cpu" and not is_traced(class_T)
        return can_read and not class_T.any()  # type: ignore[union-attr]

    def _allowed(self, logits_TN: torch.Tensor, class_T: torch.Tensor | None) -> torch.Tensor | None:
        """`[T, N]` bool: the experts that each token may use; None for all."""
        allowed_TN = None if class_T is None else experts_allowed(class_T, self.experts_of_classes)
        if self.control.expansion is None:
            return allowed_TN
        earlier_N = (
            torch.arange(logits_TN.shape[-1], device=logits_TN.device) < (self.experts_of_class[self.control.expansion])
        )
        return earlier_N.expand_as(logits_TN) if allowed_TN is None else allowed_TN & earlier_N

    def _choose(self, logits_TN: torch.Tensor, allowed_TN: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and expert indices of each token."""
        conditional = self.conditional_gate is not None
        routed_TN = logits_TN[:, int(conditional) :]
        routed_allowed_TN, closed_T = allowed_TN, None
        if conditional and allowed_TN is not None:
            routed_allowed_TN = allowed_TN[:, 1:]
            closed_T = ~routed_allowed_TN.any(-1)
            routed_allowed_TN = routed_allowed_TN | closed_T.unsqueeze(-1)
        choice = Choice(*select_experts(routed_TN, self.top_k, routed_allowed_TN), routed_TN.shape[-1], closed_T)
        if self.training and self.control.change_choice is not None:
            choice = self.control.change_choice(self.layer_index, choice)
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
