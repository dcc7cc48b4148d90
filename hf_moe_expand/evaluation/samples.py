"""Samples of text: how models continue the first words of held-out text, most probable token by token."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from textwrap import shorten

from ..core.errors import InputError
from ..inference.asking import Answering, ChatModel

_LETTERS = 40  # most of a prompt
_HOW = Answering(max_new_tokens=24)


@dataclass(frozen=True)
class Sample:
    """How models continue the same words.

    Attributes:
        prompt: the first words of held-out text in the language.
        continued: what each model wrote, by its name in results.
    """

    language: str
    prompt: str
    continued: dict[str, str] = field(default_factory=dict)


def begin_samples(texts: Mapping[str, Iterable[str]], groups: Iterable[Sequence[str]]) -> list[Sample]:
    """For the first language of each group that has text, a sample that no model has continued yet."""
    languages = [[code for code in codes if code in texts][:1] for codes in groups]
    prompts = {code: _first_words(next(iter(texts[code]), "")) for codes in languages for code in codes}
    return [Sample(code, words) for code, words in prompts.items() if words]


def continue_samples(samples: Iterable[Sample], model: ChatModel) -> None:
    """Adds what the model writes; it writes nothing where the words alone fill its positions."""
    for sample in samples:
        with suppress(InputError):
            sample.continued[model.name] = " ".join(model.answer(sample.prompt, _HOW).split())


def _first_words(text: str) -> str:
    """The first whole words of a text, or its first letters where no space ends a word soon."""
    text = text.strip()[: 10 * _LETTERS]
    return shorten(text, _LETTERS, placeholder="") or text[:_LETTERS]
