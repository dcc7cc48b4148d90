"""What a tokenizer puts around a text (`<s>`, `</s>`), and the tokens of documents, prompts and plain texts. A text
that holds the beginning or the end already, as a chat template writes it, does not get it twice."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from typing import Any

from tokenizers.processors import TemplateProcessing

from ..core.errors import InputError
from ..core.saying import say_once
from .sources import Beginning, LanguageText


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    whole, bare = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    places = range(len(whole) - len(bare) + 1)
    start = next((place for place in places if whole[place : place + len(bare)] == bare), None)
    return ([], []) if start is None else (whole[:start], whole[start + len(bare) :])


def begin_tokens(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts before a text: usually one, begin-of-text, or none."""
    return frame(tokenizer)[0]


def bare_tokens(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of each text, without what the tokenizer puts around it, and without such tokens at its beginning."""
    before, rows = begin_tokens(tokenizer), tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
    return [list(dropwhile(before.__contains__, row)) for row in rows]


def document_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What stands around a document: the tokenizer's frame, and an end-of-text token, which it must have."""
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError("The tokenizer has no end-of-text token, which separates documents: set its eos_token.")
    before, after = frame(tokenizer)
    return before, after if after[-1:] == [end] else [*after, end]


def encode_documents(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of each document and of what stands around it."""
    before, after = document_frame(tokenizer)
    rows = bare_tokens(texts, tokenizer)
    for row in rows:
        while row and row[-1] in after:  # an end that the text has itself
            row.pop()
    return [[*before, *row, *after] for row in rows]


def prompt_tokens(prompt: str, tokenizer: Any) -> list[int]:
    """The tokens of a prompt, which the tokenizer begins as any text, and does not end."""
    return [*begin_tokens(tokenizer), *bare_tokens([prompt], tokenizer)[0]]


def without_end(tokenizer: Any) -> Any:
    """The tokenizer, or a copy that puts nothing after a text, for libraries that tokenise prompts themselves."""
    before, after = frame(tokenizer)
    if not after or getattr(tokenizer, "backend_tokenizer", None) is None:
        return tokenizer
    names = tokenizer.convert_ids_to_tokens(before)
    open_ended = copy.deepcopy(tokenizer)
    open_ended.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*names, "$A"], special_tokens=list(dict(zip(names, before, strict=True)).items())
    )
    return open_ended


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens that a text can name, by their ids: all but one that stands for unknown characters alone."""
    unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    added = tokenizer.added_tokens_decoder.items()
    return {at: token.content for at, token in added if token.special and at not in unknown}


def say_special(name: str, counts: Mapping[str, int]) -> None:
    """Says how often a text names special tokens, if it does."""
    if found := +Counter(counts):
        tokens = ", ".join(f"{token} {count:,} times" for token, count in found.most_common(5))
        say_once(f"{name}: the text has special tokens, which are read as such: {tokens}")


def tokens_at_hand(source: LanguageText, tokenizer: Any) -> int | None:
    """About how many tokens a language's text has as a training reads it, by the first megabyte of each file; None on
    the hub."""
    return int(sum(tokens_of(one, tokenizer) for one in source.beginnings())) if source.files() else None


def tokens_of(beginning: Beginning, tokenizer: Any) -> float:
    """About how many tokens a shard has, by its beginning."""
    ids = encode_documents([row["text"] for row in beginning.rows], tokenizer) if beginning.rows else []
    return sum(map(len, ids)) / (beginning.read or 1.0)
