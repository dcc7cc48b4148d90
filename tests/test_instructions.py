"""benchmarks/instructions.py: prompts, answers, and what counts as one; and the benchmark that asks them."""

import importlib
import json
import random
import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from conftest import save_dense, write_texts

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
WORDS = ["".join(letters) for letters in product("abcde", repeat=3)]
# A text, its answer, another answer in the same frame, and what is out of the frame.
ANSWERS = {
    "digit": ("abc 12\ndef.", "yes", "no", "yes, one"),
    "full stop": ("abc 12\ndef.", "[yes]", "[no]", "[yes"),
    "capitals": ("ABC 12\nDEF.", "Answer: yes", "Answer: no", "answer: yes"),
    "lines": ("abc 12\ndef.", "2 lines.", "1 line.", "two lines."),
    "two answers": ("abc\ndef.", "1. no\n2. yes", "1. no\n2. no", "1. no 2. yes"),
}
OPPOSITES = {
    "digit": ("abc\ndef.", "no"),
    "full stop": ("abc. 12\ndef", "[no]"),
    "capitals": ("ABC 12\nDEf.", "Answer: no"),
    "lines": ("abc 12 def.", "1 line."),
    "two answers": ("abc 1.\ndef", "1. yes\n2. no"),
}


@pytest.fixture
def instructions(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("instructions")


def documents(seed, count: int = 200) -> list[str]:
    rng = random.Random(seed)
    return [
        " ".join(rng.choices(WORDS, k=9)) + ". 3 pages (x-ray), " + " ".join(rng.choices(WORDS, k=5))
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_is_right_or_in_the_frame_or_neither(instructions, kind):
    assert set(ANSWERS) == set(instructions.FORMATS)
    text, right, framed, unframed = ANSWERS[kind]
    form = instructions.FORMATS[kind]
    assert form.answer(text) == right
    assert form.answer(OPPOSITES[kind][0]) == OPPOSITES[kind][1]
    example = instructions.Example(kind, f"{form.question}\n{text}", right)
    assert instructions.check(example, right, stopped=True) == (True, True)
    assert instructions.check(example, framed, stopped=True) == (True, False)
    others = [answer for name, (_, answer, *_) in ANSWERS.items() if name != kind]
    for other in (unframed, right + "\n", "", *others):
        assert instructions.check(example, other, stopped=True) == (False, False), other
    assert instructions.check(example, right, stopped=False) == (False, False)


def test_answers_follow_from_the_prompt_and_every_answer_occurs(instructions):
    examples = instructions.make_examples(documents(0), 300, seed=0)
    assert [example.kind for example in examples] == list(instructions.FORMATS) * 60
    assert len({example.prompt for example in examples}) == 300
    answers = {kind: [] for kind in instructions.FORMATS}
    for example in examples:
        question, text = example.prompt.split("\n", 1)
        assert question == instructions.FORMATS[example.kind].question
        words = [word for word in re.findall(r"\w+", text.lower()) if not word.isdigit()]
        assert 4 <= len(words) <= 6
        assert set(words) <= set(WORDS)
        assert example.answer == instructions.FORMATS[example.kind].answer(text)
        answers[example.kind].append(example.answer)
    counts = {kind: Counter(given) for kind, given in answers.items()}
    assert {kind: len(count) for kind, count in counts.items()} == {
        "digit": 2, "full stop": 2, "capitals": 2, "lines": 3, "two answers": 4
    }  # fmt: skip
    for count in counts.values():
        assert min(count.values()) > 60 / len(count) / 3  # no answer is nearly always right


def test_train_and_test_prompts_are_disjoint(instructions):
    train = {example.prompt for example in instructions.make_examples(documents(0), 300, seed=0)}
    assert len(train) == 300
    again = instructions.make_examples(documents(0), 100, seed=0)
    assert {example.prompt for example in again} <= train
    test = instructions.make_examples(documents(0), 100, seed=0, exclude=train)
    assert len({example.prompt for example in test}) == 100
    assert not train & {example.prompt for example in test}
    with pytest.raises(ValueError, match="10,000 were asked for"):
        instructions.make_examples(documents(0), 10_000, seed=0)


def test_the_benchmark_makes_and_scores_every_model(instructions, tmp_path, capsys, monkeypatch):
    module = importlib.import_module("delta_moe")
    monkeypatch.setattr(module, "SFT_BATCH", 4)
    monkeypatch.setattr(module, "FOR_EACH_FORMAT", {"en": 2, "el": 1, "hu": 1, "tr": 1})
    for code in (*module.OLD, *module.NEW):
        for split, count in (("train", 300), ("test", 60)):
            write_texts(tmp_path / f"{code}.{split}.jsonl", documents(f"{code} {split}", count))
    base = save_dense(tmp_path / "base", max_position_embeddings=256)
    steps = "--steps 2 --sft-steps 2 --review-steps 2 --test-tokens 600"
    call = [*steps.split(), "--data", str(tmp_path), "--base", str(base), "--out", str(tmp_path / "out")]
    module.main([*call, "--table", str(tmp_path / "table.md")])
    said = capsys.readouterr().out
    table = (tmp_path / "table.md").read_text("utf-8")
    assert said.endswith(table)
    names = ["base", "instruct", "MoE, stage 1", "DeltaMoE", "DeltaMoE, router tuning", "MoE-CPT-Avg", "Dense-FT",
             "Dense-FT-Delta", "Dense-FT-Avg", "LLaMA-Pro"]  # fmt: skip
    sizes = {}
    for name in names:
        assert sum(line.startswith(f"| {name} |") for line in table.splitlines()) == 3, name
        result = json.loads((tmp_path / "out" / "results" / f"{name}.json").read_text("utf-8"))
        counts = {code: len(rows) for code, rows in result["answers"].items()}
        assert counts == {"en": 10, "el": 5, "hu": 5, "tr": 5}
        sizes[name] = result["parameters"]
    assert sizes["base"] == sizes["Dense-FT-Avg"] < sizes["LLaMA-Pro"]
    assert sizes["base"] < sizes["MoE, stage 1"] == sizes["DeltaMoE"] == sizes["MoE-CPT-Avg"]
    module.main(call)
    said = capsys.readouterr().out
    assert said.endswith(table)
    assert " ..." not in said
