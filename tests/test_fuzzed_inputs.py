"""A sample of `benchmarks/fuzzed_inputs.py`: broken input files end in success or in one sentence."""

import importlib
import json
from pathlib import Path

import pytest
from conftest import invoke

from hf_moe_expand.errors import InputError
from hf_moe_expand.evaluation.perplexity import LanguageScore
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.run_record import read_steps

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
# `python benchmarks/fuzzed_inputs.py` runs three thousand.
CASES = 40


@pytest.fixture
def fuzzed(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fuzzed_inputs")


def test_broken_files_end_in_success_or_one_sentence(fuzzed):
    found = fuzzed.run_cases(CASES, seed=2, limit=60)
    assert not found.bad
    # The files are neither all refused nor all taken.
    assert found.counts["refused"] > CASES / 4
    assert found.counts["ok"] > CASES / 20


def test_a_file_that_a_refused_command_leaves_is_noticed(fuzzed, tmp_path, monkeypatch):
    fuzzed.make_all(tmp_path)

    def leaves(command, limit, verbose):
        Path(command[-1]).parent.joinpath("left").touch() if "--out" in command else None
        return "refused", "x"

    monkeypatch.setattr(fuzzed, "watched", leaves)
    monkeypatch.setattr(fuzzed, "prepare", lambda rng, made, case: (f"report --out {case}/out", "nothing"))
    assert fuzzed.run_case(0, 0, tmp_path, 20)[0] == "traceback"


def test_messages_are_one_line():
    assert str(InputError("a\nb\x1b[31m é\u2028")) == r"a\nb\x1b[31m é\u2028"


@pytest.mark.parametrize("step", [3, None, {"summary": "x"}, {"seconds": 1.0, "summary": "x", "made_from": 3}])
def test_the_record_of_a_run_is_checked(tmp_path, step):
    file = tmp_path / "steps.json"
    assert read_steps(file) == ({}, None)
    file.write_text(json.dumps({"plan": step}))
    with pytest.raises(InputError, match=r"steps\.json: plan"):
        read_steps(file)
    file.write_text(json.dumps({"begun": step}))
    with pytest.raises(InputError, match=r"steps\.json: begun"):
        read_steps(file)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("tasks", 7, "tasks: expected `key: value` lines"),
        ("models", [[1]], "models: expected `key: value` lines"),
        ("models", {"a": {"en": {}}}, r"models\.a\.en: `perplexity` is missing"),
        ("old", [1], r"old\[0\]: expected text"),
    ],
)
def test_an_evaluation_is_checked(tmp_path, key, value, reason):
    file = tmp_path / "evaluation.json"
    whole = Evaluation(["en"], ["el"], {"a": {"en": LanguageScore(8.0, 3.0, 10, 10)}})
    whole.to_json(file)
    assert Evaluation.from_json(file) == whole
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(InputError, match=reason):
        Evaluation.from_json(file)


def test_a_recipe_in_another_encoding_is_not_shown(tmp_path):
    (tmp_path / "x.yaml").write_bytes("base: x\nnew: {é: x}\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"x\.yaml: not YAML: line 2: not UTF-8 text"):
        invoke("recipes", "show", tmp_path / "x.yaml")
