"""benchmarks/instructions.py: prompts, answers, and what counts as one; and the benchmark that asks them."""

import importlib
import json
import random
import re
from itertools import product
from pathlib import Path

import pytest
from conftest import save_dense, write_texts

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
WORDS = ["".join(letters) for letters in product("abcde", repeat=3)]
RIGHT = {
    "first word": "Answer: open",
    "last word": "[colour]",
    "twice": "open menu, open menu",
    "yes or no": "yes",
    "numbered": "1. open\n2. menu\n3. choose",
}
# In the frame, but of other words; then out of the frame.
WRONG = {
    "first word": ("Answer: menu", "open"),
    "last word": ("[menu]", "colour"),
    "twice": ("menu open, menu open", "open menu open menu"),
    "yes or no": ("no", "yes, it is"),
    "numbered": ("1. menu\n2. open\n3. choose", "1. open 2. menu 3. choose"),
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


@pytest.mark.parametrize("kind", RIGHT)
def test_an_answer_is_right_or_in_the_frame_or_neither(instructions, kind):
    assert set(RIGHT) == set(instructions.FORMATS)
    words = ["open", "menu", "choose", "colour"]
    prompt, answer = instructions.FORMATS[kind].ask(words, words, random.Random(0))
    example = instructions.Example(kind, prompt, answer)
    assert answer == RIGHT[kind]
    framed, unframed = WRONG[kind]
    assert instructions.check(example, answer, stopped=True) == (True, True)
    assert instructions.check(example, framed, stopped=True) == (True, False)
    for other in (unframed, answer + "\n", "", *(text for name, text in RIGHT.items() if name != kind)):
        assert instructions.check(example, other, stopped=True) == (False, False), other
    assert instructions.check(example, answer, stopped=False) == (False, False)


def test_answers_follow_from_the_prompt(instructions):
    examples = instructions.make_examples(documents(0), 200, seed=0)
    assert [example.kind for example in examples] == list(instructions.FORMATS) * 40
    said = set()
    for example in examples:
        question, text = example.prompt.split("\n")
        words = text.split()
        assert re.fullmatch(r"[a-z]+( [a-z]+)*", text)
        assert all(word in WORDS for word in words)
        if example.kind == "yes or no":
            asked = re.fullmatch(r"Is the word (\w+) in this text\? Say yes or no\.", question).group(1)
            expected = "yes" if asked in words else "no"
            said.add(expected)
        else:
            expected = {
                "first word": f"Answer: {words[0]}",
                "last word": f"[{words[-1]}]",
                "twice": f"{text}, {text}",
                "numbered": "\n".join(f"{number}. {word}" for number, word in enumerate(words, start=1)),
            }[example.kind]
        assert example.answer == expected
        assert instructions.check(example, expected, stopped=True) == (True, True)
    assert said == {"yes", "no"}


def test_train_and_test_prompts_are_disjoint(instructions):
    train = {example.prompt for example in instructions.make_examples(documents(0), 300, seed=0)}
    assert len(train) == 300
    again = instructions.make_examples(documents(0), 100, seed=1)
    assert train & {example.prompt for example in again}
    test = instructions.make_examples(documents(0), 100, seed=1, exclude=train)
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
    for name in names:
        assert sum(line.startswith(f"| {name} |") for line in table.splitlines()) == 3, name
        result = json.loads((tmp_path / "out" / "results" / f"{name}.json").read_text("utf-8"))
        counts = {code: len(rows) for code, rows in result["answers"].items()}
        assert counts == {"en": 10, "el": 5, "hu": 5, "tr": 5}
    module.main(call)
    assert capsys.readouterr().out == table
