"""What a caller asks of a forward pass (to record the routing, to override it, to name the languages), and the object
through which the expanded layers of one model read it.

Shape suffixes as in `routing.py`.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from operator import attrgetter
from typing import Any

import torch
from transformers.utils import logging

from .routing import Choice, LayerRouting, TokenClasses

logger = logging.get_logger(__name__)


@dataclass
class Routing:
    """Routing of one forward pass: `layers[layer_index]` is that layer's `LayerRouting`."""

    layers: dict[int, LayerRouting] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LayerRouting]:
        return (self.layers[layer] for layer in sorted(self.layers))

    def __len__(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class RowClasses:
    """The class of each row of a batch: 0 for the base model's languages, None (-1 in `class_B`, `[B]`) where it is not
    known. `present` are those that occur, and `only` is that of all rows.

    A compiled pass reads `only` and tensors alone, so that there is a graph for each class and one for several.
    """

    numbers: tuple[int | None, ...]
    class_B: torch.Tensor
    present: tuple[int, ...]
    complete: bool
    only: int | None

    @classmethod
    def of(cls, numbers: Sequence[int | None], device: Any) -> "RowClasses":
        if torch.device(device).type == "meta":  # where weights lie that are fetched when used
            device = "cpu"
        class_B = torch.tensor([-1 if number is None else number for number in numbers], device=device)
        present = tuple(sorted({number for number in numbers if number is not None}))
        complete = None not in numbers
        return cls(tuple(numbers), class_B, present, complete, present[0] if complete and len(present) == 1 else None)

    def over(self, known: TokenClasses) -> TokenClasses:
        """These classes for a pass's tokens, and `known` ones where they say none; a row's beams follow one another."""
        told_T = self.class_B.to(known.class_T.device).repeat_interleave(len(known.class_T) // len(self.class_B))
        class_T = told_T if self.complete else torch.where(told_T < 0, known.class_T, told_T)
        if self.only is not None:
            return TokenClasses(class_T, [self.only])
        if torch.compiler.is_compiling() or not (self.complete or known.present is not None):
            return TokenClasses(class_T, None)
        others = () if self.complete else known.present or ()
        return TokenClasses(class_T, sorted({*self.present, *others}))


@dataclass(frozen=True)
class RoutingRequest:
    """What a caller asks of forward passes."""

    capture: Routing | None = None  # where each layer's routing is recorded
    expert: int | None = None  # the expert that every token takes, in every layer
    expansion: int | None = None  # the expansion after which the model routes; 0 is the base model
    classes: RowClasses | None = None  # of the sequences' languages, where they are told or were judged
    sequences: int | None = None  # of which `classes` speaks; None if any number is right
    reading: Any = None  # what a part keeps for a pass of its own
    answers: Any = None  # what a part keeps for a call of `generate`
    token_classes: TokenClasses | None = None  # in a Trainer, of the batch's tokens, for exclusive experts
    # In a Trainer, whether a model in evaluation mode, such as DPO's reference, is routed as the one that trains:
    # nothing judges.
    as_in_training: bool = False
    # For analyses: takes router logits [T, N] and K, returns the logits to route by; bypasses classifiers.
    change_logits: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    # Called only in training: takes a layer's index and its choice, returns the choice to use.
    change_choice: Callable[[int, Choice], Choice] | None = None


class RoutingControl:
    """The request that all expanded layers of one model read.

    A plain object instead of hooks: it takes part in every forward pass, whoever calls it, and a recomputation under
    gradient checkpointing (outside the capture) is not recorded again. What a thread asks for holds for its own forward
    passes alone (and for their backward passes), so several may use one model at a time.

    Args:
        stays_home: what is said once where a text that nobody tells or judges is the base's; None where it is the
            newest expansion's.
    """

    def __init__(self, stays_home: str | None = None) -> None:
        # Thread-local, and no context variable: `torch.compile` traces the one and refuses the other.
        self.own = threading.local()
        self._latest = RoutingRequest()  # of whichever thread asked last
        self.notes: Any = weakref.WeakKeyDictionary()  # of a part, by object
        self.stays_home = stays_home

    @property
    def request(self) -> RoutingRequest:
        """What this thread asks for. On a GPU autograd runs the forward pass again, under gradient checkpointing, in a
        thread of its own, for the one that asked last."""
        own = getattr(self.own, "request", None)
        if own is not None:
            return own
        return self._latest if in_backward_pass() else _NOTHING

    def untold(self, newest: int, training: bool) -> int:
        """The class of texts whose language nobody tells or judges: the newest expansion's, for which a model was
        trained, or the base's where they stay home."""
        request = self.request
        if self.stays_home is None or training or request.as_in_training:
            return newest
        if request.expert is None and not torch.compiler.is_compiling():  # a pass that judges has expert 0
            logger.warning_once(self.stays_home)
        return 0

    @contextmanager
    def asking(self, **changes: Any) -> Iterator[None]:
        """Inside, this thread's request has these values."""
        before = self.request
        self.own.request = self._latest = replace(before, **changes)
        try:
            yield
        finally:
            self.own.request = self._latest = before

    def change(self, **changes: Any) -> None:
        """From now on, until an `asking` ends, this thread's request has these values."""
        self.own.request = self._latest = replace(self.request, **changes)

    def checkpointed(self, checkpoint: Callable, function: Callable, *args: Any) -> Any:
        """Gradient checkpointing of a layer: the backward pass runs it again, perhaps in a thread of its own, for what
        is asked now, but for a capture."""
        asked = self.request

        def run(*given: Any) -> Any:
            if not in_backward_pass():
                return function(*given)
            own, self.own.request = getattr(self.own, "request", None), replace(asked, capture=None)
            try:
                return function(*given)
            finally:
                self.own.request = own

        return checkpoint(run, *args)

    @property
    def is_running(self) -> bool:
        """Whether a pass of the model runs in this thread, as far as a part counts them, or autograd runs it again."""
        return in_backward_pass() or getattr(self.own, "passes", 0) > 0

    @property
    def judged(self) -> TokenClasses | None:
        """In this thread's forward pass, the classes of its tokens that a part judged."""
        return getattr(self.own, "judged", None)

    def __reduce__(self) -> tuple:  # copies and pickles have requests of their own
        return RoutingControl, (self.stays_home,)


_NOTHING = RoutingRequest()


def in_backward_pass() -> bool:
    """Whether autograd runs the forward pass again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def recorded_classes(expansions: Sequence[dict]) -> dict[str, int]:
    """The class of each language in a model's history: 0 for the base model's, g for those of expansion g."""
    old = [expansion["old_languages"] for expansion in expansions[:1]]
    by_expansion = [*old, *(expansion["new_languages"] for expansion in expansions)]
    return {code: number for number, codes in enumerate(by_expansion) for code in codes}


def classes_of(config: Any, languages: str | Sequence[str | None]) -> list[int | None]:
    """The class of each language, None for None; raises ValueError where the checkpoint does not know one, or none is
    to be told."""
    for reason in (config.not_told, *(part.not_told for part in config.used_parts)):
        if reason is not None:
            raise ValueError(f"languages: {reason}: leave languages out.")
    codes = [languages] if isinstance(languages, str) else languages
    if not isinstance(codes, list | tuple) or not codes:
        raise ValueError(f"languages is {languages!r}: give a code, or a list with a code or None for each sequence.")
    known: dict[Any, int | None] = {None: None}
    for part in config.used_parts:
        known |= part.classes()
    recorded = recorded_classes(config.expansions or [])
    known |= recorded
    for code in codes:
        if code not in known:
            listed = ", ".join(recorded) or "no language"
            raise ValueError(f"languages: the checkpoint does not know {code!r}; it knows {listed}.")
    return [known[code] for code in codes]


def inputs_of(inputs: Any, arguments: dict[str, Any]) -> Any:
    """The first of a call's inputs, `[B, S, ...]`; None without any."""
    tensors = (arguments.get("inputs_embeds"), inputs, arguments.get("inputs"), arguments.get("input_ids"))
    return next((tensor for tensor in tensors if tensor is not None), None)


def check_count(control: RoutingControl, inputs: Any, arguments: dict[str, Any]) -> None:
    """Refuses more or fewer codes than sequences."""
    if (count := control.request.sequences) is None:
        return
    given = inputs_of(inputs, arguments)
    sequences = 1 if given is None else len(given)
    if count != sequences:
        raise ValueError(f"languages has {count} codes, but the batch has {sequences} sequences: give one for each.")


def with_languages(forward: Callable) -> Callable:
    """A backbone's `forward` with one more argument, `languages`: see `ExpandedModelMixin.use_languages`."""

    @wraps(forward)
    def forward_with_languages(self: Any, *args: Any, languages: Any = None, **kwargs: Any) -> Any:
        if languages is not None:
            with self.use_languages(languages):
                return forward_with_languages(self, *args, **kwargs)
        check_count(self.routing_control, args[0] if args else None, kwargs)
        return forward(self, *args, **kwargs)

    # accelerate unwinds a forward that it has wrapped along `__wrapped__`, and would unwind this one too.
    del forward_with_languages.__wrapped__  # type: ignore[attr-defined]
    signature = inspect.signature(forward)
    own = inspect.Parameter("languages", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = sorted([*signature.parameters.values(), own], key=attrgetter("kind"))
    forward_with_languages.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return forward_with_languages
