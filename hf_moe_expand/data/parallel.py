"""Writes sentences and their translations as text, in one form for training and for evaluation."""

from collections.abc import Iterator, Mapping

import langcodes

from ..errors import InputError
from ..extra import import_extra

Pair = tuple[str, str]


def language_name(code: str) -> str:
    """English name of a language: `el` is Greek, `zho_Hans` Chinese (Simplified).

    Raises:
        InputError: no language has this code, or the package of language names is not installed.
    """
    import_extra("language_data")
    try:
        if langcodes.tag_is_valid(code):
            return langcodes.Language.get(code).display_name()
    except langcodes.LanguageTagError:
        pass
    raise InputError(f"{code!r} is not a language code of ISO 639, such as el or yue, so a prompt cannot name it.")


def translation_line(pair: Pair, source: str, target: str) -> str:
    """`English: ... → Greek: ...`"""
    return f"{translation_start(pair, source)} {target}"


def translation_start(pair: Pair, source: str) -> str:
    """The start of `translation_line`, up to the translation."""
    names = [language_name(code) for code in pair]
    return f"{names[0]}: {source} → {names[1]}:"


def translation_documents(sentences: Mapping[str, str | None], language: str) -> Iterator[str]:
    """One document, of one line, for each direction between `language` and another language. White space in a sentence
    counts as one space; missing translations make no document.

    Args:
        sentences: the same sentence in each language, `language` included.
    """
    lines = {code: " ".join((sentence or "").split()) for code, sentence in sentences.items()}
    for other in lines:
        if other != language and lines[other] and lines[language]:
            for pair in ((other, language), (language, other)):
                yield translation_line(pair, *(lines[code] for code in pair))
