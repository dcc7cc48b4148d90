"""Out-of-core expansion: what it writes, and what it refuses; export, the way back."""

import json
import os
import shutil

import pytest
import torch
import transformers
from conftest import CHAT, byte_tokenizer, move, refused, run_fresh, save_dense, tensors, tiny_config, tiny_dense
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_moe_expand import LayerMoEForCausalLM, Plan, expand_checkpoint
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.core.errors import InputError

PLAN = Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"])


def test_shards_in_and_out(tmp_path):
    tiny_dense("qwen2").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    tiny_dense("qwen2").save_pretrained(tmp_path / "single")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    expand_checkpoint(tmp_path / "sharded", tmp_path / "one", PLAN)
    expand_checkpoint(tmp_path / "single", tmp_path / "many", PLAN, max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 4
    found = compare_checkpoints(tmp_path / "one", tmp_path / "many")
    assert found.identical
    assert found.changed + found.added + found.removed == []
    ids = torch.randint(0, 256, (1, 8))
    one, many = (LayerMoEForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "many"))
    assert torch.equal(one(ids).logits, many(ids).logits)
    LayerMoEForCausalLM.from_pretrained(tmp_path / "many").save_pretrained(tmp_path / "again", max_shard_size="20KB")
    index = "model.safetensors.index.json"
    assert (tmp_path / "again" / index).read_bytes() == (tmp_path / "many" / index).read_bytes()


def test_the_seed_decides_and_routers_differ_between_layers(base, tmp_path):
    plan = Plan("moe-lpr", [3, 3, 3])
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        expand_checkpoint(base, tmp_path / name, plan, seed=seed, expert_init="random")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    a, c = tensors(tmp_path / "a"), tensors(tmp_path / "c")
    drawn = [name for name in a if "router" in name or ".experts.1." in name or ".experts.2." in name]
    assert sorted(name for name in a if not torch.equal(a[name], c[name])) == sorted(drawn)
    routers = [a[f"model.layers.{layer}.mlp.router.weight"] for layer in range(3)]
    assert not torch.equal(routers[0], routers[1])
    assert routers[0].std().item() == pytest.approx((2 / (32 + 3)) ** 0.5, rel=0.3)


def test_random_experts_are_drawn_as_the_backbone_draws(tmp_path):
    config = tiny_config("gpt_neox", hidden_size=64, intermediate_size=512, initializer_range=0.05)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    expand_checkpoint(tmp_path / "base", tmp_path / "out", Plan("moe-lpr", [2, 2, 2]), expert_init="random")
    found = tensors(tmp_path / "out")
    prefix = "gpt_neox.layers.0.mlp.experts"
    drawn, kept = (found[f"{prefix}.{e}.dense_h_to_4h.weight"] for e in (1, 0))
    assert drawn.std().item() == pytest.approx(0.05, rel=0.05)
    assert not torch.equal(drawn, kept)
    assert not found[f"{prefix}.1.dense_h_to_4h.bias"].any()


def test_companions_travel_along_and_the_template_works(tmp_path):
    base = save_dense(tmp_path / "base")
    byte_tokenizer(CHAT).save_pretrained(base)
    GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=256).save_pretrained(base)
    (base / "README.md").write_text("the base model's card")
    expand_checkpoint(base, tmp_path / "out", PLAN)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<u>hi"
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7
    assert not (tmp_path / "out" / "README.md").exists()


def test_provenance_says_what_was_done_and_holds_no_local_path(base, tmp_path):
    expand_checkpoint(base, tmp_path / "out", PLAN, seed=7)
    text = (tmp_path / "out" / "config.json").read_text()
    assert str(tmp_path) not in text
    (entry,) = json.loads(text)["expansions"]
    assert entry.items() >= {
        "method": "layer-moe", "base_model": "base", "old_languages": ["en"], "new_languages": ["el"],
        "experts_per_layer": [3, 1, 2], "seed": 7,
    }.items()  # fmt: skip
    assert entry["versions"]["torch"] == torch.__version__


def test_refusals_name_what_is_wrong_and_leave_nothing(base, tmp_path):
    def refused(source, plan, message, **options):
        with pytest.raises(InputError, match=message):
            expand_checkpoint(source, tmp_path / "out", plan, **options)

    refused(tmp_path / "nowhere", PLAN, "no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", PLAN, "not a checkpoint: it has no config.json")
    refused(base, Plan("moe-lpr", [2, 2]), "plan is for 2 layers, but .* has 3")
    refused(base, PLAN, "expert_init: Input should be 'copy' or 'random'", expert_init="zero")
    refused(base / "config.json", PLAN, "is a file")
    reasons = {
        "led": "it is an encoder-decoder that pads a text inside its encoder",
        "vit": "it is not a language model that transformers knows",
        "bert": "it is an encoder, or an encoder that may run as a decoder: .*; give a dense decoder or",
        "mamba": "on a tiny twin of the model, MambaForCausalLM cannot be expanded: none of its layers has an FFN",
    }
    for architecture, reason in reasons.items():
        shutil.copytree(base, tmp_path / architecture)
        (tmp_path / architecture / "config.json").write_text(json.dumps({"model_type": architecture}))
        refused(tmp_path / architecture, PLAN, f"a {architecture} checkpoint cannot be expanded: {reason}")
    computed = {
        "quantised": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "are quantised"),
        "sliced": ({"model_type": "bloom", "slow_but_exact": True, "pretraining_tp": 2}, "the FFN in slices"),
    }
    for name, (fields, reason) in computed.items():
        shutil.copytree(base, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | fields))
        refused(tmp_path / name, PLAN, reason)
    shutil.copytree(base, tmp_path / "pickled")
    os.rename(tmp_path / "pickled/model.safetensors", tmp_path / "pickled/pytorch_model.bin")
    refused(tmp_path / "pickled", PLAN, "pickled weights, which are not read")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", *reasons, *computed, "pickled"}
    expand_checkpoint(base, tmp_path / "done", PLAN)
    refused(tmp_path / "done", PLAN, "is an expanded checkpoint already")
    with pytest.raises(InputError, match="exists already"):
        expand_checkpoint(base, tmp_path / "done", PLAN)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "last.tex").touch()
    with pytest.raises(InputError, match=r"thesis: is not a checkpoint .* not overwritten"):
        expand_checkpoint(base, tmp_path / "thesis", PLAN, overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "done")
    with pytest.raises(InputError, match="link: is a link, not a folder"):
        expand_checkpoint(base, tmp_path / "link", PLAN, overwrite=True)
    assert base.is_dir()
    assert (tmp_path / "thesis" / "last.tex").is_file()
    expand_checkpoint(base, tmp_path / "done", Plan("moe-lpr", [2, 2, 2]), overwrite=True)
    assert LayerMoEForCausalLM.from_pretrained(tmp_path / "done").config.num_experts_per_layer == [2, 2, 2]


THREE = Plan("moe-lpr", [3, 1, 3], old=["en"], new=["el"])


def trained(root, backbone, **changes):
    """An expanded checkpoint whose experts differ."""
    save_dense(root / "base", backbone, **changes)
    expand_checkpoint(root / "base", root / "expanded", THREE)
    return move(root / "expanded", root / "trained")


def test_the_export_needs_nothing_of_ours(tmp_path):
    model = trained(tmp_path, "qwen3")
    GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=256).save_pretrained(model)
    export_dense(model, tmp_path / "out", expert=2)
    assert not list((tmp_path / "out").glob("*.py"))
    text = (tmp_path / "out" / "config.json").read_text()
    assert str(tmp_path) not in text
    (entry,) = json.loads(text)["history"]
    assert entry["settings"]["expansions"][0]["new_languages"] == ["el"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7
    code = "from transformers import AutoModelForCausalLM as A\nprint(type(A.from_pretrained(sys.argv[1])).__name__)"
    assert run_fresh(code, str(tmp_path / "out")).strip() == "Qwen3ForCausalLM"


def test_an_expert_that_not_every_layer_has(tmp_path):
    save_dense(tmp_path / "base")
    expand_checkpoint(tmp_path / "base", tmp_path / "out", Plan("moe-lpr", [3, 1, 2]))
    with pytest.raises(InputError, match=r"layer 2 has no expert 2; give one of 0\.\.1"):
        export_dense(tmp_path / "out", tmp_path / "no", expert=2)
    export_dense(tmp_path / "out", tmp_path / "one", expert=1)
    refused(export_dense, tmp_path / "base", tmp_path / "no", says="not an expanded one", expert=0)
    refused(export_dense, tmp_path / "out", tmp_path / "no", says="has no expert -1", expert=-1)
    for both in ({}, {"expert": 1, "language": "el"}):
        with pytest.raises(InputError, match=r"Give one of --language CODE and --expert NUMBER, .* or --peft"):
            export_dense(tmp_path / "out", tmp_path / "no", **both)
    assert not (tmp_path / "no").exists()


def test_an_ffn_that_the_backbone_does_not_initialise_is_not_written_at_random(base, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(InputError, match=r"has no random first weights of 'down_proj\.weight': take `copy` instead"):
        expand_checkpoint(base, tmp_path / "out", PLAN, expert_init="random")
    assert not (tmp_path / "out").exists()
