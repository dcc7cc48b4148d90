"""The text from which gates learn languages: tokens of each language, plain and inside the chat template."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import InputError
from ..data.tokens import begin_tokens

LEAST = 100  # tokens of a language
_LINE = 48  # most tokens of a single line


@dataclass(frozen=True)
class Example:
    """One text as the model reads it.

    Attributes:
        ids: its tokens.
        start, end: the tokens `ids[start:end]` are the language's own. The first token of a text says nothing of its
            language, and neither does what a chat template puts around a message.
    """

    ids: list[int]
    start: int
    end: int

    @property
    def has_template(self) -> bool:
        return self.end < len(self.ids)


def gate_examples(
    texts: Mapping[str, Iterable[str]], tokenizer: Any, tokens: int, block: int
) -> dict[str, list[Example]]:
    """Examples of each language with together about `tokens` of its own tokens, or all of its text.

    All languages are shown in the same forms, so that no gate learns a form in place of a language: half of the tokens
    in single lines, half in texts of `block` tokens, which are lines one after the other. Where the tokenizer has a
    chat template, every second one stands in it, as a user's message."""
    examples: dict[str, list[Example]] = {}
    begin = begin_tokens(tokenizer)
    for code, documents in texts.items():
        lines = [line.strip() for document in documents for line in document.splitlines() if line.strip()]
        made: list[Example] = []
        counted = 0
        for size, wanted, pieces in ((_LINE, tokens // 2, lines), (block, tokens, _joined(lines, tokenizer, block))):
            for number, text in enumerate(pieces):
                if counted >= wanted:
                    break
                example = _example(text, tokenizer, size, number % 2 == 1, begin)
                if example.end > example.start:
                    made.append(example)
                    counted += example.end - example.start
        if counted < LEAST:
            raise InputError(
                f"gates: {code} has {counted} tokens of text, but a gate learns a language from at least {LEAST}: give "
                "more."
            )
        examples[code] = made
    return examples


def _joined(lines: Sequence[str], tokenizer: Any, size: int) -> Iterator[str]:
    """Lines one after the other, to texts of about `size` tokens."""
    text, held = "", 0
    for line in lines:
        text = f"{text} {line}".strip()
        held += len(tokenizer(line, add_special_tokens=False, verbose=False).input_ids)
        if held >= size:
            yield text
            text, held = "", 0
    if text:
        yield text


def _example(text: str, tokenizer: Any, size: int, inside: bool, begin: list[int]) -> Example:
    """The text, cut to `size` tokens of its own. `begin` are the tokens that the tokenizer puts before a text."""
    if inside and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, message, after = whole.partition(text)
        if message:  # else the template changes the text
            own = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:size]
            head, tail = (tokenizer(part, add_special_tokens=False).input_ids for part in (before, after))
            return Example([*head, *own, *tail], len(head), len(head) + len(own))
    ids = [*begin, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids][:size]
    return Example(ids, max(1, len(begin)), len(ids))


def held_out(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """The examples to fit on, and every fourth, to score on; a single one is both."""
    scored = list(examples[3::4]) or list(examples[-1:])
    fitted = [example for example in examples if example not in scored]
    return fitted or scored, scored
