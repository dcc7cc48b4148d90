"""Tokens a word, a character and a byte, against counts by hand."""

import json

import pytest
from conftest import byte_tokenizer, invoke, write_texts

from hf_moe_expand.analysis.fertility import measure_fertility
from hf_moe_expand.core.errors import InputError


def test_a_tokenizer_of_bytes_makes_one_token_a_byte():
    found = measure_fertility(byte_tokenizer(), {"el": ["δύο τρία"], "en": ["two three", "four"]})
    el, en = found.languages["el"], found.languages["en"]
    assert (el.tokens, el.words, el.characters, el.bytes) == (15, 2, 8, 15)
    assert (en.tokens, en.words, en.characters, en.bytes) == (13, 3, 13, 13)
    assert (el.per_word, el.per_character, el.per_byte) == (7.5, 15 / 8, 1.0)
    assert found.best() == "en"
    header, rows = found.rows()
    assert [row[0] for row in rows] == ["en", "el"]
    assert rows[1] == ["el", "15", "7.50", "1.875", "1.000", "1.88", "0 %"]
    assert len(header) == len(rows[0])


def test_it_reads_whole_documents_up_to_a_number_of_characters():
    texts = {"en": ["a" * 10] * 100}
    assert measure_fertility(byte_tokenizer(), texts, 25).languages["en"].characters == 30
    for wrong, said in (({"en": []}, "no text"), ({"en": ["  "]}, "no text")):
        with pytest.raises(InputError, match=said):
            measure_fertility(byte_tokenizer(), wrong)
    with pytest.raises(InputError, match="characters is 0"):
        measure_fertility(byte_tokenizer(), texts, 0)


def test_the_command_needs_no_weights(tmp_path):
    base = tmp_path / "base"
    byte_tokenizer().save_pretrained(base)
    (base / "config.json").write_text('{"model_type": "qwen2"}')
    el = write_texts(tmp_path / "el.jsonl", ["ένα δύο"])
    en = write_texts(tmp_path / "en.jsonl", ["one two"])
    arguments = ["--data", f"el={el}", "--data", f"en={en}", "--out", tmp_path / "out.json"]
    said = invoke("analyze", "fertility", base, *arguments)
    assert said.index("en") < said.index("el")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["best"] == "en"
    assert written["languages"]["el"]["tokens_per_byte"] == 1.0
    with pytest.raises(InputError, match="exists already"):
        invoke("analyze", "fertility", base, *arguments)
    for away in ("hub:nobody/nothing", "s3://nowhere/el.jsonl"):
        with pytest.raises(InputError, match=rf"{away}: analyze fertility reads local files: download the text first"):
            invoke("analyze", "fertility", base, "--data", f"el={away}")
