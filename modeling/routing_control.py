"""The object that the expanded layers of one model share: it records their routing, and can override it.

Shape suffixes as in `routing.py`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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


def _of_thread(name: str) -> Any:
    """A property whose value belongs to the thread that sets it; None in all others."""

    def read(control: "RoutingControl") -> Any:
        if control._latest and _in_backward_pass() and not getattr(control._own, "touched", False):
            return control._latest.get(name)
        return getattr(control._own, name, None)

    def write(control: "RoutingControl", value: Any) -> None:
        control._own.touched = True
        setattr(control._own, name, value)
        control._latest[name] = value

    return property(read, write)


def _in_backward_pass() -> bool:
    """Whether autograd calls, which runs the forward pass again under gradient checkpointing: on a GPU, in a thread of
    its own."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class RoutingControl:
    """Records the routing of all expanded FFNs of one model, and can override their routers.

    A plain object instead of hooks: it takes part in every forward pass, whoever calls it, and a recomputation under
    gradient checkpointing (outside the capture) is not recorded again. What a thread sets holds for its own forward
    passes alone (and for their backward passes), so several may use one model at a time.
    """

    capture: Routing | None = _of_thread("capture")
    forced_expert: int | None = _of_thread("forced_expert")
    expansion: int | None = _of_thread("expansion")
    # The class of each sequence's language, where the user names it: 0 for the base model's, None if unknown.
    classes: Sequence[int | None] | None = _of_thread("classes")
    # The number of sequences of each forward pass that `classes` speaks of; None if any number is right.
    sequences: int | None = _of_thread("sequences")
    # The texts of the forward pass that runs, for prefix gates.
    text: RunningText | None = _of_thread("text")

    def __init__(self) -> None:
        # Thread-local, and no context variable: `torch.compile` traces the one and refuses the other.
        self._own = threading.local()
        self._latest: dict[str, Any] = {}  # of whichever thread set it last
        # For analyses: takes router logits `[T, N]` and K, returns the logits to route by; bypasses classifiers.
        self.change_logits: Callable[[torch.Tensor, int], torch.Tensor] | None = None
        # Called only in training: takes a layer's index and its choice, returns the choice to use.
        self.change_choice: Callable[[int, Choice], Choice] | None = None

    @contextmanager
    def setting(self, name: str, value: Any) -> Iterator[Any]:
        """Inside, the attribute `name` has this value."""
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield value
        finally:
            setattr(self, name, before)

    @property
    def only_expert(self) -> int | None:
        """The expert that runs alone for every token, None if routers choose: that of `use_expert`, or expert 0 where
        the user says that all languages are the base model's."""
        if self.forced_expert is None and self.classes and all(number == 0 for number in self.classes):
            return 0
        return self.forced_expert

    def __reduce__(self) -> tuple:  # copies and pickles have settings of their own
        return RoutingControl, ()
