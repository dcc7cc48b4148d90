"""Plain everyday sentences in many languages, from which gates learn what is not a new language: a file of `text/`
each, written for this package. Norwegian (`no`) is Bokmål, Serbian (`sr`) Cyrillic, Chinese (`zh`) simplified."""

from collections.abc import Collection
from importlib.resources import files

from ...core.languages import UNDETERMINED, check_language_code

# CLDR's distance of two languages: 1 from nb to no and 4 from prs to fa, but 8 from bs to hr and 12 from da to no.
_SAME = 5


def shipped_anchors(leave_out: Collection[str] = ()) -> dict[str, list[str]]:
    """The package's own sentences, some two dozen for each language, by language code, sorted by code.

    Args:
        leave_out: language codes, such as those of the new languages. A language is left out under each of its codes
            and in each script and region: `nb` leaves out `no`, `zh-Hant` leaves out `zh`, `fil` leaves out `tl`.
            Neighbours stay: `bs` leaves out neither `hr` nor `sr`.
    """
    unwanted = [check_language_code(code) for code in leave_out]
    texts = {
        file.name.removesuffix(".txt"): file.read_text(encoding="utf-8").splitlines()
        for file in (files(__name__) / "text").iterdir()
        if file.name.endswith(".txt")
    }
    return {code: texts[code] for code in sorted(texts) if not any(_is_same(code, other) for other in unwanted)}


def shipped_sentences(language: str) -> list[str]:
    """The package's own sentences in a language, under any of its codes; none if it has none."""
    if language == UNDETERMINED:
        return []
    others = shipped_anchors(leave_out=[language])
    return [line for code, lines in shipped_anchors().items() if code not in others for line in lines]


def _is_same(code: str, other: str) -> bool:
    import langcodes  # slow: reads its tables at import

    language = langcodes.Language.get(other).language or other  # without script and region
    return langcodes.tag_distance(language, code) <= _SAME
