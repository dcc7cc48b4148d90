"""What a caller wants of a forward pass (to record the routing, to override it, or to name the languages), and the
object through which the expanded layers of one model read it.

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
    """The class of each row of a batch: 0 for the base model's languages, None where it is not known.

    A compiled pass reads `only` and tensors alone, so that there is a graph for each class and one for several.

    Attributes:
        class_B: `[B]`; -1 where it is not known.
        present: the classes that occur.
        only: the class of all rows; None if they have several, or one is not known.
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
    """What a caller wants of forward passes.

    Attributes:
        capture: where each layer's routing is recorded.
        expert: the expert that every token takes, in every layer.
        expansion: the expansion after which the model routes; 0 is the base model.
        classes: the class of each sequence's language, where it is told or was judged.
        sequences: the number of sequences that `classes` speaks of; None if any number is right.
        reading, answers: what a part keeps for a pass of its own, and for a call of `generate`.
        token_classes: in a Trainer, the classes of the batch's tokens, for exclusive experts.
        as_in_training: in a Trainer, whether a model in evaluation mode, such as DPO's reference, is routed as the one
            that trains: nothing judges.
        change_logits: for analyses: takes router logits `[T, N]` and K, returns the logits to route by; bypasses
            classifiers.
        change_choice: called only in training: takes a layer's index and its choice, returns the choice to use.
    """

    capture: Routing | None = None
    expert: int | None = None
    expansion: int | None = None
    classes: RowClasses | None = None
    sequences: int | None = None
    reading: Any = None
    answers: Any = None
    token_classes: TokenClasses | None = None
    as_in_training: bool = False
    change_logits: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    change_choice: Callable[[int, Choice], Choice] | None = None


class RoutingControl:
    """The request that all expanded layers of one model read.

    A plain object instead of hooks: it takes part in every forward pass, whoever calls it, and a recomputation under
    gradient checkpointing (outside the capture) is not recorded again. What a thread asks for holds for its own forward
    passes alone (and for their backward passes), so several may use one model at a time.
    """

    def __init__(self) -> None:
        # Thread-local, and no context variable: `torch.compile` traces the one and refuses the other.
        self.own = threading.local()
        self._latest = RoutingRequest()  # of whichever thread asked last
        self.notes: Any = weakref.WeakKeyDictionary()  # of a part, by object

    @property
    def request(self) -> RoutingRequest:
        """What this thread asks for. On a GPU autograd runs the forward pass again, under gradient checkpointing, in a
        thread of its own, for the one that asked last."""
        own = getattr(self.own, "request", None)
        if own is not None:
            return own
        in_backward_pass = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        return self._latest if in_backward_pass else _NOTHING

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
            if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:  # the forward pass
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
        in_backward_pass = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        return in_backward_pass or getattr(self.own, "passes", 0) > 0

    @property
    def judged(self) -> TokenClasses | None:
        """In this thread's forward pass, the classes of its tokens that a part judged."""
        return getattr(self.own, "judged", None)

    def __reduce__(self) -> tuple:  # copies and pickles have requests of their own
        return RoutingControl, ()


_NOTHING = RoutingRequest()


@dataclass(frozen=True)
class Untold:
    """The class of texts whose language nobody tells or judges: the newest expansion's, for which a model was trained,
    or the base's, where a part says that they stay home.

    Attributes:
        words: what is said once where they stay home; None where they do not.
        newest: the newest expansion's class.
    """

    words: str | None
    newest: int

    @classmethod
    def of(cls, config: Any, newest: int) -> "Untold":
        used = getattr(config, "used_parts", [])
        return cls(next((part.stays_home for part in used if part.stays_home), None), newest)

    def number(self, request: RoutingRequest, training: bool) -> int:
        """The class in a pass."""
        if self.words is None or training or request.as_in_training:
            return self.newest
        if request.expert is None and not torch.compiler.is_compiling():  # a pass that judges has expert 0
            logger.warning_once(self.words)
        return 0


def recorded_classes(expansions: Sequence[dict]) -> dict[str, int]:
    """The class of each language in a model's history: 0 for the base model's, g for those of expansion g."""
    old = [expansion["old_languages"] for expansion in expansions[:1]]
    by_expansion = [*old, *(expansion["new_languages"] for expansion in expansions)]
    return {code: number for number, codes in enumerate(by_expansion) for code in codes}


def classes_of(config: Any, languages: str | Sequence[str | None]) -> list[int | None]:
    """The class of each language: 0 for the base model's, g for those of expansion g, None for None.

    Raises:
        ValueError: the languages are no codes, or the checkpoint does not know one of them, or can be told none.
    """
    for reason in (config.not_told, *(part.not_told for part in config.used_parts)):
        if reason is not None:
            raise ValueError(f"languages: {reason}: leave languages out.")
    codes = [languages] if isinstance(languages, str) else languages
    if not isinstance(codes, list | tuple) or not all(code is None or isinstance(code, str) for code in codes):
        raise ValueError(f"languages is {languages!r}: give a code, or a list with a code or None for each sequence.")
    known = recorded_classes(config.expansions or [])
    named = ", ".join(known) or "no language"
    for part in config.used_parts:
        known = part.classes() | known
    for code in codes:
        if code is not None and code not in known:
            raise ValueError(
                f"languages: the checkpoint does not know {code!r}; it knows {named}. "
                "Text in another language is judged by the model itself: name no language for it (None in a list)."
            )
    if not codes:
        raise ValueError("languages is empty: give a code for each sequence, or leave it out.")
    return [None if code is None else known[code] for code in codes]


def inputs_of(inputs: Any, arguments: dict[str, Any]) -> Any:
    """The first of a call's inputs, `[B, S, ...]`; None without any."""
    tensors = (arguments.get("inputs_embeds"), inputs, arguments.get("inputs"), arguments.get("input_ids"))
    return next((tensor for tensor in tensors if tensor is not None), None)


def check_count(count: int, inputs: Any, arguments: dict[str, Any]) -> None:
    """Refuses more or fewer codes than sequences."""
    given = inputs_of(inputs, arguments)
    sequences = 1 if given is None else len(given)
    if count != sequences:
        raise ValueError(
            f"languages has {count} codes, but the batch has {sequences} sequences: give one code for each, "
            "or a single text for all."
        )


def with_languages(forward: Callable) -> Callable:
    """A backbone's `forward` with one more argument, `languages`: see `ExpandedModelMixin.use_languages`."""

    @wraps(forward)
    def forward_with_languages(self: Any, *args: Any, languages: Any = None, **kwargs: Any) -> Any:
        if languages is not None:
            with self.use_languages(languages):
                return forward_with_languages(self, *args, **kwargs)
        if (sequences := self.routing_control.request.sequences) is not None:
            check_count(sequences, args[0] if args else None, kwargs)
        return forward(self, *args, **kwargs)

    # accelerate unwinds a forward that it has wrapped along `__wrapped__`, and would unwind this one too.
    del forward_with_languages.__wrapped__  # type: ignore[attr-defined]
    signature = inspect.signature(forward)
    own = inspect.Parameter("languages", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = sorted([*signature.parameters.values(), own], key=attrgetter("kind"))
    forward_with_languages.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return forward_with_languages
