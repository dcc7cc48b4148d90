"""The object that the expanded layers of one model share: it records their routing, can override it, and holds the
language hint, the language of each sequence of a batch where the user knows it.

Shape suffixes as in `routing.py`.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from operator import attrgetter
from typing import Any

import torch

from .language_gate import GatePass
from .routing import Choice, LayerRouting, TokenClasses


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
    # In training, the classes of the batch's tokens, for exclusive experts.
    token_classes: TokenClasses | None = _of_thread("token_classes")
    # Of the forward pass that runs, the texts that the language gate judges.
    gate_pass: GatePass | None = _of_thread("gate_pass")
    # The columns at which the messages of a prompt end, each of which the gate judges whole; None judges no prompt.
    message_ends: Sequence[int] | None = _of_thread("message_ends")
    # Tokens at the beginning of a new cache that are no text, so that the gate does not miss them.
    virtual_tokens: int | None = _of_thread("virtual_tokens")

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

    def __reduce__(self) -> tuple:  # copies and pickles have settings of their own
        return RoutingControl, ()


def classes_of(config: Any, languages: str | Sequence[str | None]) -> list[int | None]:
    """The class of each language: 0 for the base model's, g for those that expansion g added, None for None.

    Raises:
        ValueError: the languages are no codes, or the checkpoint does not know one of them; it is a DMoE's, which keeps
            no language of the base model, or an encoder-decoder's.
    """
    if getattr(config, "language_groups", None) is not None or config.model_type == "dmoe":
        raise ValueError(
            "languages: all experts of a DMoE train, so it keeps no language of its base model: leave languages out."
        )
    if config.is_encoder_decoder:
        raise ValueError(
            "languages: a sentence of an encoder-decoder and its translation have a language each, and its routers and "
            "classifiers judge the tokens of both: leave languages out."
        )
    codes = [languages] if isinstance(languages, str) else languages
    if not isinstance(codes, list | tuple) or not all(code is None or isinstance(code, str) for code in codes):
        raise ValueError(f"languages is {languages!r}: give a code, or a list with a code or None for each sequence.")
    known: dict[str, int] = {}
    for number, expansion in enumerate(config.expansions or [], start=1):
        if number == 1:
            known = dict.fromkeys(expansion["old_languages"], 0)
        known |= dict.fromkeys(expansion["new_languages"], number)
    named = ", ".join(known) or "no language"
    for number, of_class in enumerate((getattr(config, "language_gate", None) or {"languages": []})["languages"]):
        known = dict.fromkeys(of_class, number) | known
    for code in codes:
        if code is not None and code not in known:
            raise ValueError(
                f"languages: the checkpoint does not know {code!r}; it knows {named}. "
                "Text in another language is judged by the model itself: name no language for it (None in a list)."
            )
    if not codes:
        raise ValueError("languages is empty: give a code for each sequence, or leave it out.")
    return [None if code is None else known[code] for code in codes]


def _inputs_of(inputs: Any, arguments: dict[str, Any]) -> Any:
    """The first of a call's inputs, `[B, S, ...]`; None without any."""
    tensors = (inputs, *(arguments.get(name) for name in ("inputs", "input_ids", "inputs_embeds")))
    return next((tensor for tensor in tensors if tensor is not None), None)


def prompt_ends(inputs: Any, arguments: dict[str, Any]) -> list[int] | None:
    """The column at which the prompt of a call of `generate` ends; None without a prompt."""
    given = _inputs_of(inputs, arguments)
    return None if given is None else [given.shape[1]]


def check_count(count: int, inputs: Any, arguments: dict[str, Any]) -> None:
    """Refuses more or fewer codes than sequences."""
    given = _inputs_of(inputs, arguments)
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
        if self.routing_control.sequences is not None:
            check_count(self.routing_control.sequences, args[0] if args else None, kwargs)
        return forward(self, *args, **kwargs)

    # accelerate unwinds a forward that it has wrapped along `__wrapped__`, and would unwind this one too.
    del forward_with_languages.__wrapped__  # type: ignore[attr-defined]
    signature = inspect.signature(forward)
    added = inspect.Parameter("languages", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = sorted([*signature.parameters.values(), added], key=attrgetter("kind"))
    forward_with_languages.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return forward_with_languages
