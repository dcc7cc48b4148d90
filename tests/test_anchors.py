"""The package's own anchors: each language's sentences are well-formed, in its script, and nobody else's text."""

import unicodedata
from collections import Counter

import pytest
from conftest import refused

from hf_moe_expand.data.anchors import shipped_anchors

ANCHORS = shipped_anchors()
# The scripts of languages that are not in Latin letters, as Unicode names its letters.
SCRIPTS = {
    "am": {"ETHIOPIC"}, "ar": {"ARABIC"}, "be": {"CYRILLIC"}, "bg": {"CYRILLIC"}, "bn": {"BENGALI"}, "el": {"GREEK"},
    "fa": {"ARABIC"}, "he": {"HEBREW"}, "hi": {"DEVANAGARI"}, "hy": {"ARMENIAN"}, "ja": {"CJK", "HIRAGANA", "KATAKANA"},
    "ka": {"GEORGIAN"}, "kk": {"CYRILLIC"}, "ko": {"HANGUL"}, "ml": {"MALAYALAM"}, "mr": {"DEVANAGARI"},
    "ne": {"DEVANAGARI"}, "ru": {"CYRILLIC"},
    "sr": {"CYRILLIC"}, "ta": {"TAMIL"}, "te": {"TELUGU"}, "th": {"THAI"}, "uk": {"CYRILLIC"},
    "ur": {"ARABIC"}, "zh": {"CJK"},
}  # fmt: skip
LATIN = {
    "az", "ca", "cs", "cy", "da", "de", "en", "es", "et", "eu", "fi", "fo", "fr", "ga", "gd", "ha", "hr", "hu", "id",
    "is", "it", "lt", "lv", "ms", "nl", "no", "pl", "pt", "ro", "sk", "sl", "so", "sv", "sw", "tk", "tl", "tr", "uz",
    "vi", "yo", "zu",
}  # fmt: skip
DENSE = {"am", "he", "ja", "ko", "th", "zh"}  # a character of these says more than a Latin letter


def scripts(text):
    """The first word of each letter's name: `LATIN` of LATIN SMALL LETTER A. A mark belongs to the letter before it."""
    return {unicodedata.name(letter).split()[0] for letter in text if unicodedata.category(letter).startswith("L")}


def same_start(lines):
    """How many lines begin with the most frequent pair of first words."""
    return Counter(tuple(line.split()[:2]) for line in lines).most_common(1)[0][1]


@pytest.mark.parametrize("code", ANCHORS)
def test_each_language_has_sentences_in_its_script(code):
    lines = ANCHORS[code]
    assert len(lines) >= 20
    for line in lines:
        assert line == unicodedata.normalize("NFC", line).strip()
        assert "  " not in line
        assert (10 if code in DENSE else 20) <= len(line) <= 220, line
        assert scripts(line) <= SCRIPTS.get(code, {"LATIN"}), line
        assert not any(letter.isdigit() for letter in line), line
        assert code == "th" or unicodedata.category(line[-1]).startswith("P"), line
    assert set().union(*map(scripts, lines)) == SCRIPTS.get(code, {"LATIN"})
    if code not in {"ja", "th", "zh"}:
        assert same_start(lines) <= 3


def test_no_line_is_there_twice():
    lines = [line.casefold() for code in ANCHORS for line in ANCHORS[code]]
    assert [line for line, count in Counter(lines).items() if count > 1] == []


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        (["hu", "tr"], {"hu", "tr"}), (["nb"], {"no"}), (["zh-Hant"], {"zh"}), (["cmn"], {"zh"}), (["sr-Latn"], {"sr"}),
        (["fil"], {"tl"}), (["pt-BR", "pt-PT"], {"pt"}), (["zsm"], {"ms"}), (["bs"], set()), (["nn"], set()),
        (["id"], {"id"}), (["und", "br"], set()), (["cy"], {"cy"}), (ANCHORS, set(ANCHORS)),
    ],
)  # fmt: skip
def test_languages_left_out_are_left_out(given, gone):
    assert shipped_anchors(given) == {code: lines for code, lines in ANCHORS.items() if code not in gone}


def test_a_wrong_code_is_refused():
    refused(shipped_anchors, ["hu", "klingonese"], says="'klingonese' is not a language code")
