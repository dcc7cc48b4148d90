"""Fertility: into how many tokens a tokenizer splits each language's text. Reads no weights."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core.errors import InputError
from ..core.jsonfile import write_json
from ..core.languages import check_named_once
from ..data.lost import MOST_LOST, LostText, share_in_words
from ..data.tokens import bare_tokens, languages_of
from ..evaluation.perplexity import tokenized


@dataclass(frozen=True)
class Fertility:
    """What a tokenizer makes of one language's text.

    Attributes:
        tokens, words, characters, bytes: the sizes of the text; words are what blanks separate, so a language written
            without blanks has few.
        lost: the share of the bytes that the tokenizer loses; the fewer tokens for it are no gain.
    """

    tokens: int
    words: int
    characters: int
    bytes: int
    lost: float = 0.0

    @property
    def is_lossy(self) -> bool:
        """Whether so much is lost that its tokens cannot be compared."""
        return self.lost > MOST_LOST

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
        """The language of which the tokenizer makes the fewest tokens a character, among those that it can write."""
        return self._ranked()[0][0]

    def _ranked(self) -> list[tuple[str, Fertility]]:
        return sorted(self.languages.items(), key=lambda item: (item[1].is_lossy, item[1].per_character))

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """A table: header, one row for each language, the fewest tokens a character first and those of which too much
        is lost last. The last columns are the number of tokens a character over that of the first row, and the share of
        the bytes that is lost."""
        header = ["language", "tokens", "tokens a word", "tokens a character", "tokens a byte", "x the best", "lost"]
        least = self.languages[self.best()].per_character
        return header, [
            [
                code, f"{one.tokens:,}", f"{one.per_word:.2f}", f"{one.per_character:.3f}", f"{one.per_byte:.3f}",
                "-" if one.is_lossy else f"{one.per_character / least:.2f}", share_in_words(one.lost),
            ]
            for code, one in self._ranked()
        ]  # fmt: skip

    def warnings(self) -> list[str]:
        """A line for each language of which too much is lost."""
        return [
            f"warning: {code}: the tokenizer loses {share_in_words(one.lost)} of the bytes (unknown tokens, dropped "
            "characters), so its tokens cannot be compared with another language's"
            for code, one in self.languages.items() if one.is_lossy
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
    """The fertility of a tokenizer on each language's documents; of a language with tokens of its own, with these too.

    Args:
        characters: characters to read of each language, in whole documents.
    """
    check_named_once(list(texts))
    if characters < 1:
        raise InputError(f"characters is {characters}: must be at least 1.")
    by_language = {}
    for code, documents in texts.items():
        tokens = of_own = words = read = size = 0
        lost, own = LostText(), languages_of(tokenizer).get(code)
        for text, ids in tokenized(documents, tokenizer):
            lost.add(text, ids, tokenizer)
            of_own += 0 if own is None else len(bare_tokens([text], own)[0])
            tokens, words = tokens + len(ids), words + len(text.split())
            read, size = read + len(text), size + len(text.encode())
            if read >= characters:
                break
        if not words:
            raise InputError(f"Language {code!r}: no text to split into tokens.")
        by_language[code] = Fertility(tokens, words, read, size, lost.share)
        if own is not None:
            by_language[f"{code}, own tokens"] = Fertility(of_own, words, read, size, lost.share)
    return FertilityResult(by_language)
