"""Deltas on every expert, averages, and branches that become experts, against the obvious arithmetic."""

import json
import re
import shutil

import pytest
import torch
from conftest import CHAT, byte_tokenizer, invoke, move, refused, save_dense, tensors
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_moe_expand import DMoEForCausalLM, Plan, expand_checkpoint, graft_delta
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.checkpoint import reader
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.expand import grow_checkpoint
from hf_moe_expand.checkpoint.merge import average_checkpoints, average_experts
from hf_moe_expand.checkpoint.promises import tiny_twin

PLAN = Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"])
DMOE = Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]])
FIRST = "model.embed_tokens.weight"  # of a model's tensors


def fine_tuned(base, out, seed=1, size=0.02, kept=1.0):
    """A checkpoint whose every weight is the base's times `kept`, and a little more."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * size
            parameter.mul_(kept).add_(noise.to(parameter.dtype))
    model.save_pretrained(out)
    byte_tokenizer().save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """base, instruct, the expanded base and that after training."""
    root = tmp_path_factory.mktemp("family")
    save_dense(root / "base")
    fine_tuned(root / "base", root / "instruct")
    expand_checkpoint(root / "base", root / "expanded", PLAN)
    move(root / "expanded", root / "trained")
    return root


def graft(root, out="out", model="trained", **options):
    return graft_delta(root / model, root / out, root / "base", root / "instruct", **options)


def graft_is_expansion(root, plan):
    """Grafts onto the expanded base, which gives the expanded instruct bit for bit: the report."""
    for which in ("base", "instruct"):
        expand_checkpoint(root / which, root / f"{which}-expanded", plan, seed=3)
    report = graft(root, model="base-expanded")
    left, right = tensors(root / "out"), tensors(root / "instruct-expanded")
    assert sorted(left) == sorted(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name]), name
    return report


@pytest.mark.parametrize(
    ("name", "dtype", "plan"),
    [("bloom", torch.float16, PLAN), ("gpt_neox", torch.float32, PLAN), ("qwen2", torch.bfloat16, DMOE)],
)
def test_grafting_onto_a_fresh_expansion_is_expanding_instruct_bit_for_bit(tmp_path, name, dtype, plan):
    save_dense(tmp_path / "base", name, dtype=dtype)
    # Far smaller weights: base + (instruct - base) would not give them back in float32.
    fine_tuned(tmp_path / "base", tmp_path / "instruct", size=0.001, kept=0.0)
    with pytest.warns(UserWarning, match="look unrelated"):
        graft_is_expansion(tmp_path, plan)


def test_rounds_once_from_float32(tmp_path):
    # In bfloat16 arithmetic 1 + (1.0078125 - 1) + ... would lose what float32 keeps until the end.
    save_dense(tmp_path / "base", dtype=torch.bfloat16)
    fine_tuned(tmp_path / "base", tmp_path / "instruct")
    fine_tuned(tmp_path / "base", tmp_path / "other", seed=9)
    graft(tmp_path, model="other", scale=0.3)
    (entry,) = json.loads((tmp_path / "out" / "config.json").read_text())["history"]
    assert entry["stage"] == "merge delta"
    base, instruct, other, found = (tensors(tmp_path / name) for name in ("base", "instruct", "other", "out"))
    differs_from_bfloat16 = 0
    for name, value in other.items():
        exact = value.float() + 0.3 * (instruct[name].float() - base[name].float())
        assert torch.equal(found[name], exact.bfloat16()), name
        differs_from_bfloat16 += not torch.equal(found[name], value + 0.3 * (instruct[name] - base[name]))
    assert differs_from_bfloat16 > 10


def test_tokenizer_template_and_generation_come_from_instruct_unless_told_otherwise(family, tmp_path):
    shutil.copytree(family / "instruct", tmp_path / "chat")
    byte_tokenizer(CHAT).save_pretrained(tmp_path / "chat")
    GenerationConfig(temperature=0.6, do_sample=True, eos_token_id=[256, 10]).save_pretrained(tmp_path / "chat")
    config = json.loads((tmp_path / "chat" / "config.json").read_text())
    config["eos_token_id"], config["rope_parameters"]["rope_theta"] = 10, 500000.0
    (tmp_path / "chat" / "config.json").write_text(json.dumps(config))
    report = graft_delta(family / "trained", tmp_path / "theirs", family / "base", tmp_path / "chat")
    assert sorted(report.fields) == ["eos_token_id", "rope_parameters"]
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (theirs["eos_token_id"], theirs["rope_parameters"]["rope_theta"]) == (10, 500000.0)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<u>hi"
    assert GenerationConfig.from_pretrained(tmp_path / "theirs").temperature == 0.6
    kept = graft_delta(family / "trained", tmp_path / "own", family / "base", tmp_path / "chat", keep_tokenizer=True)
    assert sorted(kept.fields) == ["rope_parameters"]
    assert AutoTokenizer.from_pretrained(tmp_path / "own").chat_template is None
    assert json.loads((tmp_path / "own" / "config.json").read_text())["eos_token_id"] == 256


@pytest.mark.parametrize("name", ["gemma3_text", "gptj"])  # tied, and a head with a bias
def test_rows_that_only_instruct_has_are_taken_over_and_said_aloud(tmp_path, name, monkeypatch):
    monkeypatch.setattr(reader, "_PIECE", 100)  # tensors come in several pieces, the last one shorter
    save_dense(tmp_path / "base", name)
    instruct = AutoModelForCausalLM.from_pretrained(fine_tuned(tmp_path / "base", tmp_path / "instruct"))
    instruct.resize_token_embeddings(260, mean_resizing=False)
    instruct.save_pretrained(tmp_path / "instruct")
    report = graft_is_expansion(tmp_path, PLAN)
    assert report.new_rows == 3
    assert "3 embedding rows are taken from instruct" in report.lines()[0]
    assert report.fields["vocab_size"] == (257, 260)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.config.vocab_size == found.get_output_embeddings().weight.shape[0] == 260


@pytest.mark.parametrize("changed", ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_another_base_is_refused_by_its_first_tensor_that_differs(family, tmp_path, changed):
    shutil.copytree(family / "base", tmp_path / "near")
    weights = load_file(tmp_path / "near" / "model.safetensors")
    weights[changed].view(-1)[-1] += 1e-5  # the last element alone, of one tensor
    save_file(weights, tmp_path / "near" / "model.safetensors", metadata={"format": "pt"})
    message = rf"near: is not the model from which .*trained was expanded: tensor '{changed}' differs"
    refused(graft_delta, family / "trained", tmp_path / "out", tmp_path / "near", family / "instruct", says=message)


@pytest.mark.parametrize(
    ("of_model", "of_base"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_a_base_in_another_type_is_the_same_base(family, tmp_path, of_model, of_base):
    """As downloads in two types are: one is the other, rounded."""
    for name, dtype in (("model", of_model), ("base", of_base)):
        AutoModelForCausalLM.from_pretrained(family / "base", dtype=dtype).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    expand_checkpoint(tmp_path / "model", tmp_path / "expanded", PLAN)
    graft_delta(tmp_path / "expanded", tmp_path / "out", tmp_path / "base", family / "instruct")
    swapped = (tmp_path / "expanded", tmp_path / "no", family / "instruct", tmp_path / "base")
    says = rf"instruct: is not the model from which .*expanded was expanded: tensor '{FIRST}' differs .*own\.$"
    refused(graft_delta, *swapped, says=says)


def test_refusals_name_what_is_wrong_and_leave_nothing(family, tmp_path):
    def made(name, backbone="qwen2", **changes):
        return save_dense(tmp_path / name, backbone, **changes)

    AutoModelForCausalLM.from_pretrained(family / "instruct").save_pretrained(tmp_path / "bare")
    llama, wide = made("llama", "llama"), made("wide", intermediate_size=64)
    fewer = made("fewer", vocab_size=250, pad_token_id=0, eos_token_id=0)
    tied, base, trained = made("tied", tie_word_embeddings=True), family / "base", family / "trained"
    for says, changes in (
        ("is not finite", {"scale": float("nan")}),
        ("is an expanded checkpoint already", {"instruct": trained}),
        ("model_type is 'qwen2' in .*, but 'llama' in", {"instruct": llama}),
        ("model_type is 'qwen2' in .*, but 'llama' in", {"base": llama, "instruct": llama}),
        ("layers is 3 in .*, but 4 in", {"instruct": made("deep", num_hidden_layers=4)}),
        ("num_attention_heads is 4 in .*, but 2 in", {"instruct": made("heads", num_attention_heads=2)}),
        ("hidden_act is 'silu' in .*, but 'gelu' in", {"instruct": made("act", hidden_act="gelu")}),
        (r"'model.layers.0.mlp.gate_proj.weight' has shape \(48, 32\) in .*, but \(64, 32\)", {"instruct": wide}),
        (r"gate_proj.weight' has shape \(48, 32\) in .*, but \(64, 32\)", {"base": wide, "instruct": wide}),
        (r"'model.embed_tokens.weight' has shape \(257, 32\) .*but \(250, 32\)", {"instruct": fewer}),
        ("tie_word_embeddings is False in .*, but True in", {"instruct": tied}),
        ("tie_word_embeddings is False in .*, but True in", {"base": tied, "instruct": tied}),
        ("has no tokenizer; pass --keep-tokenizer", {"instruct": tmp_path / "bare"}),
        ("exists already", {"out": wide}),
    ):
        given = {"model": trained, "out": tmp_path / "out", "base": base, "instruct": family / "instruct", **changes}
        refused(graft_delta, says=says, **given)
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_each_verb_names_the_other_for_a_model_of_the_other_kind(family, tmp_path):
    given = ["--base", family / "base", "--instruct", family / "instruct"]
    for verb, model, says in (
        (["graft"], "base", "base: is a dense checkpoint; use `merge delta`."),
        (["merge", "delta"], "trained", "trained: is an expanded checkpoint; use `graft`."),
    ):
        refused(invoke, *verb, family / model, tmp_path / "out", *given, says=says)
    assert not (tmp_path / "out").exists()


UNIFORM = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"])
OF_EXPERT = re.compile(r"\.experts\.(\d+)")
GROUPS = Plan("dmoe", [3, 1, 3], groups=[["en"], ["el", "tr"], ["hu"]])


@pytest.fixture
def three(tmp_path):
    return [save_dense(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]


@pytest.mark.parametrize(("weights", "dtype"), [(None, torch.float32), ([0.2, 0.3, 0.5], torch.bfloat16)])
def test_averages_of_dense_models(tmp_path, weights, dtype, monkeypatch):
    monkeypatch.setattr(reader, "_PIECE", 100)  # tensors come in several pieces, the last one shorter
    three = [save_dense(tmp_path / name, seed=seed, dtype=dtype) for seed, name in enumerate("abc")]
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


def test_an_average_of_expanded_models_with_a_dense_one(tmp_path):
    """MoE-CPT-Avg, which averages every expert with the dense FFN."""
    base, dense, other = (save_dense(tmp_path / f"{seed}", "gpt2", seed=seed) for seed in range(3))
    expand_checkpoint(base, tmp_path / "one", UNIFORM, seed=1)
    expand_checkpoint(other, tmp_path / "two", UNIFORM, seed=2)
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
    average_checkpoints([tmp_path / "one", base], tmp_path / "same")
    assert compare_checkpoints(tmp_path / "one", tmp_path / "same").same


def test_averages_that_make_no_sense(three, tmp_path):
    out, expanded, larger, lora, grown = (tmp_path / name for name in ("out", "expanded", "larger", "lora", "grown"))
    expand_checkpoint(three[0], expanded, UNIFORM)
    expand_checkpoint(three[0], larger, Plan("moe-lpr", [3, 3, 3]))
    expand_checkpoint(three[0], lora, UNIFORM, expert_kind="lora", lora_rank=2)
    further = Plan("moe-lpr", [3, 3, 3], old=["en", "el"], new=["tr"], grows_from=[2, 2, 2])
    grow_checkpoint(lora, grown, further, copy_from={0: 1})
    wide = save_dense(tmp_path / "wide", intermediate_size=64)
    heads, llama = save_dense(tmp_path / "heads", num_attention_heads=2), save_dense(tmp_path / "llama", "llama")
    acts = [save_dense(tmp_path / act, "gpt2", activation_function=act) for act in ("gelu", "relu")]
    for message, models, *weights in (
        ("checkpoints need as many weights", three[:1]),
        ("checkpoints need as many weights", []),
        ("need as many weights with the sum 1", three[:2], [0.5]),
        (r"weights is \[40, -39\]: .* with the sum 1, none below 0\.", three[:2], [40, -39]),
        ("the sum 1", three[:2], [float("nan"), 0.5]),
        (r"'model.layers.0.mlp.gate_proj.weight' has shape \(48, 32\) in .*, but \(64, 32\)", [three[0], wide]),
        ("num_attention_heads is 4 in .*, but 2", [three[0], heads]),
        ("model_type is 'qwen2' in .*, but 'llama'", [three[0], llama]),
        ("activation_function is 'gelu' in .*, but 'relu'", acts),
        ("is missing from the checkpoint", [three[0], expanded]),
        ("model_type is 'qwen2' in .*, but 'llama'", [expanded, llama]),
        ("only these have routers", [expanded, three[0]], [0.0, 1.0]),
        (r"num_experts_per_layer is \[2, 2, 2\] in .*, but \[3, 3, 3\]", [expanded, larger]),
    ):
        refused(average_checkpoints, models, out, *weights, says=message)
    for message, model, weight in (
        ("is a dense model: give a second checkpoint", three[0], 0.5),
        ("copied other experts than expert 0", grown, 0.5),
        *((rf"weight is {weight}: must be from 0 to 1\.", lora, weight) for weight in (1.6, -0.1, float("nan"))),
    ):
        refused(average_experts, model, out, weight, says=message)
    twice = ["--weight", 0.5, "--weight", 0.5, "--out", out]
    refused(invoke, "merge", "average", lora, *twice, says="--weight: the experts of one checkpoint have one weight")
    assert not out.exists()


@pytest.mark.parametrize("backbone", ["bloom", "qwen2"])
def test_branches_become_experts_and_all_else_their_mean(tmp_path, backbone):
    branches = [save_dense(tmp_path / name, backbone, seed=seed) for seed, name in enumerate("abc")]
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
    mixtures = [save_dense(tmp_path / name, "mixtral") for name in "xyz"]
    expand_checkpoint(three[0], tmp_path / "expanded", UNIFORM)
    for message, branches, *plan in (
        ("2 branches were given, but the plan has 3 groups", three[:2]),
        ("but the plan has 0 groups", three, UNIFORM),
        ("plan is for 2 layers, but .* has 3", three, Plan("dmoe", [3, 1], groups=GROUPS.groups)),
        ("x: has experts of its own in layers of the plan", mixtures),
        ("'model.embed_tokens.weight' has shape", [*three[:2], save_dense(tmp_path / "more", vocab_size=300)]),
        ("is an expanded checkpoint already", [*three[:2], tmp_path / "expanded"]),
    ):
        refused(expand_branches, branches, tmp_path / "out", *plan or [GROUPS], says=message)
    assert not (tmp_path / "out").exists()


def test_a_model_whose_every_tensor_was_trained_is_not_checked(family):
    graft(family, "grafted")
    graft(family, "twice", model="grafted")
    assert len(json.loads((family / "twice" / "config.json").read_text())["expansions"][0]["stages"]) == 2


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="this transformers does not know it")
def test_heads_may_have_another_size_in_each_layer(tmp_path):
    dense = tiny_twin(CONFIG_MAPPING["gemma4_text"]())
    for name in ("base", "tuned"):
        dense.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        for parameter in dense.parameters():
            parameter.data += 0.01
    expand_checkpoint(tmp_path / "base", tmp_path / "model", Plan("moe-lpr", [2] * 4, old=["en"], new=["el"]))
    graft_delta(tmp_path / "model", tmp_path / "grafted", tmp_path / "base", tmp_path / "tuned")
    average_checkpoints([tmp_path / "grafted", tmp_path / "tuned"], tmp_path / "mean")
    tuned, mean = tensors(tmp_path / "tuned"), tensors(tmp_path / "mean")
    assert all(torch.equal(value, mean[name]) for name, value in tuned.items() if ".mlp." not in name)
