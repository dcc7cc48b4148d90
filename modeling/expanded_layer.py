"""What all expanded layers share: the experts of each class, and the class of each token.

Shape suffixes as in `routing.py`.
"""

from typing import Any

import torch
from torch import nn

from .dispatch import is_traced
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
        router, classifier, conditional_gate: None where the layer has none.
    """

    experts: nn.ModuleList

    def __init__(self, config: Any, layer_index: int, control: RoutingControl) -> None:
        super().__init__()
        earlier = [counts[layer_index] for counts in getattr(config, "earlier_experts_per_layer", None) or ()]
        self.experts_after_expansion = (1, *earlier, config.num_experts_per_layer[layer_index])
        self.exclusive = bool(getattr(config, "exclusive_experts", False))
        self.expert_ranges = expert_ranges(self.experts_after_expansion, self.exclusive)
        self.layer_index = layer_index
        self.control = control
        self.model_config = config
        self.is_mixture, self.top_k = False, 1
        self.router: Any = None
        self.classifier: Any = None
        self.conditional_gate: Any = None

    def _known(
        self, request: RoutingRequest, hidden_states: torch.Tensor, logits_TC: torch.Tensor | None = None
    ) -> TokenClasses | None:
        """The tokens' classes before they are routed; None where nothing says them.

        A class is the one that the user tells or the gate judged, or else, in a Trainer, the batch's, or else the
        layer's classifier's, or else, with exclusive experts or beside sequences that are told, the newest expansion's.

        Args:
            hidden_states: `[..., h]`, an input of the layer's tokens.
            logits_TC: those of the layer's classifier.
        """
        if request.change_logits is not None and not self.exclusive:  # whose classes are no choice of a router
            return None
        x_Th = hidden_states.reshape(-1, hidden_states.shape[-1])
        rows, newest, known = request.classes, len(self.experts_after_expansion) - 1, None
        if request.expert is None and (rows is None or not rows.complete):
            known = self._own_classes(request, x_Th, hidden_states, logits_TC)
        if known is None and (rows is not None or self.exclusive):
            known = TokenClasses(torch.full_like(x_Th[:, 0], newest, dtype=torch.long), [newest])
        if rows is not None and known is not None:
            # Beams of a sequence follow one another.
            told_T = rows.class_B.to(x_Th.device).repeat_interleave(len(x_Th) // len(rows.class_B))
            present: Any = None  # a compiled pass reads no more than `only`
            if rows.only is not None:
                present = [rows.only]
            elif not torch.compiler.is_compiling() and (rows.complete or known.present is not None):
                present = sorted({*rows.present, *(() if rows.complete else known.present or ())})
            known = TokenClasses(told_T if rows.complete else torch.where(told_T < 0, known.class_T, told_T), present)
        if known is not None and self.exclusive and request.expansion is not None:
            most = request.expansion
            present = None if known.present is None else sorted({min(number, most) for number in known.present})
            known = TokenClasses(known.class_T.clamp(max=most), present)
        return known

    def _own_classes(
        self, request: RoutingRequest, x_Th: torch.Tensor, hidden_states: torch.Tensor, logits_TC: torch.Tensor | None
    ) -> TokenClasses | None:
        """What nobody tells of the tokens' classes: what the gate judged of the pass's texts; or, in training, and
        where a Trainer scores a model without a gate, the classes of the batch, for exclusive experts alone; or what
        the layer's classifier says, but in training; None without any."""
        judged, trains = self.control.judged, self.training or request.as_in_training
        given = request.token_classes if self.exclusive and judged is None else None
        if given is not None and len(given.class_T) == len(x_Th):
            return given
        if given is not None and hidden_states.dim() == 3 and len(given.class_T) < len(x_Th):
            # Virtual tokens of prompt tuning, which stand before each row: they have its first token's class.
            class_BS = given.class_T.view(len(hidden_states), -1)
            virtual_BV = class_BS[:, :1].expand(-1, hidden_states.shape[1] - class_BS.shape[1])
            return TokenClasses(torch.cat([virtual_BV, class_BS], 1).flatten(), given.present)
        if trains:
            return None
        if judged is not None:  # perhaps on another device
            several = judged.only is None and torch.compiler.is_compiling()
            return TokenClasses(judged.class_T.to(x_Th.device), None if several else judged.present)
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
