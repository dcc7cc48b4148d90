"""Prefix gates in checkpoints: planned, loaded in a fresh process, grown and trained by the verbs."""

import json

import pytest
import torch
from conftest import invoke, run_fresh, save_dense, write_texts
from test_prefix_gate import classes, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_moe_expand import (
    Plan,
    expand_checkpoint,
    grow_checkpoint,
    shrink_checkpoint,
)
from hf_moe_expand.errors import InputError
from hf_moe_expand.modeling.prefix_gate import (
    PrefixRule,
)
from hf_moe_expand.schema import changed


def test_the_command_line_plans_gates(tmp_path):
    plan = tmp_path / "plan.json"
    options = ["--layers", 4, "--experts", 2, "--old", "en", "--new", "el", "--prefix-gates"]
    said = invoke("plan", "moe-lpr", *options, "--classifiers-in", "1", "--prefix-reach", "later", "--out", plan)
    assert "classifier layers  1 (prefix gates)" in said
    made = Plan.load(plan)
    assert made.classifier_layers == [1]
    assert made.prefix_gate == PrefixRule(0.95, 4.0, "later")
    base, out = save_dense(tmp_path / "base", num_hidden_layers=4), tmp_path / "out"
    invoke("expand", base, out, "--plan", plan)
    assert json.loads((out / "config.json").read_text())["prefix_gate"] == {
        "decay": 0.95, "bound": 4.0, "reach": "later"
    }  # fmt: skip
    assert "judge the text so far, for the later layers too: decay 0.95" in invoke("inspect", out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prefix-gates"], "no layer has a classifier"),
        (["--prefix-gates", "--classifiers-in", "9"], "classifiers_in: the model has no layer 9"),
        (["--prefix-gates", "--classifiers-in", "two"], "classifiers_in: 'two': give"),
        (["--prefix-gates", "--classifiers-in", "1", "--classifier-layers", "1"], "leave one of them out"),
        (["--prefix-gates", "--classifiers-in", "1", "--prefix-decay", "0"], "prefix_decay is 0"),
        (["--prefix-gates", "--classifiers-in", "1", "--prefix-bound", "nan"], "prefix_bound is nan"),
        (["--prefix-gates", "--classifiers-in", "1", "--prefix-reach", "far"], "prefix_reach is 'far'"),
    ],
)
def test_the_command_line_refuses_wrong_gates(tmp_path, options, said):
    with pytest.raises(InputError, match=said):
        invoke("plan", "moe-lpr", "--layers", 4, "--experts", 2, *options, "--out", tmp_path / "plan.json")


@pytest.fixture
def gated_checkpoint(tmp_path):
    plan = Plan("layer-moe", [3, 1, 2], [0, 2], old=["en"], new=["el"], prefix_gate=PrefixRule(0.9, 2.0))
    expand_checkpoint(save_dense(tmp_path / "base"), tmp_path / "one", plan)
    return tmp_path / "one"


def test_a_fresh_process_gates_as_this_one(gated_checkpoint):
    model = AutoModelForCausalLM.from_pretrained(gated_checkpoint)
    for ffn in model.expanded_ffns().values():
        ffn.classifier.weight.data.normal_(0, 1)
    model.save_pretrained(gated_checkpoint)
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.arange(40).view(2, 20)
print(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False).tolist())
"""
    ids = torch.arange(40).view(2, 20)
    here = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False).tolist()
    assert json.loads(run_fresh(code, str(gated_checkpoint))) == here


def test_growth_keeps_the_gates_decisions_and_shrinking_takes_it_back(gated_checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(gated_checkpoint)
    for ffn in model.expanded_ffns().values():
        ffn.classifier.weight.data.normal_(0, 1)
    model.save_pretrained(gated_checkpoint)
    gate = PrefixRule(0.9, 2.0)
    plan = Plan("layer-moe", [4, 1, 3], [0, 2], old=["en"], new=["tr"], grows_from=[3, 1, 2], prefix_gate=gate)
    grown = tmp_path / "two"
    grow_checkpoint(gated_checkpoint, grown, plan, keep_routers=True)
    ids = tokens(2, 12)
    before, _ = classes(model.eval(), ids)
    after, _ = classes(AutoModelForCausalLM.from_pretrained(grown).eval(), ids)
    assert torch.equal(after[0].clamp(max=1), before[0])  # the new class is a copy of the last, and wins ties
    shrink_checkpoint(grown, tmp_path / "back", 1)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (gated_checkpoint / name).read_bytes()
    said = invoke(
        "grow", gated_checkpoint, tmp_path / "three", "--plan", write_plan(tmp_path, changed(plan, prefix_gate=None))
    )
    assert "judge the text so far" in said
    assert "will judge one token" in said


def write_plan(folder, plan):
    plan.save(folder / "plan.json")
    return folder / "plan.json"


def test_review_trains_gates(gated_checkpoint, tmp_path):
    words = {"en": "the cat sat on the mat and slept ", "el": "η γάτα κάθισε στο χαλί και κοιμήθηκε "}
    data = [f"{code}={write_texts(tmp_path / f'{code}.jsonl', [text * 6] * 24)}" for code, text in words.items()]
    (tmp_path / "review.yaml").write_text(
        "block_size: 64\nclassifier_coef: 1.0\n"
        "training: {max_steps: 30, per_device_train_batch_size: 4, learning_rate: 0.02, logging_steps: 10}\n"
    )
    flags = [part for source in data for part in ("--data", source)]
    invoke("train", "review", gated_checkpoint, tmp_path / "out", *flags, "--config", tmp_path / "review.yaml")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for code, wanted in (("en", 0), ("el", 1)):
        found, _ = classes(model, **tokenizer(words[code], return_tensors="pt"))
        assert (found[:, 10:] == wanted).float().mean() > 0.9
    assert "old_tokens_right" in (tmp_path / "out" / "trainer_state.json").read_text()
