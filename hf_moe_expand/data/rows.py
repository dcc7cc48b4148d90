"""Rows of text: the documents, or sentence pairs, that a row has in a language, and why a row is left out."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import langcodes
from datasets import Value

from ..core.errors import InputError
from ..core.extra import import_extra
from ..core.languages import is_language_code, names_language

Pair = tuple[str, str]
Document = dict[str, str]  # its `text`; or, of a sentence pair, the columns of `PAIR`

TEXT = {"text": Value("string")}
PAIR = dict.fromkeys(("source", "target", "source_language", "target_language"), Value("string"))
_MOST_NAMED = 8  # reasons in a line


class Row(NamedTuple):
    """One row of a file.

    Attributes:
        number: its place, from 1; the number of its line where it is one.
        content: its columns.
        read: the share of the file that is read, as far as is known.
    """

    number: int
    content: dict[str, Any]
    read: float


def counted(number: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class LeftOut(Counter[str]):
    """Rows that are left out, by the reason."""

    def __str__(self) -> str:
        most = self.most_common(_MOST_NAMED)
        rest = self.total() - sum(count for _, count in most)
        named = [f"{count:,} {reason}" for reason, count in (*most, ("for other reasons", rest)) if count]
        return f"{counted(self.total(), 'row')} left out: {', '.join(named)}"


def judged(row: Mapping[str, Any], language: str, where: str, as_pairs: bool = False) -> tuple[list[Document], str]:
    """The documents or pairs in a language of a row; where it has none, the reason.

    Raises:
        InputError: it is no row of text; `where` says which one it is.
    """
    _check_row(row, where)
    text, tag = row.get("text"), row.get("language")
    if isinstance(tag, list) and len(tag) == 1:
        tag = tag[0]
    if tag is not None and not names_language(tag, language):
        return [], f"tagged {str(tag)[:40]!r}"
    if text is None and row.get("translation") is None:
        return [], "without text"
    if as_pairs:
        return list(row_pairs(row, language, where)), "without a sentence and its translation"
    if text is None:
        found = [{"text": translation_line(codes, *both)} for codes, both in _directions(row, language)]
        return found, "without a sentence and its translation"
    return [{"text": text}] if text.strip() else [], "without text"


def row_pairs(row: Mapping[str, Any], language: str, where: str) -> Iterator[dict[str, str]]:
    """A row's sentence pairs to and from a language; refuses a row with `text` in place of `translation`."""
    if not _is_translation(row):
        raise InputError(
            f"{where}: holds `text`, but the model is an encoder-decoder, which learns from sentences and their "
            'translations: give rows such as {"translation": {"en": "A word.", "el": "Μία λέξη."}}.'
        )
    for codes, both in _directions(row, language):
        named = (language if names_language(code, language) else code for code in codes)
        yield dict(zip(PAIR, (*both, *named), strict=True))


def _directions(row: Mapping[str, Any], language: str) -> Iterator[tuple[Pair, Pair]]:
    """The codes and the sentences of each direction between a language and another one, without missing translations;
    white space in a sentence counts as one space."""
    sentences = {code: " ".join((text or "").split()) for code, text in (row.get("translation") or {}).items()}
    named = [code for code in (language, *sentences) if code in sentences and names_language(code, language)]
    if not named or not sentences[own := named[0]]:
        return
    for other in sentences:
        if other != own and sentences[other]:
            for source, target in ((other, own), (own, other)):
                yield (source, target), (sentences[source], sentences[target])


def _check_row(row: Any, where: str) -> None:
    """Refuses a row without a column of text, or of translations, whose value may be missing."""
    if not isinstance(row, dict):
        raise InputError(f"{where}: needs an object with `text` or `translation`, found a {type(row).__name__}.")
    text = row.get("text")
    if text is None and row.get("translation") is None:
        has_text = "text" in row or "translation" in row
    else:
        has_text = isinstance(text, str) if text is not None else _is_translation(row)
    if not has_text:
        found = ", ".join(f"{name}: {type(value).__name__}" for name, value in row.items())
        raise InputError(
            f"{where}: has no string under `text`, nor strings by language under `translation` (found {found})."
        )
    try:
        for part in (text, *chain.from_iterable(row["translation"].items() if _is_translation(row) else ())):
            (part or "").encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: not Unicode text ({error.reason}).") from None


def _is_translation(row: Mapping[str, Any]) -> bool:
    sentences = row.get("translation")
    return isinstance(sentences, dict) and all(isinstance(text, str | None) for text in sentences.values())


def language_name(code: str) -> str:
    """English name of a language: `el` is Greek, `zho_Hans` Chinese (Simplified)."""
    import_extra("language_data")
    if not is_language_code(code):
        raise InputError(f"{code!r} is not a language code of ISO 639, such as el or yue, so a prompt cannot name it.")
    return langcodes.Language.get(code).display_name()


def translation_line(pair: Pair, source: str, target: str) -> str:
    """`English: ... → Greek: ...`"""
    return f"{translation_start(pair, source)} {target}"


def translation_start(pair: Pair, source: str) -> str:
    """The start of `translation_line`, up to the translation."""
    names = [language_name(code) for code in pair]
    return f"{names[0]}: {source} → {names[1]}:"
