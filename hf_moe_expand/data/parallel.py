"""Sentences and their translations as text, in the one form in which models learn and are asked to translate."""

from collections.abc import Iterator, Mapping

import langcodes

from ..errors import InputError
from ..extra import import_extra

Pair = tuple[str, str]


def language_name(code: str) -> str:
    """English name of a language: `el` is Greek, `zho_Hans` Chinese (Simplified).

    Raises:
        InputError: no language has this code, or the package that knows the names is not installed.
    """
    import_extra("language_data")
    try:
        if langcodes.tag_is_valid(code):
            return langcodes.Language.get(code).display_name()
    except langcodes.LanguageTagError:
        pass
    raise InputError(f"{code!r} is no language code of ISO 639 (such as el or yue), so a prompt cannot name it.")


def translation_line(pair: Pair, source: str, target: str) -> str:
    """`English: ... → Greek: ...`"""
    return f"{translation_start(pair, source)} {target}"


def translation_start(pair: Pair, source: str) -> str:
    """The same up to the translation."""
    names = [language_name(code) for code in pair]
    return f"{names[0]}: {source} → {names[1]}:"


def translation_documents(sentences: Mapping[str, str | None], language: str) -> Iterator[str]:
    """A document for each direction between `language` and another one, a line each. White space in a sentence counts
    as one space; a translation that is missing makes none.

    Args:
        sentences: that say the same, by language; `language` among them.
    """
    lines = {code: " ".join((sentence or "").split()) for code, sentence in sentences.items()}
    for other in lines:
        if other != language and lines[other] and lines[language]:
            for pair in ((other, language), (language, other)):
                yield translation_line(pair, *(lines[code] for code in pair))
