"""Checks language codes, and the old and new languages of an expansion."""

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator

from .errors import InputError

UNDETERMINED = "und"  # BCP 47's code for text whose language nobody determined


@cache
def is_language_code(code: str) -> bool:
    """Whether `code` is a BCP 47 tag of a registered language: `el`, `yue`, `sr-Latn`."""
    import langcodes  # slow: reads its tables at import

    try:
        return langcodes.tag_is_valid(code)
    except langcodes.LanguageTagError:
        return False


def check_language_code(code: Any) -> str:
    """Returns the code; refuses what is no language code."""
    if isinstance(code, bool):  # YAML's `no`
        raise InputError(f"put language codes in quotes: {str(code).lower()} is no text.")
    if not isinstance(code, str) or not is_language_code(code):
        raise InputError(f"{code!r} is not a language code of ISO 639, such as el or yue.")
    return code


def in_words(codes: Iterable[str]) -> list[str]:
    """Codes for a reader, who may not know that of no language."""
    return [f"{code} (undetermined)" if code == UNDETERMINED else code for code in codes]


def check_old_and_new(old: Iterable[str], new: Iterable[str]) -> None:
    """Checks the languages of one expansion: each code, and the codes against each other. Plans, recipes, analyses and
    expansions all check their languages here."""
    old, new = list(old), list(new)
    for code in (*old, *new):
        check_language_code(code)
    if both := sorted(set(old) & set(new)):
        raise InputError(f"{', '.join(both)}: given as an old and as a new language; a language is one of the two.")
    for kind, codes in (("old", old), ("new", new)):
        if twice := sorted({code for code in codes if codes.count(code) > 1}):
            raise InputError(f"{', '.join(twice)}: given twice among the {kind} languages; name each language once.")


# The type of a language code in settings classes.
LanguageCode = Annotated[str, BeforeValidator(check_language_code)]
