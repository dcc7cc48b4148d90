"""What the expanded layers of one model share: where their decisions are recorded, and what overrides them.

Shape suffixes as in `routing.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

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
    """Shared by all expanded FFNs of one model: where routing is recorded, and an override of the router.

    A plain object instead of hooks: it sees every forward pass, whoever calls it, and recomputation under gradient
    checkpointing (outside the capture) records nothing twice.
    """

    def __init__(self) -> None:
        self.capture: Routing | None = None
        self.forced_expert: int | None = None
        self.expansion: int | None = None
        # For analyses: router logits `[T, N]` and K in, the logits to route by out; classifiers then have no say.
        self.change_logits: Callable[[torch.Tensor, int], torch.Tensor] | None = None
        # For training, in which alone it is called: a layer's index and its choice in, the choice to carry out out.
        self.change_choice: Callable[[int, Choice], Choice] | None = None

    def __deepcopy__(self, memo: dict) -> "RoutingControl":
        memo[id(self)] = new = RoutingControl()
        return new

    def __reduce__(self) -> tuple:
        return RoutingControl, ()
