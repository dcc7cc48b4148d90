"""NaN and infinite values are refused at every door, in one sentence, and nothing is written."""

import json
import math

import numpy as np
import pytest
from conftest import save_dense, write_texts
from safetensors.torch import load_file, save_file

from hf_moe_expand import LanguageText, Plan, PostPretrainConfig, expand_checkpoint, train_stage
from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.jsonfile import write_json
from hf_moe_expand.evaluation.harness import Metric, _metrics
from hf_moe_expand.report.page import read_logs

PLAN = Plan("layer-moe", [2, 1, 2], old=["en"], new=["el"])
GROWTH = Plan("layer-moe", [3, 1, 3], old=["en", "el"], new=["hu"], grows_from=[2, 1, 2])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A dense and an expanded checkpoint, each with one NaN."""
    root = tmp_path_factory.mktemp("damaged")
    save_dense(root / "base")
    expand_checkpoint(root / "base", root / "expanded", PLAN)
    for name in ("base", "expanded"):
        file = root / name / "model.safetensors"
        weights = load_file(file)
        damaged = next(key for key in weights if key.startswith("model.layers.1.mlp") and "down_proj" in key)
        weights[damaged].view(-1)[5] = math.nan
        save_file(weights, file, {"format": "pt"})
    write_texts(root / "el.jsonl", ["a text that is long enough for a block " * 4] * 4)
    return root


def test_each_tensor_is_looked_at_once(root, monkeypatch):
    looked = []
    monkeypatch.setattr("hf_moe_expand.checkpoint.reader.is_finite", lambda piece: looked.append(1) or True)
    tensor = next(iter(CheckpointReader(root / "base").tensors.values()))
    assert b"".join(tensor.finite_chunks()) == b"".join(tensor.finite_chunks()) == b"".join(tensor.chunks())
    assert len(looked) == 1


def test_a_task_without_a_finite_value_is_left_out():
    found = _metrics({"acc,none": 0.5, "acc_stderr,none": math.nan, "bleu,none": math.nan}, {})
    assert list(found) == ["acc"]
    assert found["acc"].stderr is None


def test_a_task_s_value_that_is_no_number_is_left_out():
    values = {"acc,none": np.float32(0.5), "acc_stderr,none": "N/A", "answer,none": "a text", "bleu,none": None}
    assert _metrics(values, {}) == {"acc": Metric(0.5)}


def test_logs_of_a_trainer_show_numbers(tmp_path):
    file = tmp_path / "trainer_state.json"
    assert read_logs(file) == []
    logs = [{"step": 1, "loss": 2.0, "grad_norm": 1e305, "note": "x"}, {"loss": 1.0}, {"step": 2, "loss": []}]
    write_json(file, {"log_history": logs})
    assert read_logs(file) == [{"step": 1, "loss": 2.0}, {"step": 2}]
    write_json(file, {"log_history": None})
    assert read_logs(file) == []
    for wrong in ({"step": 1}, [1]):
        write_json(file, {"log_history": wrong})
        with pytest.raises(InputError, match="log_history is no list"):
            read_logs(file)


def test_an_overflow_in_a_training_leaves_readable_records(root, tmp_path, monkeypatch):
    """fp16's scaler skips such a step and logs its gradient."""
    from hf_moe_expand.stages.trainer import StageTrainer

    save_dense(tmp_path / "base")
    expand_checkpoint(tmp_path / "base", tmp_path / "expanded", PLAN)
    log = StageTrainer.log
    monkeypatch.setattr(StageTrainer, "log", lambda self, logs, *rest: log(self, {**logs, "scale": math.inf}, *rest))
    config = PostPretrainConfig(block_size=16, max_steps=2, logging_steps=1, disable_tqdm=True)
    text = {"el": LanguageText("el", str(root / "el.jsonl"))}
    train_stage(tmp_path / "expanded", tmp_path / "out", text, config)
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text(), parse_constant=pytest.fail)
    assert all("loss" in entry or "train_loss" in entry for entry in state["log_history"])
