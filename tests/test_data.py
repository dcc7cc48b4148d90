"""Sources, packing and mixing."""

import itertools
import json
import pickle
from itertools import pairwise

import datasets
import pytest
from conftest import byte_tokenizer, refused, write_texts
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_moe_expand.checkpoint import source as checkpoint_source
from hf_moe_expand.checkpoint.source import resolve_checkpoint
from hf_moe_expand.data import sources
from hf_moe_expand.data.packing import (
    balanced_tokens,
    first_tokens,
    pack_texts,
    review_documents,
)
from hf_moe_expand.data.places import UnreachableError
from hf_moe_expand.data.sources import LanguageText, check_languages
from hf_moe_expand.evaluation.translation import translation_prompt

END = 256


def load(path, language="el"):
    return LanguageText(language, str(path)).load()["text"]


TRANSLATIONS = [
    {"translation": {"en": "One  word.", "ell": "Μία\nλέξη."}},
    {"translation": {"en": "Only English.", "ell": ""}},
    {"translation": {"en": "Two.", "ell": "Δύο."}},
]


def test_translations_are_a_document_each_way(tmp_path):
    pytest.importorskip("language_data", reason="the extra `eval` is not installed")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text("\n".join(map(json.dumps, TRANSLATIONS)))
    Dataset.from_list(TRANSLATIONS).to_parquet(tmp_path / "a.parquet")
    for source in (tmp_path / "hub" / "train.jsonl", tmp_path / "a.parquet", f"hub:{tmp_path / 'hub'}"):
        assert load(source) == [
            "English: One word. → Greek: Μία λέξη.",
            "Greek: Μία λέξη. → English: One word.",
            "English: Two. → Greek: Δύο.",
            "Greek: Δύο. → English: Two.",
        ]
    (tmp_path / "three.jsonl").write_text(json.dumps({"translation": {"el": "α", "en": "a", "hu": None, "tr": "ä"}}))
    assert load(tmp_path / "three.jsonl") == [
        "English: a → Greek: α", "Greek: α → English: a", "Turkish: ä → Greek: α", "Greek: α → Turkish: ä",
    ]  # fmt: skip
    assert load(tmp_path / "three.jsonl")[0] == translation_prompt(("en", "el"), "a") + " α"  # as it is asked later
    (tmp_path / "both.jsonl").write_text(json.dumps({"text": "γ", "translation": "c"}))  # a column of another use
    assert load(tmp_path / "both.jsonl") == ["γ"]
    Dataset.from_list([{"translation": {"en": 1, "el": 2}}]).to_parquet(tmp_path / "wrong.parquet")
    refused(load, tmp_path / "wrong.parquet", says="nor strings by language under `translation`")


def test_bad_files_are_told_by_file_and_line(tmp_path):
    good = b'{"text": "x"}\n'
    for name, content, said in (
        ("a.jsonl", good + b'{"body": "y"}\n', r"a\.jsonl:2: has no string under `text`, .* \(found body: str"),
        ("a.jsonl", good + b'{"text": 3}\n', r"a\.jsonl:2: has no string under `text`"),
        ("a.jsonl", good + b"[1]\n", r"a\.jsonl:2: .*found a list"),
        ("a.jsonl", good + b'{"text": \n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", good + b"[" * 100_000, r"a\.jsonl:2: not JSON"),
        ("a.jsonl", good + b'{"n": ' + b"9" * 5000 + b"}", r"a\.jsonl:2: not JSON: .*4300"),
        ("a.jsonl", good + b'{"text": "\\ud83d"}', r"a\.jsonl:2: not Unicode text \(surrogates not allowed\)"),
        ("a.jsonl", b'{"translation": {"en": "a", "hu": "b"}}', "no text in language 'el'"),
        ("a.jsonl", b'{"translation": {"en": "a", "el": 3}}', "strings by language under `translation`"),
        ("a.parquet", b"PAR1 but no more", r"a\.parquet: cannot be read as a Parquet file"),
        ("a.jsonl", b"", r"a\.jsonl: holds no text; known: \.jsonl.*a\.jsonl \(empty\)\.$"),
        ("a.txt", b"\n  \n", r"no text in language 'el'"),
        ("a.csv", b"text\nx\n", r"a\.csv: holds no text; known: \.jsonl.*\(of another kind\)"),
    ):
        (tmp_path / name).write_bytes(content)
        refused(load, tmp_path / name, says=said)
    Dataset.from_dict({"text": [["ένα"]]}).to_parquet(tmp_path / "list.parquet")
    refused(load, tmp_path / "list.parquet", says=r"list\.parquet:1: has no string under `text`.*\(found text: list\)")
    Dataset.from_dict({"text": [f"λέξη {number} " * 9 for number in range(4000)]}).to_parquet(tmp_path / "torn.parquet")
    content = bytearray((tmp_path / "torn.parquet").read_bytes())
    content[len(content) // 3 : len(content) // 3 + 400] = bytes(400)
    (tmp_path / "torn.parquet").write_bytes(content)
    refused(load, tmp_path / "torn.parquet", says=r"torn\.parquet: cannot be read as a Parquet file")


def test_hub_datasets_are_streamed_and_sliced(tmp_path):
    # The library takes a folder for a hub id: the same code, without a network.
    write_texts(tmp_path / "train.jsonl", [f"κείμενο {i}" for i in range(9)])
    assert len(load(f"hub:{tmp_path}")) == 9
    assert load(f"hub:{tmp_path}::train[:2]") == ["κείμενο 0", "κείμενο 1"]
    assert len(load(f"hub:{tmp_path}::train[:{10**18 - 1}]")) == 9
    refused(load, f"hub:{tmp_path}::train[:{10**27}]", says=r"the dataset cannot be read: Bad split: train\[:1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.jsonl").write_text('{"body": "x"}\n')
    refused(load, f"hub:{tmp_path / 'other'}", says=r"0:1: has no string under `text`, nor .* \(found body: str\)")
    refused(load, f"hub:{tmp_path / 'nowhere'}", says="nowhere: the dataset cannot be read: ")


def test_which_files_are_read(tmp_path):
    refused(load, tmp_path / "none.jsonl", says=r"no such file \(text for language 'el'\)")
    refused(load, tmp_path, says=r"holds no text; known: \.jsonl")
    write_texts(tmp_path / "a.jsonl", ["ένα"])
    for name in ("a.jsonl~", ".a.jsonl.swp", "#a.jsonl#"):  # copies of editors
        write_texts(tmp_path / name, ["copy"])
    assert load(tmp_path) == ["ένα"]
    write_texts(tmp_path / "a.jsonl", ["new text, longer"])
    assert load(tmp_path) == ["new text, longer"]
    refused(LanguageText.parse, "el.jsonl", says="is not LANGUAGE=FILE")
    assert LanguageText.parse("el=a=b.txt") == LanguageText("el", "a=b.txt")
    refused(check_languages, {"el": 1, "en": 1}, {"el": 1}, says="el: given as an old and as a new language")
    refused(check_languages, {"en": 1}, {}, says="at least one")


def texts(**documents):
    return {code: Dataset.from_dict({"text": list(values)}) for code, values in documents.items()}


words = st.lists(st.text("abαβ", min_size=1, max_size=30), min_size=3, max_size=12)


@settings(max_examples=30, deadline=None)
@given(words, words, st.integers(2, 9), st.integers(0, 5))
def test_packing_keeps_every_token_in_order_with_its_language(english, greek, block_size, seed):
    packed = pack_texts(texts(en=english, el=greek), byte_tokenizer(), block_size, seed)
    ids, languages = (list(itertools.chain(*packed.dataset[name])) for name in ("input_ids", "language_ids"))
    assert all(len(row) == block_size for row in packed.dataset["input_ids"])
    total = sum(packed.tokens.values())
    assert total == sum(len(text.encode()) + 1 for text in [*english, *greek])
    assert len(ids) == total - total % block_size
    # Cut at document ends: what comes out are the documents, whole (but the last) and with one language each.
    left, start = [("en", text) for text in english] + [("el", text) for text in greek], 0
    for position, token in enumerate(ids):
        if token == END:
            (language,) = set(languages[start : position + 1])
            left.remove((packed.languages[language], byte_tokenizer().decode(ids[start:position])))
            start = position + 1
    assert sum(len(text.encode()) + 1 for _, text in left) == total - start


def test_packing_writes_each_token_once_and_drops_less_than_one_block(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = write_texts(tmp_path / "el.jsonl", [f"{number} " * 60 for number in range(2100)])
    packed = pack_texts({"el": LanguageText("el", str(file)).load()}, byte_tokenizer(), 128, 0)
    total = packed.tokens["el"]
    assert len(packed.dataset) == total // 128 == packed.blocks[0]
    tokens = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.arrow")) - file.stat().st_size
    assert 4 <= tokens / total < 4.2


def test_several_processes_tokenise_the_same_blocks():
    data = texts(en=[f"document {i}" for i in range(40)], el=[f"έγγραφο {i}" for i in range(40)])
    alone, shared = (pack_texts(data, byte_tokenizer(), 16, 0, num_proc=number).dataset for number in (None, 2))
    assert list(alone) == list(shared) != list(pack_texts(data, byte_tokenizer(), 16, 1).dataset)
    assert alone[-1] == alone[len(alone) - 1] == [*alone][-1]
    assert list(pickle.loads(pickle.dumps(shared))) == list(alone)  # as workers of a DataLoader get them


def test_languages_are_mixed_from_the_first_block_to_the_last():
    data = texts(en=["ab"] * 100, el=["γ"] * 100)  # three tokens a document, the end included
    rows = pack_texts(data, byte_tokenizer(), 30, 0).dataset["language_ids"]
    shares = [sum(row) / 30 for row in rows]
    assert (len(shares), sum(shares) / 20) == (20, 0.5)
    assert all(0 < share < 1 for share in shares)
    order = [row[place] for row in rows for place in range(0, 30, 3)]
    assert 70 < sum(one != other for one, other in pairwise(order)) < 130  # 99.5 on average


def test_tokens_per_language_takes_whole_documents_and_refuses_more_than_there_are():
    packed = pack_texts(texts(el=["abc"] * 10), byte_tokenizer(), 4, 0, tokens_per_language=9)
    assert (packed.documents, packed.tokens) == ({"el": 3}, {"el": 12})
    refused(first_tokens, "el", [4] * 10, 41, says=r"'el' has 40 tokens, but 41 were asked for")
    tokenizer, given = byte_tokenizer(), texts(en=["a"] * 9, el=["β"] * 500)
    refused(pack_texts, texts(el=["abc"]), tokenizer, 64, 0, says="less than one block of 64")
    refused(pack_texts, given, tokenizer, 8, 0, says="replay_share is 0.5: Language 'en'", replay=(["en"], 0.5))
    tokenizer.eos_token = None
    refused(pack_texts, texts(el=["abc"]), tokenizer, 4, 0, says="no end-of-text token")


@pytest.mark.parametrize(("share", "most", "new"), [(0.01, None, 500), (0.25, 120, 240), (0.6, 120, 240)])
def test_a_share_of_replay_is_that_of_all_tokens_and_the_same_of_each_old_language(share, most, new):
    given = texts(en=["a"] * 900, es=["a"] * 900, el=["βγ"] * 50, tr=["βγ"] * 50)
    packed = pack_texts(given, byte_tokenizer(), 8, 0, tokens_per_language=most, replay=(["en", "es"], share))
    assert packed.tokens["el"] + packed.tokens["tr"] == new
    each = share / (1 - share) * new / 2
    assert 0 <= packed.tokens["en"] - each <= 2  # whole documents of 2 tokens
    assert packed.tokens["es"] == packed.tokens["en"]
    ids = [number for row in packed.dataset["language_ids"] for number in row]
    assert sum(number < 2 for number in ids) / len(ids) == pytest.approx(share, abs=0.03)


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_sides_of_a_mix_have_equally_many_tokens(english, greek, turkish, seed):
    """Each language ends with the document that reaches its share, and the one with least text gives all it has."""
    made = texts(en=["abcd"] * english, el=["a" * 9] * greek, tr=["ab"] * turkish)  # 5, 10 and 3 tokens with the end
    packed = pack_texts(made, byte_tokenizer(), 1, seed, sides=[["en"], ["el", "tr"]])
    of_side = min(5 * english, 2 * 10 * greek, 2 * 3 * turkish)
    for code, size, share in (("en", 5, of_side), ("el", 10, of_side // 2), ("tr", 3, of_side // 2)):
        assert packed.documents[code] == max(-(-share // size), 1)
        assert packed.tokens[code] == size * packed.documents[code]
    assert len(packed.dataset) == sum(packed.tokens.values())
    assert balanced_tokens({"el": 9}, [[], ["el"]]) == {"el": 9}


@pytest.mark.parametrize("new_per_old", [0.3, 1.0, 1.5, 3.0])
def test_by_default_review_takes_as_many_documents_as_every_language_has(new_per_old):
    for en, es, el in itertools.product(range(1, 9), range(1, 4), range(1, 9)):
        given = ({"en": en, "es": es, "el": el}, ["en", "es"], ["el"])
        fits = [n for n in range(1, 9) if n <= min(en, es) and n * new_per_old <= el]
        if fits:
            found = review_documents(*given, new_per_old=new_per_old)
            assert found == {"en": max(fits), "es": max(fits), "el": max(1, round(max(fits) * new_per_old))}
        else:  # not even one old document
            said = f"'el' has {el} documents, but the mix asks for"
            refused(review_documents, *given, new_per_old=new_per_old, says=said)


def test_a_review_mixes_as_many_documents_as_it_is_told_or_refuses():
    for available, old, new_per_old, wanted in (
        (100, 10, 0.27, (10, 3)), (100, 10, 0.23, (10, 2)), (100, 2, 0.1, (2, 1)), (50, 10, 2.0, (10, 20)),
    ):  # fmt: skip
        found = review_documents({"en": available, "el": available}, ["en"], ["el"], old, new_per_old)
        assert (found["en"], found["el"]) == wanted
    for asked, taken in ((50_000, 1109), (1109, 1109), (1000, 1000), (None, 1109)):
        given = ({"en": 40_000, "el": 2219, "hu": 60_000}, ["en"], ["el", "hu"], asked)
        assert review_documents(*given, fewer_documents=True) == {"en": taken, "el": 2 * taken, "hu": 2 * taken}
    for en, el, asked, said in (
        (5, 1, None, r"'el' has 1 documents, but the mix asks for 2: .* allows 0 of each old language\.$"),
        (0, 9, 1, r"'en' has 0 documents, but the mix asks for 1: .* allows 0 of"),
        (5, 3, 5, r"the text allows 1 of each old language\.$"),
        (500, 300, 200, r"'el' has 300 documents, but the mix asks for 400: .*true.; the text allows 150 of"),
    ):
        for fewer in (False, True) if min(en, el) < 2 else (False,):  # not even one old document
            given = ({"en": en, "el": el}, ["en"], ["el"], asked)
            refused(review_documents, *given, fewer_documents=fewer, says=said)


def test_the_hubs_error_comes_after_the_name(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("Couldn't reach the hub.\nTry again.")

    monkeypatch.setattr(sources, "load_dataset", refuse)
    monkeypatch.setattr(checkpoint_source, "snapshot_download", refuse)
    said = "Couldn't reach the hub. Try again"
    refused(load, "hub:no/such", says=rf"^hub:no/such: the dataset .*: {said}\.$", raises=UnreachableError)
    refused(resolve_checkpoint, "no/such", says=f"^no/such: no such folder, and the hub .*: {said}")
    refused(resolve_checkpoint, "no/such/folder", says="not a hub id")
