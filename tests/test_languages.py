"""Which tags name a language, the names that a language may have but once, and the package's own anchors."""

import json
import unicodedata
from collections import Counter

import pytest
import torch
from conftest import byte_tokenizer, refused
from datasets import Dataset

from hf_moe_expand import Plan, pack_texts
from hf_moe_expand.analysis.gating import anchors_for
from hf_moe_expand.checkpoint.arguments import text_sources
from hf_moe_expand.core.languages import check_language_code, check_old_and_new, names_language, same_language
from hf_moe_expand.data.anchors import shipped_anchors, shipped_sentences
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.planning.grouping import check_groups
from hf_moe_expand.runs.recipe import Recipe

# Of each language: the tags of its text, and those of other text.
TAGS = {
    "zh": ("zh zh-Hans zh_CN zh-Hant cmn zho zho_Hans zh-TW ZH cmn-Hans-CN", "yue zh-yue nan ja und"),
    "zh-Hans": ("zh zh-Hans zh_CN cmn zho_Hans zh-SG", "zh-Hant zh-TW zho_Hant yue"),
    "zh-Hant": ("zh-Hant zh-TW zho_Hant zh_HK", "zh cmn zh-Hans"),
    "zho_Hans": ("zh zh-Hans cmn", "zh-Hant"),
    "pt": ("pt pt-BR pt_BR por por_Latn pt-PT PT", "gl es"),
    "pt-BR": ("pt pt-BR por_Latn pt_br", "pt-PT pt_AO"),
    "pt-PT": ("pt-PT pt_PT", "pt pt-BR"),
    "no": ("no nb nor nob nob_Latn nb_NO no-NO", "nn nno_Latn da"),
    "nb": ("nb no nob nor nob_Latn", "nn sv"),
    "nn": ("nn nno nno_Latn nn_NO", "no nb"),
    "sr": ("sr sr-Latn sr-Cyrl srp srp_Cyrl sh sr_RS", "hr bs mk"),
    "sr-Latn": ("sr-Latn srp_Latn", "sr srp sr-Cyrl"),
    "tr": ("tr tur tur_Latn tr-TR tr_TR tr_TR.UTF-8 TR", "Turkish multilingual und mul az ota"),
    "ar": ("ar arb arb_Arab ar-EG ara", "ary arz ars apc"),
    "fa": ("fa fas pes pes_Arab prs", "tg ckb"),
    "el": ("el ell ell_Grek el-polyton el_GR", "grc en"),
    "et": ("et est ekk ekk_Latn", "vro fi"),
    "lv": ("lv lav lvs_Latn", "ltg lt"),
    "ms": ("ms msa zsm zsm_Latn", "id min"),
    "sw": ("sw swa swh_Latn", "rw"),
    "fil": ("fil tl tgl tgl_Latn", "ceb"),
    "und": ("und", "el mul"),
    "en-x-ours": ("en-x-ours", "en"),
}


@pytest.mark.parametrize("language", TAGS)
def test_tags_in_every_standard_name_a_language(language):
    own, others = (tags.split() for tags in TAGS[language])
    assert {tag for tag in [*own, *others] if names_language(tag, language)} == {*own}


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_are_counted_by_the_tags_that_leave_them_out(tmp_path, capsys):
    tags = ["zh", "zh-Hans", "zho_Hant", ["cmn"], "yue", "yue", ["zh", "en"], False, "", None]
    rows = [{"text": f"{number}", "language": tag} for number, tag in enumerate(tags)]
    write_rows(tmp_path / "a.jsonl", rows)
    assert LanguageText("zh", str(tmp_path)).load()["text"][:] == ["0", "1", "2", "3", "9"]
    said = capsys.readouterr().err
    assert "5 documents kept, 5 rows left out: 2 tagged 'yue'" in said
    assert all(part in said for part in ("""1 tagged "['zh', 'en']\"""", "1 tagged 'False'", "1 tagged ''"))
    assert list(LanguageText("zh", str(tmp_path)).documents(say=True)) == ["0", "1", "2", "3", "9"]
    assert "5 documents read, 5 rows left out" in capsys.readouterr().err
    write_rows(tmp_path / "a.jsonl", rows[:-1])
    refused(LanguageText("el", str(tmp_path)).load, says=r"no text in language 'el'.*\(9 rows left out: 2 tagged 'yue'")
    codes = ["el", "af", "bg", "ca", "cs", "cy", "da", "de", "en", "es", "et", "eu", "fi"]  # too many to list
    write_rows(tmp_path / "a.jsonl", [{"text": "x", "language": code} for code in codes])
    LanguageText("el", str(tmp_path)).load()
    assert "12 rows left out: 1 tagged 'af'" in (said := capsys.readouterr().err)
    assert "4 for other reasons" in said


SAME = [
    ("en", "eng"), ("en", "eng_Latn"), ("zh", "cmn"), ("zh", "zh-Hans"), ("pt", "pt-BR"), ("no", "nb"), ("fil", "tl")
]  # fmt: skip
OTHER = [
    ("zh", "zh-Hant"), ("zh", "yue"), ("pt", "pt-PT"), ("nb", "nn"), ("sr", "sr-Latn"), ("sr", "hr"), ("fa", "prs")
]  # fmt: skip


def test_names_of_one_language():
    for one, other in [*SAME, *OTHER]:
        assert same_language(one, other) is same_language(other, one) is ((one, other) in SAME)


def byte_texts(*codes):
    return {code: Dataset.from_dict({"text": ["some text"] * 9}) for code in codes}


@pytest.mark.parametrize(("one", "other"), SAME[1:3])
@pytest.mark.parametrize(
    "takes",
    [
        lambda one, other: check_old_and_new([one], [other]),
        lambda one, other: check_old_and_new([], [one, "tr", other]),
        lambda one, other: Plan("own", [2, 1], old=[one], new=[other]),
        lambda one, other: check_groups([[one], ["tr", other]]),
        lambda one, other: text_sources([f"{one}=a.txt", f"{other}=b.txt"]),
        lambda one, other: pack_texts(byte_texts(one, other), byte_tokenizer(), 4, 0),
        lambda one, other: evaluate_model(torch.nn.Linear(1, 1), byte_tokenizer(), byte_texts(one, other)),
    ],
)
def test_one_language_under_two_names_is_refused(takes, one, other):
    refused(takes, one, other, says=f"{one}, {other}: two names of one language: give all its text under one")


def test_a_recipe_names_a_language_once():
    for said, part in (
        ("eng, en", "old: {eng: a.jsonl}\nnew: {en: b.jsonl}"),
        ("el, ell_Grek", "old: {en: a.jsonl}\nnew: {el: b.jsonl, ell_Grek: c.jsonl}"),
        ("el, ell", "old: {en: a.jsonl}\nnew: {el: b.jsonl}\ntest: {ell: c.jsonl}"),
        ("tr, tur", "old: {en: a.jsonl}\nnew: {el: b.jsonl}\ngates: {}\nanchors: {tr: c.txt, tur: c.txt}"),
    ):
        text = f"base: b\noutput: o\nplan: {{method: moe-lpr, experts: 2}}\n{part}\n"
        refused(Recipe.of_text, text, "recipe.yaml", says=f"{said}: two names of one language")


def test_given_anchors_stand_beside_the_packages_and_are_no_language_of_the_model_under_another_name():
    classes, texts = {"en": 0, "el": 1}, ["en", "el"]
    anchors = {code: ["text"] for code in ("eng", "hu", "nb")}
    chosen = anchors_for(classes, texts, anchors)
    package = shipped_anchors(leave_out=["en", "el", "hu", "no"])
    assert chosen == {"hu": ["text"], "nb": ["text"]} | package
    assert anchors_for(classes, texts, None) == shipped_anchors(leave_out=["en", "el"])
    refused(anchors_for, classes, texts, {**anchors, "ell_Grek": ["text"]}, says="anchors: ell_Grek is a new language")
    assert (shipped_sentences("hu"), shipped_sentences("nb")) == (ANCHORS["hu"], ANCHORS["no"])
    assert shipped_sentences("ky") == shipped_sentences("und") == []


def test_what_is_no_language_code_is_refused():
    for name in ("gr", "jp", "xx", "qq", "English", 3, None):
        refused(check_language_code, name, says=r"such as el or yue\.$")


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
DENSE = {"am", "he", "ja", "ko", "th", "zh"}  # a character of these says more than a Latin letter


def scripts(text):
    """The first word of each letter's name: `LATIN` of LATIN SMALL LETTER A. A mark belongs to the letter before it."""
    return {unicodedata.name(letter).split()[0] for letter in text if unicodedata.category(letter).startswith("L")}


@pytest.mark.parametrize("code", ANCHORS)
def test_each_language_has_sentences_in_its_script(code):
    lines, of_code = ANCHORS[code], SCRIPTS.get(code, {"LATIN"})
    assert len(lines) >= 20
    for line in lines:
        assert line == unicodedata.normalize("NFC", line).strip()
        assert "  " not in line
        assert (10 if code in DENSE else 20) <= len(line) <= 220, line
        assert not any(letter.isdigit() for letter in line), line
        assert code == "th" or unicodedata.category(line[-1]).startswith("P"), line
    assert set().union(*map(scripts, lines)) == of_code
    if code not in {"ja", "th", "zh"}:  # whose words no space divides
        beginnings = Counter(tuple(line.split()[:2]) for line in lines)
        assert max(beginnings.values()) <= 3


def test_no_line_is_there_twice_and_the_languages_are_many():
    lines = [line.casefold() for code in ANCHORS for line in ANCHORS[code]]
    assert [line for line, count in Counter(lines).items() if count > 1] == []
    assert list(ANCHORS) == sorted(ANCHORS)
    assert len(ANCHORS) >= 40
    assert set(SCRIPTS) < set(ANCHORS)


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
    refused(shipped_anchors, [*given, "klingonese"], says="'klingonese' is not a language code")
