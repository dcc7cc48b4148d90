"""LLaMA-Pro: inserted blocks change nothing at first."""

import json

import pytest
import torch
from conftest import byte_tokenizer, load, refused, save_dense, tensors, tiny_dense
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint.average import average_checkpoints
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.graft import graft_delta, merge_delta
from hf_moe_expand.checkpoint.promises import tiny_twin
from hf_moe_expand.core.errors import InputError

IDS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
# Backbones with an output projection of each FFN and attention block, and what is special about each.
SUPPORTED = {
    "llama": {},
    "mistral": {},
    "qwen2": {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 4},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 4},  # a norm behind each output projection
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "cohere": {},
    "gemma": {},
    "gemma2": {},
    "granite": {},
    "olmo2": {},
    "phi3": {},
    "stablelm": {},
}


@pytest.mark.parametrize("backbone", SUPPORTED)
def test_the_deeper_model_computes_what_the_base_does(tmp_path, backbone):
    changes = dict(SUPPORTED[backbone])
    if backbone == "qwen2":
        changes["use_sliding_window"] = True
    save_dense(tmp_path / "base", backbone, **changes)
    assert expand_depth(tmp_path / "base", tmp_path / "out", 2) == [1, 4]
    base, deep = load(tmp_path / "base"), load(tmp_path / "out")
    assert type(deep) is type(base)
    assert deep.config.num_hidden_layers == len(deep.model.layers) == 5
    with torch.no_grad():
        assert torch.equal(deep(IDS).logits, base(IDS).logits)
        generated = [model.generate(IDS, max_new_tokens=5, do_sample=False) for model in (base, deep)]
    assert torch.equal(*generated)
    for name in ("layer_types", "no_rope_layers"):
        values = getattr(base.config, name, None)
        if values is not None:
            assert getattr(deep.config, name) == [values[source] for source in (0, 0, 1, 2, 2)]


def test_new_blocks_are_copies_but_for_their_output_projections(tmp_path):
    tiny_dense("llama", attention_bias=True, mlp_bias=True).save_pretrained(tmp_path / "base")
    expand_depth(tmp_path / "base", tmp_path / "out", 2)
    before, after = tensors(tmp_path / "base"), tensors(tmp_path / "out")
    zero = 0
    for layer, (source, new) in enumerate([(0, False), (0, True), (1, False), (2, False), (2, True)]):
        for name, value in before.items():
            if name.startswith(f"model.layers.{source}."):
                found = after.pop(f"model.layers.{layer}.{name.split('.', 3)[3]}")
                silent = new and ("o_proj" in name or "down_proj" in name)
                assert torch.equal(found, torch.zeros_like(value) if silent else value), name
                zero += silent
    assert zero == 8  # two blocks, two projections, weight and bias
    assert sorted(after) == sorted(name for name in before if not name.startswith("model.layers."))
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize(("blocks", "expected"), [(1, [6]), (2, [3, 7]), (3, [2, 5, 8]), (4, [1, 4, 6, 9])])
def test_blocks_stand_at_even_intervals(tmp_path, blocks, expected):
    tiny_dense("llama", num_hidden_layers=6).save_pretrained(tmp_path / "base")
    assert expand_depth(tmp_path / "base", tmp_path / "out", blocks) == expected
    assert json.loads((tmp_path / "out" / "config.json").read_text())["new_layers"] == expected


def test_the_record_survives_saving_and_holds_no_local_path(tmp_path):
    save_dense(tmp_path / "base")
    expand_depth(tmp_path / "base", tmp_path / "out", 3)
    load(tmp_path / "out").save_pretrained(tmp_path / "again")
    config = AutoConfig.from_pretrained(tmp_path / "again")
    assert config.new_layers == [1, 3, 5]
    assert config.history == [{"stage": "expand-depth", "settings": {"base": "base", "blocks": 3}}]
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "base" / "tokenizer.json").read_bytes()


def test_a_delta_goes_to_the_old_blocks_alone(tmp_path):
    save_dense(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(tmp_path / "instruct")
    byte_tokenizer().save_pretrained(tmp_path / "instruct")
    expand_depth(tmp_path / "base", tmp_path / "deep", 2)
    merge_delta(tmp_path / "deep", tmp_path / "out", tmp_path / "base", tmp_path / "instruct")
    deep, found, instruct = tensors(tmp_path / "deep"), tensors(tmp_path / "out"), tensors(tmp_path / "instruct")
    homes = {0: 0, 2: 1, 3: 2}
    for name, value in found.items():
        words = name.split(".")
        if words[1] == "layers" and int(words[2]) not in homes:
            assert torch.equal(value, deep[name]), name
        else:
            if words[1] == "layers":
                words[2] = str(homes[int(words[2])])
            assert torch.equal(value, instruct[".".join(words)]), name
    # A deeper model can be expanded like any other.
    expand_checkpoint(tmp_path / "out", tmp_path / "moe", Plan("moe-lpr", [2] * 5))
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "moe")(IDS).logits, load(tmp_path / "out")(IDS).logits)
    # What it was expanded from is the deeper model, with all of its blocks.
    average_checkpoints([tmp_path / "moe", tmp_path / "out"], tmp_path / "average")
    assert compare_checkpoints(tmp_path / "moe", tmp_path / "average").same
    graft_delta(tmp_path / "moe", tmp_path / "grafted", tmp_path / "out", tmp_path / "deep")
    grafted, deep = load(tmp_path / "grafted"), load(tmp_path / "deep")
    with torch.no_grad():
        torch.testing.assert_close(grafted(IDS).logits, deep(IDS).logits)


def test_refusals_name_what_is_wrong(base, tmp_path):
    for name in ("gpt2", "starcoder2"):
        tiny_dense(name).save_pretrained(tmp_path / name)
    expand_depth(base, tmp_path / "deep", 1)
    expand_checkpoint(base, tmp_path / "expanded", Plan("moe-lpr", [2, 2, 2]))
    for said, folder, blocks in (
        ("0 blocks were asked for; with 3 layers 1 to 3 can be inserted", base, 0),
        ("4 blocks were asked for", base, 4),
        ("architecture 'gpt2' have no self_attn.o_proj and no mlp.down_proj", tmp_path / "gpt2", 1),
        ("architecture 'starcoder2' have no mlp.down_proj", tmp_path / "starcoder2", 1),
        ("has inserted blocks already", tmp_path / "deep", 1),
        ("is an expanded checkpoint already", tmp_path / "expanded", 1),
    ):
        refused(expand_depth, folder, tmp_path / "out", blocks, says=said)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["gemma3n_text", "glm4_moe"])
def test_blocks_that_do_more_than_attention_and_an_ffn_are_refused(tmp_path, name):
    tiny_twin(CONFIG_MAPPING[name]()).save_pretrained(tmp_path / "base")
    with pytest.raises(InputError, match=f"an inserted block of architecture '{name}' would change the output"):
        expand_depth(tmp_path / "base", tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()
