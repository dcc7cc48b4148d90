"""The user's word: the language of each sequence of a batch, where the user knows it."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any

Languages = str | Sequence[str | None]


def classes_of(config: Any, languages: Languages) -> list[int | None]:
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
    for number, of_class in enumerate(getattr(config, "gate_languages", None) or []):
        known = dict.fromkeys(of_class, number) | known
    for code in codes:
        if code is not None and code not in known:
            raise ValueError(
                f"languages: the checkpoint does not know {code!r}; it knows {', '.join(known) or 'no language'}. Give "
                "None for a sequence in another language, whose tokens the routers judge."
            )
    if not codes:
        raise ValueError("languages is empty: give a code for each sequence, or leave it out.")
    return [None if code is None else known[code] for code in codes]


def check_count(count: int, inputs: Any, arguments: dict[str, Any]) -> None:
    """Refuses more or fewer codes than sequences."""
    tensors = (inputs, *(arguments.get(name) for name in ("inputs", "input_ids", "inputs_embeds")))
    sequences = next((len(tensor) for tensor in tensors if tensor is not None), 1)
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
