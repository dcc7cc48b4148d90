"""Fertility: into how many tokens a tokenizer splits each language's text. Reads no weights."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..evaluation.perplexity import tokenized
from ..jsonfile import write_json


@dataclass(frozen=True)
class Fertility:
    """What a tokenizer makes of one language's text.

    Attributes:
        tokens, words, characters, bytes: the sizes of the text; words are what blanks separate, so a language written
            without blanks has few.
    """

    tokens: int
    words: int
    characters: int
    bytes: int

    @property
    def per_word(self) -> float:
        return self.tokens / self.words

    @property
    def per_character(self) -> float:
        return self.tokens / self.characters

    @property
    def per_byte(self) -> float:
        return self.tokens / self.bytes


@dataclass(frozen=True)
class FertilityResult:
    """The fertility of each language, in the order given."""

    languages: Mapping[str, Fertility]

    def best(self) -> str:
        """The language of which the tokenizer makes the fewest tokens a character."""
        return min(self.languages, key=lambda code: self.languages[code].per_character)

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """A table: header, one row for each language, the fewest tokens a character first; the last column is the
        number of tokens a character over that of the first row."""
        header = ["language", "tokens", "tokens a word", "tokens a character", "tokens a byte", "x the best"]
        least = self.languages[self.best()].per_character
        ranked = sorted(self.languages.items(), key=lambda item: item[1].per_character)
        return header, [
            [
                code, f"{one.tokens:,}", f"{one.per_word:.2f}", f"{one.per_character:.3f}", f"{one.per_byte:.3f}",
                f"{one.per_character / least:.2f}",
            ]
            for code, one in ranked
        ]  # fmt: skip

    def to_json(self, path: str | Path) -> None:
        """Writes the numbers, and the rates that follow from them."""
        rates = ("per_word", "per_character", "per_byte")
        write_json(path, {
            "best": self.best(),
            "languages": {
                code: asdict(one) | {f"tokens_{rate}": getattr(one, rate) for rate in rates}
                for code, one in self.languages.items()
            },
        })  # fmt: skip


def measure_fertility(
    tokenizer: Any, texts: Mapping[str, Iterable[str]], characters: int = 1_000_000
) -> FertilityResult:
    """The fertility of a tokenizer on each language's documents.

    Args:
        characters: characters to read of each language, in whole documents.
    """
    if characters < 1:
        raise InputError(f"characters is {characters}: must be at least 1.")
    by_language = {}
    for code, documents in texts.items():
        tokens = words = read = size = 0
        for text, ids in tokenized(documents, tokenizer):
            tokens, words = tokens + len(ids), words + len(text.split())
            read, size = read + len(text), size + len(text.encode())
            if read >= characters:
                break
        if not words:
            raise InputError(f"Language {code!r}: no text to split into tokens.")
        by_language[code] = Fertility(tokens, words, read, size)
    return FertilityResult(by_language)
