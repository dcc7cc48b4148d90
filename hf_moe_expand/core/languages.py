"""Language codes, the old and new languages of an expansion, and which tags name a language."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations
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
    if not isinstance(code, str) or not is_language_code(code):
        raise InputError(f"{code!r} is not a language code of ISO 639, such as el or yue.")
    return code


def names_language(tag: Any, language: str) -> bool:
    """Whether text with this tag is text in `language`.

    BCP 47, ISO 639-3, FLORES and locales are one: `tr` takes `tur`, `tur_Latn`, `tr-TR` and `tr_TR.UTF-8`. A language
    takes its scripts and regions: `zh` takes `zh-Hant`. One with a script or region takes the tags that state it or
    usually mean it: `zh-Hans` takes `zh` and `zh-CN`, `sr-Latn` does not take `sr`. A macrolanguage takes the member
    that usually stands for it (`zh` takes `cmn`, `ar` takes `arb`, `no` takes `nb`) and no other (`yue`, `ary`, `nn`).
    """
    if not isinstance(tag, str):
        return False
    wanted, found = _parsed(language), _parsed(tag)
    if wanted is None or found is None:
        return tag == language
    stated, usual = wanted[0], found[1]
    return (
        usual.language == stated.language
        and stated.script in (None, usual.script)
        and stated.territory in (None, usual.territory)
        and {*(stated.variants or ())} <= {*(usual.variants or ())}
        and stated.private in (None, usual.private)
    )


@cache
def _parsed(tag: str) -> tuple[Any, Any] | None:
    """A tag as a `langcodes.Language`, and the same with the script and the region that it usually means; None for what
    names no language."""
    from langcodes import Language, LanguageTagError, standardize_tag

    try:
        stated = Language.get(standardize_tag(tag.partition(".")[0], macro=True), normalize=False)
    except LanguageTagError:
        return None
    if stated.language is None:
        return None
    if stated.language == "no":  # CLDR's code for Bokmål, in which nearly all text with this tag is
        stated = stated.update(Language.make(language="nb"))
    return stated, stated.maximize()


def same_language(code: str, other: str) -> bool:
    """Whether two codes are names of one language, each of which takes the text of the other: `en` and `eng_Latn`."""
    return code == other or (names_language(code, other) and names_language(other, code))


def named_in(tag: str, known: Sequence[str]) -> str | None:
    """The code among these that a tag names: itself, else the first that takes its text; None without one."""
    return tag if tag in known else next((code for code in known if names_language(tag, code)), None)


def check_named_once(codes: Sequence[str]) -> None:
    """Refuses a language that has two names among these codes, such as `en` and `eng`."""
    for one, other in combinations(dict.fromkeys(codes), 2):
        if same_language(one, other):
            raise InputError(f"{one}, {other}: two names of one language: give all its text under one of them.")


def in_words(codes: Iterable[str]) -> list[str]:
    """Codes for a reader, who may not know that of no language."""
    return [f"{code} (undetermined)" if code == UNDETERMINED else code for code in codes]


def check_old_and_new(old: Iterable[str], new: Iterable[str]) -> None:
    """Checks the languages of one expansion: each code, and the codes against each other."""
    old, new = list(old), list(new)
    for code in (*old, *new):
        check_language_code(code)
    if both := sorted(set(old) & set(new)):
        raise InputError(f"{', '.join(both)}: given as an old and as a new language; a language is one of the two.")
    for kind, codes in (("old", old), ("new", new)):
        if twice := sorted({code for code in codes if codes.count(code) > 1}):
            raise InputError(f"{', '.join(twice)}: given twice among the {kind} languages; name each language once.")
    check_named_once([*old, *new])


# The type of a language code in settings classes.
LanguageCode = Annotated[str, BeforeValidator(check_language_code)]
