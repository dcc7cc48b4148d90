"""The text from which gates learn languages: tokens of each language, plain and inside the chat template."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError

LEAST = 100  # tokens of a language


@dataclass(frozen=True)
class Example:
    """One text as the model reads it.

    Attributes:
        ids: its tokens.
        start, end: the tokens `ids[start:end]` are the language's own. The first token of a text says nothing of its
            language, nor do those of a chat template.
    """

    ids: list[int]
    start: int
    end: int

    @property
    def counted(self) -> int:
        return self.end - self.start


def gate_examples(
    texts: Mapping[str, Iterable[str]], tokenizer: Any, tokens: Mapping[str, int], block: int
) -> dict[str, list[Example]]:
    """Examples of each language with together at least `tokens` of its own tokens, or all of its text.

    Where the tokenizer has a chat template, every second text stands in it, as a user's message. The template's own
    words are English or nobody's, and count as no language.

    Args:
        tokens: the number of tokens of each language.
        block: most tokens of one text; longer ones are cut.

    Raises:
        InputError: a language has fewer than `LEAST` tokens.
    """
    found: dict[str, list[Example]] = {}
    for code, documents in texts.items():
        made, counted = [], 0
        for number, text in enumerate(documents):
            example = _example(text, tokenizer, block, inside=number % 2 == 1)
            if example.counted > 0:
                made.append(example)
                counted += example.counted
            if counted >= tokens[code]:
                break
        if counted < LEAST:
            raise InputError(
                f"gates: {code} has {counted} tokens of text, but a gate learns a language from at least {LEAST}: give "
                "more."
            )
        found[code] = made
    return found


def _example(text: str, tokenizer: Any, block: int, inside: bool) -> Example:
    text = text.strip()
    if inside and (parts := _around(text, tokenizer)) is not None:
        before, after = (tokenizer(part, add_special_tokens=False).input_ids for part in parts)
        room = block - len(before) - len(after)
        if room >= LEAST // 4:
            own = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:room]
            return Example([*before, *own, *after], len(before), len(before) + len(own))
    ids = tokenizer(text, verbose=False).input_ids[:block]
    return Example(ids, 1, len(ids))


def _around(text: str, tokenizer: Any) -> tuple[str, str] | None:
    """What the chat template puts before and after a user's message; None without a template that keeps it whole."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, found, after = whole.partition(text)
    return (before, after) if found else None


def held_out(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """The examples to fit on, and every fourth, to score on; a single one is both."""
    scored = list(examples[3::4]) or list(examples[-1:])
    fitted = [example for example in examples if example not in scored]
    return fitted or scored, scored
