"""Samples of text: models continue the first words of held-out text in an old and in a new language."""

import json

from conftest import invoke, save_dense, write_texts

from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.evaluation.samples import begin_samples, continue_samples
from hf_moe_expand.inference.asking import Answering, ChatModel


def test_the_first_language_of_each_group_with_text_begins_a_sample():
    texts = {
        "de": ["eins zwei drei vier fünf sechs sieben acht"],
        "el": ["  ένα\nδύο "],
        "hu": ["egy"],
        "zh": ["字" * 90],
    }
    found = begin_samples(texts, (["en", "de"], ["el", "hu"]))
    assert [(sample.language, sample.prompt) for sample in found] == [
        ("de", "eins zwei drei vier fünf sechs sieben"), ("el", "ένα δύο"),
    ]  # fmt: skip
    assert [sample.prompt for sample in begin_samples(texts, ([], ["zh"]))] == ["字" * 40]
    assert begin_samples({"en": [" "], "el": []}, (["en"], ["el"])) == []


def test_an_evaluation_keeps_what_each_decoder_writes(tmp_path):
    for code, text in (("en", "A short text. "), ("el", "Ένα κείμενο. ")):
        write_texts(tmp_path / f"{code}.jsonl", [text * 6])
    models = [save_dense(tmp_path / "one"), save_dense(tmp_path / "two", seed=1)]
    data = [f"--data={code}={tmp_path / code}.jsonl" for code in ("en", "el")]
    invoke("evaluate", *models, *data, "--old", "en", "--new", "el", "--out", tmp_path / "e.json")
    samples = {sample["language"]: sample for sample in json.loads((tmp_path / "e.json").read_text())["samples"]}
    assert list(samples) == ["en", "el"]
    prompt = samples["en"]["prompt"]
    assert prompt == "A short text. A short text. A short"
    expected = {m.name: ChatModel.load(m).answer(prompt, Answering(max_new_tokens=24)).split() for m in models}
    assert {name: text.split() for name, text in samples["en"]["continued"].items()} == expected
    header, rows = Evaluation.from_json(tmp_path / "e.json").sample_rows()
    assert header == ["language", "held-out text begins", "one", "two"]
    assert rows[0] == ["en", prompt, *samples["en"]["continued"].values()]


def test_words_that_fill_a_models_positions_are_not_continued(tmp_path):
    model = ChatModel.load(save_dense(tmp_path / "one"))
    samples = begin_samples({"zh": ["字" * 90]}, (["zh"], []))  # 120 bytes, each a token; the model takes 64
    continue_samples(samples, model)
    assert samples[0].continued == {}
