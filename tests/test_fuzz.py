"""A few cases of `benchmarks/fuzz.py`, which `make fuzz` runs by the thousand, and what its cases have found."""

import importlib
import json
import time
from pathlib import Path

import pytest
from conftest import refused, save_dense

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.evaluation.perplexity import LanguageScore
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.runs.run_record import read_steps

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fuzz")


def test_broken_files_end_in_success_or_one_sentence(fuzz):
    endings = fuzz.run_cases(range(16), seed=2, limit=60)
    assert set(endings) == {"refused", "ok"}


@pytest.mark.parametrize(
    ("error", "ending"), [(ZeroDivisionError("x"), "traceback"), (InputError("x"), "refused"), (None, "hang")]
)
def test_it_tells_a_traceback_and_a_hang_from_a_refusal(fuzz, monkeypatch, error, ending):
    class Runner:
        def invoke(self, *_):
            if error is None:
                time.sleep(60)
            return type("Result", (), {"exception": error})

    monkeypatch.setattr(fuzz, "CliRunner", Runner)
    assert fuzz.watched([], 0.2)[0] == ending


def test_messages_are_one_line():
    assert str(InputError("a\nb\x1b[31m é\u2028")) == r"a\nb\x1b[31m é\u2028"


@pytest.mark.parametrize("step", [3, None, {"summary": "x"}, {"seconds": 1.0, "summary": "x", "made_from": 3}])
def test_the_record_of_a_run_is_checked(tmp_path, step):
    file = tmp_path / "steps.json"
    assert read_steps(file) == ({}, None)
    file.write_text(json.dumps({"plan": step}))
    refused(read_steps, file, says=r"steps\.json: plan")
    file.write_text(json.dumps({"begun": step}))
    refused(read_steps, file, says=r"steps\.json: begun")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("tasks", 7, "tasks: Input should be a valid dictionary"),
        ("models", [[1]], "models: Input should be a valid dictionary"),
        ("models", {"a": {"en": {}}}, r"models\.a\.en\.perplexity: Field required"),
        ("old", [1], r"old\[0\]: Input should be a valid string"),
    ],
)
def test_an_evaluation_is_checked(tmp_path, key, value, reason):
    file = tmp_path / "evaluation.json"
    whole = Evaluation(["en"], ["el"], {"a": {"en": LanguageScore(8.0, 3.0, 10, 10)}})
    whole.to_json(file)
    assert Evaluation.from_json(file) == whole
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    refused(Evaluation.from_json, file, says=reason)


def test_a_dense_checkpoint_with_fields_of_expanded_ones_is_refused(tmp_path):
    base = save_dense(tmp_path / "base")
    fields = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**fields, "classifier_layers": [1]}))
    with pytest.raises(InputError, match="its configuration has classifier_layers, a field of expanded models"):
        expand_checkpoint(base, tmp_path / "out", Plan("layer-moe", [2, 1, 2], [], old=["en"], new=["el"]))
