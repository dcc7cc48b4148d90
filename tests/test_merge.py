"""Averages, a dense model's delta, and branches that become experts, against the obvious arithmetic."""

import json

import pytest
import torch
from conftest import byte_tokenizer, invoke, tensors, tiny_dense
from transformers import AutoModelForCausalLM

from hf_moe_expand import DMoEForCausalLM, Plan, expand_checkpoint
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.checkpoint import reader
from hf_moe_expand.checkpoint.average import average_checkpoints, average_experts
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.expand import grow_checkpoint
from hf_moe_expand.checkpoint.graft import merge_delta
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.report.inspection import inspect_checkpoint

UNIFORM = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"])
GROUPS = Plan("dmoe", [3, 1, 3], groups=[["en"], ["el", "tr"], ["hu"]])


def make(folder, seed=0, backbone="qwen2", **changes):
    """A dense checkpoint; equal seeds give equal weights."""
    tiny_dense(backbone, seed, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def three(tmp_path):
    return [make(tmp_path / name, seed) for seed, name in enumerate("abc")]


@pytest.mark.parametrize("weights", [None, [0.2, 0.3, 0.5]])
def test_averages_of_dense_models(three, tmp_path, weights, monkeypatch):
    monkeypatch.setattr(reader, "_PIECE", 100)  # tensors come in several pieces, the last one shorter
    average_checkpoints(three, tmp_path / "out", weights)
    models, found = [tensors(folder) for folder in three], tensors(tmp_path / "out")
    assert sorted(found) == sorted(models[0])
    for name, value in found.items():
        mean = sum(w * model[name].double() for w, model in zip(weights or [1 / 3] * 3, models, strict=True))
        torch.testing.assert_close(value.double(), mean, rtol=0, atol=1e-7)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == "Qwen2ForCausalLM"
    settings = {"models": ["a", "b", "c"], "weights": weights or [1 / 3] * 3}
    assert loaded.config.history == [{"stage": "average", "settings": settings}]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (three[0] / "tokenizer.json").read_bytes()
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()


def test_averages_of_expanded_models_round_once_and_leave_equal_tensors_alone(tmp_path):
    make(tmp_path / "base", dtype=torch.bfloat16)
    expand_checkpoint(tmp_path / "base", tmp_path / "one", UNIFORM)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype="auto")
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "router" in name or ".experts.1." in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    other.save_pretrained(tmp_path / "two")
    average_checkpoints([tmp_path / "one", tmp_path / "two"], tmp_path / "out", [0.3, 0.7])
    one, two, found = (tensors(tmp_path / name) for name in ("one", "two", "out"))
    for name, value in found.items():
        mean = 0.3 * one[name].double() + 0.7 * two[name].double()
        assert value.dtype == torch.bfloat16
        nearest = (value.double() - mean).abs() <= (mean.bfloat16().double() - mean).abs() + 1e-8
        assert nearest.all(), name
        if torch.equal(one[name], two[name]):
            assert torch.equal(value, one[name]), name
    report = "\n".join(inspect_checkpoint(tmp_path / "out").lines())
    assert "  average" in report.splitlines()


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
    kinds = set()
    for name, value in found.items():
        words = name.split(".")
        if "experts" in words:
            at = words.index("experts")
            name_in_dense = ".".join(words[:at] + words[at + 2 :])
        else:
            name_in_dense = name
        parts = [(0.5, one[name]), (0.2, two[name])]
        if "router" not in words:
            parts.append((0.3, plain[name_in_dense]))
        kinds.add(("router" in words, "experts" in words))
        mean = sum(w * tensor.double() for w, tensor in parts) / sum(w for w, _ in parts)
        torch.testing.assert_close(value.double(), mean, rtol=0, atol=1e-7, msg=name)
    assert len(kinds) == 3
    # Averaged with a dense model that it is, an untrained expansion stays as it is, bit for bit.
    average_checkpoints([tmp_path / "one", tmp_path / "base"], tmp_path / "same")
    assert compare_checkpoints(tmp_path / "one", tmp_path / "same").same


def test_experts_that_no_average_fits(three, tmp_path):
    def refused(message, model, weight=0.5):
        with pytest.raises(InputError, match=message):
            average_experts(model, tmp_path / "out", weight)
        assert not (tmp_path / "out").exists()

    refused("is a dense model: give a second checkpoint", three[0])
    expand_checkpoint(three[0], tmp_path / "lora", UNIFORM, expert_kind="lora", lora_rank=2)
    further = Plan("moe-lpr", [3, 3, 3], old=["en", "el"], new=["tr"], grows_from=[2, 2, 2])
    grow_checkpoint(tmp_path / "lora", tmp_path / "grown", further, copy_from={0: 1})
    refused("copied other experts than expert 0", tmp_path / "grown")
    for weight in (1.6, -0.1, float("nan")):
        refused(rf"weight is {weight}: must be from 0 to 1\.", tmp_path / "lora", weight)
    with pytest.raises(InputError, match="--weight: the experts of one checkpoint have one weight; give it once"):
        invoke("merge", "average", tmp_path / "lora", "--weight", 0.5, "--weight", 0.5, "--out", tmp_path / "out")


def test_averages_that_make_no_sense(three, tmp_path):
    def refused(message, models, weights=None):
        with pytest.raises(InputError, match=message):
            average_checkpoints(models, tmp_path / "out", weights)
        assert not (tmp_path / "out").exists()

    refused("two or more", three[:1])
    refused("2 checkpoints need 2 weights with the sum 1", three[:2], [0.5])
    refused(r"weights is \[40, -39\]: .* with the sum 1, none below 0\.", three[:2], [40, -39])
    refused("the sum 1", three[:2], [0.5, 0.6])
    wide = make(tmp_path / "wide", intermediate_size=64)
    refused(r"'model.layers.0.mlp.gate_proj.weight' has shape \[48, 32\] in .*, but \[64, 32\]", [three[0], wide])
    refused("num_attention_heads is 4 in .*, but 2", [three[0], make(tmp_path / "heads", num_attention_heads=2)])
    refused("model_type is 'qwen2' in .*, but 'llama'", [three[0], make(tmp_path / "llama", backbone="llama")])
    refused("tie_word_embeddings is False", [three[0], make(tmp_path / "tied", tie_word_embeddings=True)])
    expand_checkpoint(three[0], tmp_path / "expanded", UNIFORM)
    expand_checkpoint(three[0], tmp_path / "larger", Plan("moe-lpr", [3, 3, 3]))
    refused("is a dense checkpoint; give an expanded one first", [three[0], tmp_path / "expanded"])
    refused("model_type is 'qwen2' in .*, but 'llama'", [tmp_path / "expanded", tmp_path / "llama"])
    refused("num_attention_heads is 4 in .*, but 2", [tmp_path / "expanded", tmp_path / "heads"])
    refused("only these have routers", [tmp_path / "expanded", three[0]], [0.0, 1.0])
    refused("the sum 1", three[:2], [float("nan"), 0.5])
    for backbone, name in (("gpt2", "activation_function"), ("gemma3_text", "hidden_activation")):
        pair = [make(tmp_path / f"{backbone} {act}", backbone=backbone, **{name: act}) for act in ("gelu", "relu")]
        refused(f"{name} is 'gelu' in .*, but 'relu'", pair)
    refused(
        r"num_experts_per_layer is \[2, 2, 2\] in .*, but \[3, 3, 3\]", [tmp_path / "expanded", tmp_path / "larger"]
    )


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
    with pytest.raises(InputError, match="is an expanded checkpoint; use `graft`"):
        merge_delta(tmp_path / "expanded", tmp_path / "no", three[0], three[1])


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
        words = name.split(".")
        if "router" in words:
            assert torch.equal(value, plain[name])
        elif "experts" in words:
            at = words.index("experts")
            home = ".".join(words[:at] + words[at + 2 :])
            assert torch.equal(value, models[int(words[at + 1])][home]), name
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
    def refused(message, branches, plan=GROUPS):
        with pytest.raises(InputError, match=message):
            expand_branches(branches, tmp_path / "out", plan)
        assert not (tmp_path / "out").exists()

    refused("2 branches were given, but the plan has 3 groups", three[:2])
    refused("is a moe-lpr plan", three, UNIFORM)
    refused("plan is for 2 layers, but .* has 3", three, Plan("dmoe", [3, 1], groups=GROUPS.groups))
    mixtures = [make(tmp_path / name, backbone="mixtral") for name in "xyz"]
    refused("x: has experts of its own in layers of the plan", mixtures)
    refused("'model.embed_tokens.weight' has shape", [*three[:2], make(tmp_path / "more", vocab_size=300)])
    expand_checkpoint(three[0], tmp_path / "expanded", UNIFORM)
    refused("is an expanded checkpoint already", [*three[:2], tmp_path / "expanded"])
