"""The object that the expanded layers of one model share: it records their routing, and can override it.

Shape suffixes as in `routing.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .prefix_gate import RunningText
from .routing import Choice, LayerRouting


@dataclass
class Routing:
    """Routing of one forward pass: `layers[layer_index]` is that layer's `LayerRouting`."""

    layers: dict[int, LayerRouting] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LayerRouting]:
        return (self.layers[layer] for layer in sorted(self.layers))

    def __len__(self) -> int:
        return len(self.layers)


class RoutingControl:
    """Records the routing of all expanded FFNs of one model, and can override their routers.

    A plain object instead of hooks: it takes part in every forward pass, whoever calls it, and a recomputation under
    gradient checkpointing (outside the capture) is not recorded again.
    """

    def __init__(self) -> None:
        self.capture: Routing | None = None
        self.forced_expert: int | None = None
        self.expansion: int | None = None
        # The class of each sequence's language, where the user names it: 0 for the base model's, None if unknown.
        self.classes: Sequence[int | None] | None = None
        # The texts of the forward pass that runs, for prefix gates.
        self.text: RunningText | None = None
        # For analyses: takes router logits `[T, N]` and K, returns the logits to route by; bypasses classifiers.
        self.change_logits: Callable[[torch.Tensor, int], torch.Tensor] | None = None
        # Called only in training: takes a layer's index and its choice, returns the choice to use.
        self.change_choice: Callable[[int, Choice], Choice] | None = None

    @property
    def only_expert(self) -> int | None:
        """The expert that runs alone for every token, None if routers choose: that of `use_expert`, or expert 0 where
        the user says that all languages are the base model's."""
        if self.forced_expert is None and self.classes and all(number == 0 for number in self.classes):
            return 0
        return self.forced_expert

    def __deepcopy__(self, memo: dict) -> "RoutingControl":
        memo[id(self)] = new = RoutingControl()
        return new

    def __reduce__(self) -> tuple:
        return RoutingControl, ()
