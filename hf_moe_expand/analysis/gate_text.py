"""The text from which gates learn languages: ends of texts of each language, plain and inside the chat template."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..core.errors import InputError
from ..data.tokens import begin_tokens
from ..modeling.language_gate import text_ends

LEAST = 100  # tokens of a language
_LINE = 48  # most tokens of a single line


@dataclass(frozen=True)
class Example:
    """One text as the gate reads it, its last tokens.

    Attributes:
        ids: its tokens, without the id that stands before every text.
        start, end: `ids[start:end]` are the language's own: not a chat template's, nor a first token with none before
            it.
    """

    ids: list[int]
    start: int
    end: int
    has_template: bool


def begin_of(tokenizer: Any) -> int | None:
    """The id that the tokenizer puts before a text; None if it puts none."""
    return next(iter(begin_tokens(tokenizer)), None)


def gate_examples(
    texts: Mapping[str, Iterable[str]], tokenizer: Any, tokens: int, block: int
) -> dict[str, list[Example]]:
    """Examples of each language with together about `tokens` of its own tokens, or all of its text.

    All languages are shown in the same forms, so that no gate learns a form in place of a language: half of the tokens
    in single lines, half in texts of `block` tokens, which are the following lines one after the other, from the first
    on again where there are no more. Where the tokenizer has a chat template, every second one stands in it, as a
    user's message.
    """
    examples: dict[str, list[Example]] = {}
    for code, documents in texts.items():
        lines = (line.strip() for document in documents for line in document.splitlines() if line.strip())
        shown: list[str] = []
        made: list[Example] = []
        counted = 0
        for size, wanted in ((_LINE, tokens // 2), (block, tokens)):
            pieces = _kept(lines, shown) if size == _LINE else _joined(chain(lines, shown), tokenizer, block)
            for number, text in enumerate(pieces):
                example = _example(text, tokenizer, size, number % 2 == 1)
                if example.end > example.start:
                    made.append(example)
                    counted += example.end - example.start
                if counted >= wanted:
                    break
        if counted < LEAST:
            raise InputError(
                f"{code} has {counted} tokens of text, but a gate learns a language from at least {LEAST}: give more."
            )
        examples[code] = made
    return examples


def _kept(lines: Iterable[str], shown: list[str]) -> Iterator[str]:
    """The lines, which are noted in `shown`."""
    for line in lines:
        shown.append(line)
        yield line


def _joined(lines: Iterable[str], tokenizer: Any, size: int) -> Iterator[str]:
    """Lines one after the other, to texts of about `size` tokens."""
    text, held = "", 0
    for line in lines:
        text = f"{text} {line}" if text else line
        held += len(tokenizer(line, add_special_tokens=False, verbose=False).input_ids)
        if held >= size:
            yield text
            text, held = "", 0
    if text:
        yield text


def _example(text: str, tokenizer: Any, size: int, inside: bool) -> Example:
    """The text's last `size` tokens, or a message of them, cut as a model cuts what it judges."""
    begin = begin_tokens(tokenizer)
    own = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[-size:]
    head, tail, has_template = begin, [], False
    if inside and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, message, after = whole.partition(text)
        if message:  # else the template changes the text
            head, tail = (tokenizer(part, add_special_tokens=False).input_ids for part in (before, after))
            has_template = True
    ids = [*head, *own, *tail]
    first = torch.tensor(begin[0]) if begin else None
    rows_1L, length_1 = text_ends(torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.long), first)
    kept = rows_1L[0, -int(length_1) :].tolist() if length_1 else []
    lost = len(ids) - len(kept)
    return Example(kept, max(len(head) - lost, int(not begin)), len(head) + len(own) - lost, has_template)
