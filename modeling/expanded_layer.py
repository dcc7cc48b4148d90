"""What all expanded layers share: the experts of each class, and the class of each token.

Shape suffixes as in `routing.py`.
"""

from typing import Any

import torch
from torch import nn

from .dispatch import is_traced
from .language_gate import GatePass, GateRule, LanguageGate
from .routing import TokenClasses, expert_ranges, token_classes
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
        gate_rule: how the model's language gate judges; None without one.
        router, classifier, language_gate, conditional_gate: None where the layer has none.
    """

    experts: nn.ModuleList

    def __init__(self, config: Any, layer_index: int, control: RoutingControl) -> None:
        super().__init__()
        earlier = [counts[layer_index] for counts in getattr(config, "earlier_experts_per_layer", None) or ()]
        self.experts_after_expansion = (1, *earlier, config.num_experts_per_layer[layer_index])
        self.exclusive = bool(getattr(config, "exclusive_experts", False))
        self.expert_ranges = expert_ranges(self.experts_after_expansion, self.exclusive)
        self.gate_rule = GateRule.of(config)
        self.layer_index = layer_index
        self.control = control
        self.model_config = config
        self.is_mixture, self.top_k = False, 1
        self.router: Any = None
        self.classifier: Any = None
        self.language_gate: Any = None
        self.conditional_gate: Any = None

    def _own_gate(self) -> LanguageGate | None:
        rule = self.gate_rule
        has_gate = rule is not None and rule.layer == self.layer_index
        return LanguageGate(self.model_config.hidden_size, rule) if has_gate else None  # type: ignore[arg-type]

    def _known(
        self, request: RoutingRequest, hidden_states: torch.Tensor, logits_TC: torch.Tensor | None = None,
        judges: bool = True,
    ) -> TokenClasses | None:  # fmt: skip
        """The tokens' classes before they are routed; None where nothing says them.

        A class is the one that the user gives a sequence, or else the layer's own decision (`_own_classes`), or else,
        with exclusive experts or beside sequences that the user knows, the newest expansion's.

        Args:
            hidden_states: `[..., h]`, the input of the layer's FFN; of any part of it, where the gate does not judge.
            logits_TC: those of the layer's classifier.
            judges: whether the gate, if the layer has it, judges these hidden states; the layer's parts before its FFN
                are below the gate.
        """
        x_Th = hidden_states.reshape(-1, hidden_states.shape[-1])
        given, newest = request.classes, len(self.experts_after_expansion) - 1
        is_given = given is not None and None not in given
        is_known = is_given or request.expert is not None
        known = self._own_classes(request, x_Th, hidden_states, logits_TC, is_known, judges)
        if known is not None:  # the gate's layer may lie on another device
            known = TokenClasses(known.class_T.to(x_Th.device), known.present)
        if request.change_logits is not None and not self.exclusive:  # whose classes are no choice of a router
            return None
        if known is None and (given is not None or self.exclusive):
            known = TokenClasses(torch.full_like(x_Th[:, 0], newest, dtype=torch.long), [newest])
        if given is not None and known is not None:
            given_B = torch.tensor([-1 if number is None else number for number in given], device=x_Th.device)
            given_T = given_B.repeat_interleave(len(x_Th) // len(given))  # beams of a sequence follow one another
            others = [] if is_given else known.present
            present = None if others is None else sorted({number for number in (*given, *others) if number is not None})
            known = TokenClasses(torch.where(given_T < 0, known.class_T, given_T), present)
        if known is not None and self.exclusive and request.expansion is not None:
            most = request.expansion
            present = None if known.present is None else sorted({min(number, most) for number in known.present})
            known = TokenClasses(known.class_T.clamp(max=most), present)
        return known

    def _own_classes(
        self, request: RoutingRequest, x_Th: torch.Tensor, hidden_states: torch.Tensor,
        logits_TC: torch.Tensor | None, is_known: bool, judges: bool,
    ) -> TokenClasses | None:  # fmt: skip
        """The decision of the gate, which in layers below it is home, or else of the layer's classifier; in training,
        and where a Trainer scores a model without a gate, the classes of the rows, for exclusive experts alone; None
        without any, or where `is_known` says that nobody asks: such a pass, too, is evidence for the tokens that
        follow."""
        rule, text = self.gate_rule, self.control.gate_pass
        trains = self.training or request.as_in_training
        given = request.token_classes if self.exclusive and (trains or rule is None) else None
        if given is not None and len(given.class_T) == len(x_Th):
            return given
        if given is not None and hidden_states.dim() == 3 and len(given.class_T) < len(x_Th):
            # Virtual tokens of prompt tuning, which stand before each row: they have its first token's class.
            class_BS = given.class_T.view(len(hidden_states), -1)
            virtual_BV = class_BS[:, :1].expand(-1, hidden_states.shape[1] - class_BS.shape[1])
            return TokenClasses(torch.cat([virtual_BV, class_BS], 1).flatten(), given.present)
        if trains:
            return None
        if self.language_gate is not None and judges:
            if text is None:  # the layer alone: each sequence is a text
                shape = hidden_states.shape[:-1] if hidden_states.dim() == 3 else (1, len(x_Th))
                text = GatePass.of_inputs(rule, shape, x_Th.device)  # type: ignore[arg-type]
            class_BS = text.judge(self.language_gate(x_Th))
            return None if is_known else text.decide(class_BS)
        if is_known:
            return None
        if rule is not None and text is not None:
            home = TokenClasses(torch.zeros_like(x_Th[:, 0], dtype=torch.long), [0])
            is_below = self.layer_index < rule.layer or self.language_gate is not None
            return home if is_below else text.classes
        if logits_TC is None:
            return None
        class_T = token_classes(logits_TC)
        can_read = class_T.device.type == "cpu" and not is_traced(class_T)
        return TokenClasses(class_T, [0] if can_read and not class_T.any() else None)

    def expert_of(self, number: int) -> int | None:
        """The expert that a class's tokens take alone; None if they have several."""
        first, end = self.expert_ranges[number]
        if end <= first:
            return 0
        return first if self.exclusive and end - first == 1 else None

    def _single_expert(self, request: RoutingRequest, known: TokenClasses | None) -> int | None:
        """The expert that runs alone for every token, as far as the host knows; None if several may run."""
        forced = request.expert
        if forced is not None:
            if forced >= len(self.experts):
                raise ValueError(
                    f"Layer {self.layer_index} has no expert {forced}; give one of 0..{len(self.experts) - 1}."
                )
            return forced
        if request.expansion == 0 and not self.training:
            return 0
        return None if known is None or known.only is None else self.expert_of(known.only)


def chosen(mask_T: torch.Tensor, yes: Any, no: Any) -> Any:
    """Of two outputs, the first one's hidden states for the tokens of a mask, `[T]` bool."""
    if isinstance(yes, tuple):
        return chosen(mask_T, yes[0], no[0]), *yes[1:]
    return torch.where(mask_T.view(yes.shape[:-1]).unsqueeze(-1), yes, no)
