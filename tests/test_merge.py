"""Averages, a dense model's delta, and branches that become experts, against the obvious arithmetic."""

import json
import re

import pytest
import torch
from conftest import byte_tokenizer, invoke, refused, tensors, tiny_dense
from transformers import AutoModelForCausalLM

from hf_moe_expand import DMoEForCausalLM, Plan, expand_checkpoint
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.checkpoint import reader
from hf_moe_expand.checkpoint.average import average_checkpoints, average_experts
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.expand import grow_checkpoint
from hf_moe_expand.checkpoint.graft import merge_delta

UNIFORM = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"])
OF_EXPERT = re.compile(r"\.experts\.(\d+)")
GROUPS = Plan("dmoe", [3, 1, 3], groups=[["en"], ["el", "tr"], ["hu"]])


def make(folder, seed=0, backbone="qwen2", **changes):
    """A dense checkpoint; equal seeds give equal weights."""
    tiny_dense(backbone, seed, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def three(tmp_path):
    return [make(tmp_path / name, seed) for seed, name in enumerate("abc")]


@pytest.mark.parametrize(("weights", "dtype"), [(None, torch.float32), ([0.2, 0.3, 0.5], torch.bfloat16)])
def test_averages_of_dense_models(tmp_path, weights, dtype, monkeypatch):
    monkeypatch.setattr(reader, "_PIECE", 100)  # tensors come in several pieces, the last one shorter
    three = [make(tmp_path / name, seed, dtype=dtype) for seed, name in enumerate("abc")]
    average_checkpoints(three, tmp_path / "out", weights)
    models, found = [tensors(folder) for folder in three], tensors(tmp_path / "out")
    assert sorted(found) == sorted(models[0])
    for name, value in found.items():
        mean = sum(w * model[name].double() for w, model in zip(weights or [1 / 3] * 3, models, strict=True))
        assert value.dtype == dtype
        nearest = (mean.to(dtype).double() - mean).abs()
        assert ((value.double() - mean).abs() <= nearest + 1e-7).all(), name  # rounded once
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == "Qwen2ForCausalLM"
    settings = {"models": ["a", "b", "c"], "weights": weights or [1 / 3] * 3}
    assert loaded.config.history == [{"stage": "average", "settings": settings}]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (three[0] / "tokenizer.json").read_bytes()
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("backbone", ["qwen2", "gpt2"])
def test_an_average_of_expanded_models_with_a_dense_one(tmp_path, backbone):
    """MoE-CPT-Avg, which averages every expert with the dense FFN."""
    dense = make(tmp_path / "dense", 1, backbone)
    expand_checkpoint(make(tmp_path / "base", 0, backbone), tmp_path / "one", UNIFORM, seed=1)
    expand_checkpoint(make(tmp_path / "other", 2, backbone), tmp_path / "two", UNIFORM, seed=2)
    average_checkpoints([tmp_path / "one", dense, tmp_path / "two"], tmp_path / "out", [0.5, 0.3, 0.2])
    one, two, found = (tensors(tmp_path / name) for name in ("one", "two", "out"))
    plain = AutoModelForCausalLM.from_pretrained(dense).state_dict()
    assert sorted(found) == sorted(one)
    for name, value in found.items():
        parts = [(0.5, one[name]), (0.2, two[name])]
        if ".router." not in name:
            parts.append((0.3, plain[OF_EXPERT.sub("", name)]))
        mean = sum(w * tensor.double() for w, tensor in parts) / sum(w for w, _ in parts)
        torch.testing.assert_close(value.double(), mean, rtol=0, atol=1e-7, msg=name)
    # Averaged with a dense model that it is, an untrained expansion stays as it is, bit for bit.
    average_checkpoints([tmp_path / "one", tmp_path / "base"], tmp_path / "same")
    assert compare_checkpoints(tmp_path / "one", tmp_path / "same").same


def test_experts_that_no_average_fits(three, tmp_path):
    out, lora = tmp_path / "out", tmp_path / "lora"
    refused(average_experts, three[0], out, 0.5, says="is a dense model: give a second checkpoint")
    expand_checkpoint(three[0], lora, UNIFORM, expert_kind="lora", lora_rank=2)
    further = Plan("moe-lpr", [3, 3, 3], old=["en", "el"], new=["tr"], grows_from=[2, 2, 2])
    grow_checkpoint(lora, tmp_path / "grown", further, copy_from={0: 1})
    refused(average_experts, tmp_path / "grown", out, 0.5, says="copied other experts than expert 0")
    for weight in (1.6, -0.1, float("nan")):
        refused(average_experts, lora, out, weight, says=rf"weight is {weight}: must be from 0 to 1\.")
    twice = ["--weight", 0.5, "--weight", 0.5, "--out", out]
    refused(invoke, "merge", "average", lora, *twice, says="--weight: the experts of one checkpoint have one weight")
    assert not out.exists()


def test_averages_that_make_no_sense(three, tmp_path):
    expanded, larger = tmp_path / "expanded", tmp_path / "larger"
    expand_checkpoint(three[0], expanded, UNIFORM)
    expand_checkpoint(three[0], larger, Plan("moe-lpr", [3, 3, 3]))
    wide = make(tmp_path / "wide", intermediate_size=64)
    heads, llama = make(tmp_path / "heads", num_attention_heads=2), make(tmp_path / "llama", backbone="llama")
    acts = [make(tmp_path / act, backbone="gpt2", activation_function=act) for act in ("gelu", "relu")]
    for message, models, *weights in (
        ("two or more", three[:1]),
        ("2 checkpoints need 2 weights with the sum 1", three[:2], [0.5]),
        (r"weights is \[40, -39\]: .* with the sum 1, none below 0\.", three[:2], [40, -39]),
        ("the sum 1", three[:2], [0.5, 0.6]),
        ("the sum 1", three[:2], [float("nan"), 0.5]),
        (r"'model.layers.0.mlp.gate_proj.weight' has shape \[48, 32\] in .*, but \[64, 32\]", [three[0], wide]),
        ("num_attention_heads is 4 in .*, but 2", [three[0], heads]),
        ("model_type is 'qwen2' in .*, but 'llama'", [three[0], llama]),
        ("activation_function is 'gelu' in .*, but 'relu'", acts),
        ("is a dense checkpoint; give an expanded one first", [three[0], expanded]),
        ("model_type is 'qwen2' in .*, but 'llama'", [expanded, llama]),
        ("num_attention_heads is 4 in .*, but 2", [expanded, heads]),
        ("only these have routers", [expanded, three[0]], [0.0, 1.0]),
        (r"num_experts_per_layer is \[2, 2, 2\] in .*, but \[3, 3, 3\]", [expanded, larger]),
    ):
        refused(average_checkpoints, models, tmp_path / "out", *weights, says=message)
    assert not (tmp_path / "out").exists()


def test_a_dense_models_delta(three, tmp_path):
    # c was trained from a; b is a's fine-tune as far as the arithmetic goes.
    with pytest.warns(UserWarning, match="look unrelated"):
        merge_delta(three[2], tmp_path / "out", three[0], three[1], scale=0.5)
    a, b, c = map(tensors, three)
    for name, value in tensors(tmp_path / "out").items():
        exact = c[name].double() + 0.5 * (b[name].double() - a[name].double())
        torch.testing.assert_close(value.double(), exact, rtol=0, atol=1e-7)
    (entry,) = json.loads((tmp_path / "out" / "config.json").read_text())["history"]
    assert entry["stage"] == "merge delta"
    expand_checkpoint(three[0], tmp_path / "expanded", UNIFORM)
    given = (tmp_path / "expanded", tmp_path / "no", three[0], three[1])
    refused(merge_delta, *given, says="is an expanded checkpoint; use `graft`")


@pytest.mark.parametrize("backbone", ["bloom", "gpt_neox", "qwen2"])
def test_branches_become_experts_and_all_else_their_mean(tmp_path, backbone):
    branches = [make(tmp_path / name, seed, backbone) for seed, name in enumerate("abc")]
    expand_branches(branches, tmp_path / "out", GROUPS, seed=4)
    expand_checkpoint(branches[0], tmp_path / "plain", GROUPS, seed=4)
    # Names as the model has them, which need not be those of the files.
    models = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in branches]
    found, plain = tensors(tmp_path / "out"), tensors(tmp_path / "plain")
    assert sorted(found) == sorted(plain)
    experts = 0
    for name, value in found.items():
        if ".router." in name:
            assert torch.equal(value, plain[name])
        elif expert := OF_EXPERT.search(name):
            assert torch.equal(value, models[int(expert[1])][OF_EXPERT.sub("", name)]), name
            experts += 1
        else:
            mean = sum(model[name].double() for model in models) / 3
            torch.testing.assert_close(value.double(), mean, rtol=0, atol=1e-7)
    assert experts >= 2 * 3 * 2  # layers, experts, matrices
    loaded = DMoEForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.language_groups == GROUPS.groups
    assert loaded.config.expansions[-1]["branches"] == ["a", "b", "c"]
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()


def test_branches_that_make_no_sense(three, tmp_path):
    mixtures = [make(tmp_path / name, backbone="mixtral") for name in "xyz"]
    expand_checkpoint(three[0], tmp_path / "expanded", UNIFORM)
    for message, branches, *plan in (
        ("2 branches were given, but the plan has 3 groups", three[:2]),
        ("is a moe-lpr plan", three, UNIFORM),
        ("plan is for 2 layers, but .* has 3", three, Plan("dmoe", [3, 1], groups=GROUPS.groups)),
        ("x: has experts of its own in layers of the plan", mixtures),
        ("'model.embed_tokens.weight' has shape", [*three[:2], make(tmp_path / "more", vocab_size=300)]),
        ("is an expanded checkpoint already", [*three[:2], tmp_path / "expanded"]),
    ):
        refused(expand_branches, branches, tmp_path / "out", *plan or [GROUPS], says=message)
    assert not (tmp_path / "out").exists()
