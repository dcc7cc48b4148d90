"""DeltaMoE: a fine-tune's delta on every expert, against the obvious arithmetic; and what is refused."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import COMMON_BACKBONES, byte_tokenizer, move, refused, save_dense, tensors, tiny_dense
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_moe_expand import Plan, expand_checkpoint, graft_delta
from hf_moe_expand.checkpoint import reader
from hf_moe_expand.checkpoint.graft import merge_delta
from hf_moe_expand.core.errors import InputError

PLAN = Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"])
DMOE = Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]])


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


def graft(family, out, model="trained", **options):
    return graft_delta(family / model, out, family / "base", family / "instruct", **options)


def assert_same(left, right):
    left, right = tensors(left), tensors(right)
    assert sorted(left) == sorted(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name]), name


FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CASES = [(name, torch.float32, PLAN) for name in COMMON_BACKBONES]
CASES += [("qwen2", torch.float32, DMOE), *(("qwen2", dtype, PLAN) for dtype in FLOATS.values())]


@pytest.mark.parametrize(("name", "dtype", "plan"), CASES, ids=[*COMMON_BACKBONES, "dmoe", *FLOATS])
@pytest.mark.filterwarnings("ignore:base .* look unrelated")
def test_grafting_onto_a_fresh_expansion_is_expanding_instruct_bit_for_bit(tmp_path, name, dtype, plan):
    save_dense(tmp_path / "base", name, dtype=dtype)
    # Far smaller weights: base + (instruct - base) would not give them back in float32.
    fine_tuned(tmp_path / "base", tmp_path / "instruct", size=0.001, kept=0.0)
    for which in ("base", "instruct"):
        expand_checkpoint(tmp_path / which, tmp_path / f"{which}-expanded", plan, seed=3)
    graft_delta(tmp_path / "base-expanded", tmp_path / "out", tmp_path / "base", tmp_path / "instruct")
    assert_same(tmp_path / "out", tmp_path / "instruct-expanded")


def test_rounds_once_from_float32(tmp_path):
    # In bfloat16 arithmetic 1 + (1.0078125 - 1) + ... would lose what float32 keeps until the end.
    save_dense(tmp_path / "base", dtype=torch.bfloat16)
    fine_tuned(tmp_path / "base", tmp_path / "instruct")
    fine_tuned(tmp_path / "base", tmp_path / "other", seed=9)
    merge_delta(tmp_path / "other", tmp_path / "out", tmp_path / "base", tmp_path / "instruct", scale=0.3)
    base, instruct, other, found = (tensors(tmp_path / name) for name in ("base", "instruct", "other", "out"))
    differs_from_bfloat16 = 0
    for name, value in other.items():
        exact = value.float() + 0.3 * (instruct[name].float() - base[name].float())
        assert torch.equal(found[name], exact.bfloat16()), name
        differs_from_bfloat16 += not torch.equal(found[name], value + 0.3 * (instruct[name] - base[name]))
    assert differs_from_bfloat16 > 10


def test_tokenizer_template_and_generation_come_from_instruct_unless_told_otherwise(family, tmp_path):
    shutil.copytree(family / "instruct", tmp_path / "chat")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    GenerationConfig(temperature=0.6, do_sample=True, eos_token_id=[256, 10]).save_pretrained(tmp_path / "chat")
    config = json.loads((tmp_path / "chat" / "config.json").read_text())
    config["eos_token_id"], config["rope_parameters"]["rope_theta"] = 10, 500000.0
    (tmp_path / "chat" / "config.json").write_text(json.dumps(config))
    report = graft_delta(family / "trained", tmp_path / "theirs", family / "base", tmp_path / "chat")
    assert sorted(report.fields) == ["eos_token_id", "rope_parameters"]
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (theirs["eos_token_id"], theirs["rope_parameters"]["rope_theta"]) == (10, 500000.0)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"
    assert GenerationConfig.from_pretrained(tmp_path / "theirs").temperature == 0.6
    kept = graft_delta(family / "trained", tmp_path / "own", family / "base", tmp_path / "chat", keep_tokenizer=True)
    assert sorted(kept.fields) == ["rope_parameters"]
    assert AutoTokenizer.from_pretrained(tmp_path / "own").chat_template is None
    assert json.loads((tmp_path / "own" / "config.json").read_text())["eos_token_id"] == 256


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "gptj"])  # untied, tied, and a head with a bias
def test_rows_that_only_instruct_has_are_taken_over_and_said_aloud(tmp_path, name, monkeypatch):
    monkeypatch.setattr(reader, "_PIECE", 100)  # tensors come in several pieces, the last one shorter
    save_dense(tmp_path / "base", name)
    instruct = AutoModelForCausalLM.from_pretrained(fine_tuned(tmp_path / "base", tmp_path / "instruct"))
    instruct.resize_token_embeddings(260, mean_resizing=False)
    instruct.save_pretrained(tmp_path / "instruct")
    for which in ("base", "instruct"):
        expand_checkpoint(tmp_path / which, tmp_path / f"{which}-expanded", PLAN)
    report = graft_delta(tmp_path / "base-expanded", tmp_path / "out", tmp_path / "base", tmp_path / "instruct")
    assert report.new_rows == 3
    assert "3 embedding rows are taken from instruct" in report.lines()[0]
    assert report.fields["vocab_size"] == (257, 260)
    assert_same(tmp_path / "out", tmp_path / "instruct-expanded")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.config.vocab_size == found.get_output_embeddings().weight.shape[0] == 260


def test_tied_heads_stay_tied(tmp_path):
    save_dense(tmp_path / "base", tie_word_embeddings=True)
    fine_tuned(tmp_path / "base", tmp_path / "instruct")
    expand_checkpoint(tmp_path / "base", tmp_path / "expanded", PLAN)
    graft_delta(tmp_path / "expanded", tmp_path / "out", tmp_path / "base", tmp_path / "instruct")
    assert "lm_head.weight" not in tensors(tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.lm_head.weight is found.model.embed_tokens.weight
    save_dense(tmp_path / "untied")
    with pytest.raises(InputError, match=r"tie_word_embeddings is True in .*, but False in"):
        graft_delta(tmp_path / "expanded", tmp_path / "no", tmp_path / "base", tmp_path / "untied")
    with pytest.raises(InputError, match=r"tie_word_embeddings is False in .*, but True in"):
        graft_delta(tmp_path / "expanded", tmp_path / "no", tmp_path / "untied", tmp_path / "base")
    with pytest.raises(InputError, match=r"tie_word_embeddings is True in .*, but False in"):
        graft_delta(tmp_path / "expanded", tmp_path / "no", tmp_path / "untied", tmp_path / "untied")


def test_unrelated_models_are_warned_of(family, tmp_path):
    tiny_dense("qwen2", seed=77).save_pretrained(tmp_path / "stranger")
    byte_tokenizer().save_pretrained(tmp_path / "stranger")
    with pytest.warns(UserWarning, match=r"base \(base\) and instruct \(stranger\) look unrelated: .* is -?0\.0"):
        graft_delta(family / "trained", tmp_path / "a", family / "base", tmp_path / "stranger")
    with pytest.warns(UserWarning, match=r"base \(stranger\) and the model \(base\) look unrelated"):
        merge_delta(family / "base", tmp_path / "b", tmp_path / "stranger", tmp_path / "stranger")


def refused_base(message, *arguments):
    refused(graft_delta, *arguments, says=message)
    assert not Path(arguments[1]).exists()


def test_base_and_instruct_swapped_are_refused(family, tmp_path):
    swapped = r"base \(.*instruct\) and instruct \(.*base\) look swapped: .*trained has the weights of instruct"
    refused_base(swapped, family / "trained", tmp_path / "out", family / "instruct", family / "base")


@pytest.mark.parametrize("changed", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_another_base_is_refused_by_its_first_tensor_that_differs(family, tmp_path, changed):
    shutil.copytree(family / "base", tmp_path / "near")
    weights = load_file(tmp_path / "near" / "model.safetensors")
    weights[changed].view(-1)[-1] += 1e-5  # the last element alone, of one tensor
    save_file(weights, tmp_path / "near" / "model.safetensors", metadata={"format": "pt"})
    message = rf"near: is not the model from which .*trained was expanded: tensor '{changed}' differs"
    refused_base(message, family / "trained", tmp_path / "out", tmp_path / "near", family / "instruct")


@pytest.mark.parametrize(
    ("of_model", "of_base"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_a_base_in_another_type_is_the_same_base(family, tmp_path, of_model, of_base):
    """As downloads in two types are: one is the other, rounded."""
    wide = AutoModelForCausalLM.from_pretrained(family / "base", dtype=torch.float32)
    for name, dtype in (("model", of_model), ("base", of_base)):
        copy.deepcopy(wide).to(getattr(torch, dtype)).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    expand_checkpoint(tmp_path / "model", tmp_path / "expanded", PLAN)
    graft_delta(tmp_path / "expanded", tmp_path / "out", tmp_path / "base", family / "instruct")
    swapped = "look swapped|is not the model from which"
    refused_base(swapped, tmp_path / "expanded", tmp_path / "no", family / "instruct", tmp_path / "base")


def test_a_model_whose_every_tensor_was_trained_is_not_checked(family, tmp_path):
    graft(family, tmp_path / "grafted")
    graft(family, tmp_path / "twice", model=tmp_path / "grafted")
    assert len(json.loads((tmp_path / "twice" / "config.json").read_text())["expansions"][0]["stages"]) == 2


def test_refusals_name_what_is_wrong_and_leave_nothing(family, tmp_path):
    def refused(message, model=family / "trained", base=family / "base", instruct=family / "instruct", **options):
        with pytest.raises(InputError, match=message):
            graft_delta(model, options.pop("out", tmp_path / "out"), base, instruct, **options)
        assert not (tmp_path / "out").exists()

    def dense(folder, backbone="qwen2", **changes):
        return save_dense(tmp_path / folder, backbone, **changes)

    refused("is a dense checkpoint; use `merge delta`", model=family / "base")
    refused("scale is nan: must be a finite number", scale=float("nan"))
    refused("is an expanded checkpoint; base and instruct must be dense ones", instruct=family / "trained")
    refused("model_type is 'qwen2' in .*, but 'llama' in", instruct=dense("llama", "llama"))
    refused("model_type is 'qwen2' in .*, but 'llama' in", base=tmp_path / "llama", instruct=tmp_path / "llama")
    refused("layers is 3 in .*, but 4 in", instruct=dense("deep", num_hidden_layers=4))
    refused("layers is 3 in .*, but 4 in", base=tmp_path / "deep", instruct=tmp_path / "deep")
    refused("num_attention_heads is 4 in .*, but 2 in", instruct=dense("heads", num_attention_heads=2))
    refused("hidden_act is 'silu' in .*, but 'gelu' in", instruct=dense("act", hidden_act="gelu"))
    wide = dense("wide", intermediate_size=64)
    refused(r"'model.layers.0.mlp.gate_proj.weight' has shape \[48, 32\] in .*, but \[64, 32\]", instruct=wide)
    refused(r"gate_proj.weight' has shape \[48, 32\] in .*, but \[64, 32\]", base=wide, instruct=wide)
    fewer = dense("fewer", vocab_size=250, pad_token_id=0, eos_token_id=0)
    refused(r"'model.embed_tokens.weight' has shape \[257, 32\] .*but \[250, 32\]", instruct=fewer)
    AutoModelForCausalLM.from_pretrained(family / "instruct").save_pretrained(tmp_path / "torn", max_shard_size="20KB")
    refused("has no tokenizer; pass --keep-tokenizer", instruct=tmp_path / "torn")
    refused("exists already", out=wide)
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_a_result_that_does_not_fit_its_type(tmp_path):
    save_dense(tmp_path / "base", dtype=torch.float16)
    fine_tuned(tmp_path / "base", tmp_path / "instruct")
    with pytest.raises(InputError, match="the result is not finite in F16"):
        merge_delta(tmp_path / "base", tmp_path / "out", tmp_path / "base", tmp_path / "instruct", scale=1e9)
    assert not (tmp_path / "out").exists()
