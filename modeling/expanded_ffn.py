"""One expanded layer: routes each token, and runs the experts.

Shape suffixes as in `routing.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .added_experts import AddedExpert, run_added, run_one_added
from .dispatch import dispatch, is_traced, run_alone
from .experts import copy_ffn
from .plain_ffn import plain_form
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
        hidden_size: h.
        num_experts: N >= 2.
        top_k: K.
        layer_index: this layer's number in the decoder.
        has_classifier: whether a routing classifier precedes the router.
        control: the model's `RoutingControl`.
        earlier_counts: number of the layer's experts after each expansion before the last.
        conditional: whether all tokens share expert 0, and a gate weighs the routed experts 1..N-1.
        new_expert: function that makes a further expert from `ffn` and the expert's number; a copy by default.
        prefix_rule: how the model's prefix gates judge; None if classifiers judge single tokens.
        packs: number of expansions of each language pack.
        config: the model's configuration, whose `experts_implementation` says how the experts run.
        gate_languages: number of languages of each class, where the classifier is a gate that tells languages apart.
        is_mixture: whether `ffn` is a mixture of experts of the backbone's own. It runs as in inference, without noise
            in its router, in training too.

    Attributes:
        is_added: whether the new experts are added to expert 0's output (`added_experts.py`).
        experts_of_class: number of experts before any expansion (1), and after each expansion.
        experts_of_classes: the experts that each class may use besides expert 0, as `(first, end)`.
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
        new_expert: Callable[[nn.Module, int], nn.Module] | None = None,
        prefix_rule: PrefixRule | None = None,
        packs: Sequence[int] = (),
        config: Any = None,
        gate_languages: Sequence[int] | None = None,
        is_mixture: bool = False,
    ) -> None:
        super().__init__()
        others = range(1, num_experts)
        new = [copy_ffn(ffn) if new_expert is None else new_expert(ffn, number) for number in others]
        self.experts = nn.ModuleList([ffn, *new])
        self.is_added, self.is_mixture = isinstance(self.experts[1], AddedExpert), is_mixture
        self.form = None if self.is_added else plain_form(ffn)
        self.router = Router(hidden_size, num_experts)
        self.experts_of_class = (1, *earlier_counts, num_experts)
        self.experts_of_classes = experts_of_classes(self.experts_of_class, packs)
        classes = len(self.experts_of_class)
        self.classifier = Classifier(hidden_size, classes, gate_languages) if has_classifier else None
        self.conditional_gate = ConditionalGate(hidden_size, 1) if conditional else None
        self.prefix_rule = prefix_rule
        self.top_k = min(top_k, num_experts - conditional)
        self.layer_index = layer_index
        self.control = control
        self.model_config = config

    @property
    def _implementation(self) -> str | None:
        return None if self.model_config is None else self.model_config._experts_implementation

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
                text.judge(self.layer_index, self.classifier(x_Th))  # for the tokens that follow
            return self._run_alone(alone, hidden_states, residual, self.training)
        classified = self._classify(x_Th, text)
        is_home = self._is_all_home(classified[0])
        if is_home and self.control.capture is None:
            return self._run_alone(0, hidden_states, residual, training=False)
        routing = self.route(x_Th, text, classified)
        if self.control.capture is not None:
            self.control.capture.layers[self.layer_index] = routing
        alone = 0 if is_home else alone
        if alone is not None:
            return self._run_alone(alone, hidden_states, residual, self.training)
        if self.is_added:
            return run_added(self.experts, hidden_states, residual, routing.weights, routing.experts, self.training)
        home_T = self._said_home(x_Th)
        index_TK = routing.experts
        if home_T is not None:
            index_TK = index_TK.masked_fill(home_T.unsqueeze(-1), len(self.experts))
        y_Th = dispatch(
            self.experts, hidden_states, routing.weights, index_TK, residual is not None, self.training, self.form,
            self._implementation,
        )  # fmt: skip
        y = y_Th.view(hidden_states.shape)
        y = y if residual is None else y + residual
        if home_T is None:
            return y
        # On all tokens, as in the dense layer: on a part of them a matrix product may round in another way.
        base = self._run_alone(0, hidden_states, residual, training=False)
        return torch.where(home_T.view(hidden_states.shape[:-1]).unsqueeze(-1), base, y)

    def _run_alone(
        self, number: int, hidden_states: torch.Tensor, residual: torch.Tensor | None, training: bool
    ) -> Any:
        run = run_one_added if self.is_added else run_alone
        return run(self.experts, number, hidden_states, residual, training)

    def route(
        self,
        x_Th: torch.Tensor,
        text: RunningText | None = None,
        classified: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    ) -> LayerRouting:
        """The routing of each token, from its hidden states `[T, h]`.

        Args:
            text: the texts of the tokens, for a prefix gate; not in training, where its loss adds up the evidence.
            classified: the tokens' classes and the classifier's logits, if they are known already.
        """
        class_T, classifier_logits_TC = self._classify(x_Th, text) if classified is None else classified
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

    def _classify(
        self, x_Th: torch.Tensor, text: RunningText | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The class of each token `[T]`, by the user or the layer's classifier, and the classifier's logits `[T, C]`;
        None where there is none, in training no classes."""
        logits_TC = None if self.classifier is None else self.classifier(x_Th)
        if logits_TC is not None and text is not None:
            logits_TC = text.judge(self.layer_index, logits_TC)
        class_T = None if self.training else self._class_of_tokens(logits_TC, text)
        if self.control.change_logits is not None:
            logits_TC = class_T = None
        return self._said(x_Th, class_T), logits_TC

    def _is_all_home(self, class_T: torch.Tensor | None) -> bool:
        """Whether expert 0 alone runs for all tokens, as far as the host knows without waiting for a device."""
        if self.training or self.control.only_expert is not None:
            return False
        if self.control.expansion == 0:
            return True
        can_read = class_T is not None and class_T.device.type == "cpu" and not is_traced(class_T)
        return can_read and not class_T.any()  # type: ignore[union-attr]

    def _text(self, hidden_states: torch.Tensor) -> RunningText | None:
        """The texts that prefix gates judge; without the model's own, each sequence is a text."""
        if self.prefix_rule is None or self.training:
            return None
        if self.control.text is not None or self.classifier is None:
            return self.control.text
        B, S = hidden_states.shape[:-1] if hidden_states.dim() == 3 else (1, hidden_states.shape[0])
        return RunningText(self.prefix_rule, TextMarks.of((B, S), hidden_states.device))

    def _class_of_tokens(
        self, classifier_logits_TC: torch.Tensor | None, text: RunningText | None
    ) -> torch.Tensor | None:
        """`[T]`: each token's class by the layer's classifier, or by an earlier layer's gate; None without either."""
        if classifier_logits_TC is None and text is not None and text.log_odds_TC is not None:
            classifier_logits_TC = text.log_odds_TC.to(self.router.weight.device)
        return None if classifier_logits_TC is None else token_classes(classifier_logits_TC)

    def _said(self, x_Th: torch.Tensor, class_T: torch.Tensor | None) -> torch.Tensor | None:
        """`[T]`: the class that the user gives each token's sequence; `class_T` where the user gives none."""
        if self.control.classes is None:
            return class_T
        last = len(self.experts_of_class) - 1
        if class_T is None:
            class_T = torch.full_like(x_Th[:, 0], last, dtype=torch.long)
        said_T = self._of_tokens([-1 if number is None else number for number in self.control.classes], x_Th)
        return torch.where(said_T < 0, class_T, said_T)

    def _said_home(self, x_Th: torch.Tensor) -> torch.Tensor | None:
        """`[T]` bool: the tokens that the user sends to expert 0; None if there are none, or all experts run on all
        tokens, so that expert 0 has the dense layer's shapes."""
        if self.control.classes is None or 0 not in self.control.classes:
            return None
        if len(self.experts) <= self.top_k and self._implementation != "grouped_mm":
            return None
        return self._of_tokens([number == 0 for number in self.control.classes], x_Th)

    @staticmethod
    def _of_tokens(of_sequences: list, x_Th: torch.Tensor) -> torch.Tensor:
        """`[T]`: a value of each sequence, for each of its tokens. Beams of a sequence follow one another."""
        return torch.tensor(of_sequences, device=x_Th.device).repeat_interleave(x_Th.shape[0] // len(of_sequences))

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
