"""Text that a tokenizer loses: characters that become unknown tokens, are dropped, or are written as others.

The tokens of a text are turned back into text, without unknown tokens, and what that has fewer of is lost. White space,
control characters and compatible forms (NFKC) do not count: a tokenizer that only normalises loses nothing.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import InputError

MOST_LOST = 0.02  # the largest share of a language's text that may be lost unasked
SAMPLE = 1 << 19  # bytes of text of a language
_NAMED = 5


@dataclass
class LostText:
    """What a tokenizer loses of a text.

    Attributes:
        size: UTF-8 bytes of the text, in compatible forms and without white space.
        characters: how often each character is lost.
        tokens, bytes: the tokens of the text, and the UTF-8 bytes of it as it stands.
    """

    size: int = 0
    characters: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    bytes: int = 0

    def add(self, text: str, ids: Sequence[int], tokenizer: Any, **decoding: Any) -> None:
        """Counts a text whose tokens are `ids`; `decoding` are further arguments of the tokenizer's `decode`."""
        self.tokens, self.bytes = self.tokens + len(ids), self.bytes + len(text.encode(errors="surrogatepass"))
        unknown = tokenizer.unk_token_id
        if unknown is not None:
            ids = [one for one in ids if one != unknown]
            text = text.replace(str(tokenizer.unk_token), "")  # a text that writes it out
        written = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False, **decoding)
        wanted = _characters(text)
        self.size += _size(wanted)
        self.characters += wanted - _characters(written)

    @property
    def lost(self) -> int:
        """Bytes that are lost."""
        return _size(self.characters)

    @property
    def share(self) -> float:
        """The share of the bytes that is lost."""
        return self.lost / self.size if self.size else 0.0


def lost_text(texts: Iterable[str], tokenizer: Any, size: int = SAMPLE) -> LostText:
    """What a tokenizer loses of the first documents, about `size` bytes of them."""
    found = LostText()
    for text in texts:
        found.add(text, tokenizer(text, add_special_tokens=False, verbose=False).input_ids, tokenizer)
        if found.size >= size:
            break
    return found


def share_in_words(share: float) -> str:
    """`42.0 %`."""
    return "0 %" if share == 0 else "under 0.1 %" if share < 0.001 else f"{share:.1%}".replace("%", " %")


def token_line(counted: Mapping[str, LostText]) -> list[str]:
    """The tokens a byte of each text, in one line."""
    rates = ", ".join(f"{name} {one.tokens / one.bytes:.3f}" for name, one in counted.items() if one.bytes)
    return [f"tokens a byte: {rates}"] if rates else []


def lost_lines(lost: Mapping[str, LostText]) -> list[str]:
    """Each language's share of lost text, and a warning for each that is too large."""
    if not lost:
        return []
    shares = ", ".join(f"{code} {share_in_words(found.share)}" for code, found in lost.items())
    return [f"bytes that the tokenizer loses: {shares}", *(f"warning: {why}" for why in _too_much(lost))]


def check_lost(lost: Mapping[str, LostText], allowed: bool = False) -> None:
    """Refuses text of which the tokenizer loses more than `MOST_LOST`, unless that is allowed."""
    for why in [] if allowed else _too_much(lost):
        raise InputError(
            f"{why}. Take a base whose tokenizer writes this language, or allow it: `allow_lost_text: true` in a "
            "recipe, --allow-lost-text on the command line."
        )


def _too_much(lost: Mapping[str, LostText]) -> list[str]:
    return [
        f"{code}: the tokenizer loses {share_in_words(found.share)} of the text's bytes (most often "
        f"{' '.join(character for character, _ in found.characters.most_common(_NAMED))}): they become unknown tokens, "
        "other characters or nothing, so no model learns to read or write them"
        for code, found in lost.items() if found.share > MOST_LOST
    ]  # fmt: skip


def _characters(text: str) -> Counter[str]:
    counted = Counter(unicodedata.normalize("NFKC", text))
    # Of control characters (Cc), a tokenizer need keep none.
    return Counter({c: n for c, n in counted.items() if not c.isspace() and unicodedata.category(c) != "Cc"})


def _size(characters: Counter[str]) -> int:
    return sum(count * len(one.encode(errors="surrogatepass")) for one, count in characters.items())
