"""Checkpoints of what an expansion added alone, and expansion in memory: as the whole one, or why not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, moved, refused, save_dense, tiny_config, tiny_dense
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from hf_moe_expand import (
    DMoEConfig,
    DMoEForCausalLM,
    LayerMoEForCausalLM,
    Plan,
    average_checkpoints,
    average_experts,
    expand_checkpoint,
    expand_model,
    fit_gates,
    save_expansion,
)
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.checkpoint.expand import base_of
from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.core.errors import InputError

PLAN = Plan("layer-moe", [3, 1, 2], [0], old=["en"], new=["el"])


def make(folder, backbone="qwen2", **changes):
    """A base, a whole expanded checkpoint, and its expansion only."""
    save_dense(folder / "base", backbone, **changes)
    expand_checkpoint(folder / "base", folder / "whole", PLAN)
    save_expansion(folder / "whole", folder / "added", folder / "base")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return make(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to change at will."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def change(file, name, by=1.0):
    weights = load_file(file)
    weights[name] = weights[name] + by
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("backbone", "changes"),
    [
        ("gemma3_text", {}),  # tied
        ("gpt_neox", {"dtype": torch.bfloat16}),  # stores its head as embed_out
    ],
)
def test_it_loads_and_saves_as_the_whole_checkpoint_does(tmp_path, backbone, changes):
    make(tmp_path, backbone, **changes)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "added", base_model=tmp_path / "base", output_loading_info=True
    )
    assert not any(info.values())
    assert loaded.dtype == whole.dtype == changes.get("dtype", torch.float32)
    assert loaded.state_dict().keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.generation_config.to_dict() == whole.generation_config.to_dict()
    assert loaded.config.name_or_path == str(tmp_path / "added")
    assert "expansion_only" not in loaded.config.parts
    whole.save_pretrained(tmp_path / "whole-again")
    loaded.save_pretrained(tmp_path / "added-again")
    assert contents(tmp_path / "added-again") == contents(tmp_path / "whole-again")
    body = AutoModel.from_pretrained(tmp_path / "added", base_model=tmp_path / "base")
    ids = torch.arange(5)[None]
    with torch.no_grad():
        wanted = whole(ids, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(body(ids).last_hidden_state, wanted)


def test_a_base_whose_stored_names_are_not_the_model_s(tmp_path):
    # The published BLOOM checkpoints have `h.0...` instead of `transformer.h.0...`.
    base = save_dense(tmp_path / "base", "bloom")
    weights = load_file(base / "model.safetensors")
    weights = {name.removeprefix("transformer."): value for name, value in weights.items()}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    expand_checkpoint(base, tmp_path / "whole", PLAN)
    assert save_expansion(tmp_path / "whole", tmp_path / "added", base).changed == []
    record = json.loads((tmp_path / "added" / "expansion_base.json").read_text())
    assert record["transformer.h.1.mlp.dense_h_to_4h.weight"]["name"] == "h.1.mlp.dense_h_to_4h.weight"
    assert record["transformer.h.0.mlp.experts.0.dense_h_to_4h.weight"]["name"] == "h.0.mlp.dense_h_to_4h.weight"
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "added", base_model=base).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in whole.items())


def test_a_base_that_differs_is_refused_with_its_first_such_tensor(folder):
    file = folder / "base" / "model.safetensors"
    for name in ("model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        change(file, name)
    message = r"not the base model that was expanded: tensor model\.layers\.0\.mlp\.down_proj\.weight differs"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder / "added", base_model=folder / "base")
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"it has no tensor model\.norm\.weight"):
        AutoModelForCausalLM.from_pretrained(folder / "added", base_model=folder / "base")


def test_without_a_known_base_it_says_what_to_pass(saved):
    with pytest.raises(ValueError, match="added to base, which was a local folder: pass base_model=FOLDER"):
        AutoModelForCausalLM.from_pretrained(saved / "added")
    refused(CheckpointReader, saved / "added", says="base_model=FOLDER")
    with pytest.raises(InputError, match="was expanded from base, a local folder: give `base`, a hub id or"):
        save_expansion(saved / "whole", saved / "other")


def test_tensors_of_the_base_that_training_changed_travel_along(folder):
    name = "model.layers.0.input_layernorm.weight"
    change(folder / "whole" / "model.safetensors", name)
    assert save_expansion(folder / "whole", folder / "new", folder / "base").changed == [name]
    loaded = AutoModelForCausalLM.from_pretrained(folder / "new", base_model=folder / "base")
    whole = load_file(folder / "whole" / "model.safetensors")
    assert all(torch.equal(value, whole[key]) for key, value in loaded.state_dict().items())


def test_a_base_that_is_another_model_is_refused_when_saving(folder):
    tiny_dense("qwen2", seed=5).save_pretrained(folder / "other")
    with pytest.raises(InputError, match=r"lacks most tensors of .*other, such as \S+: give the base"):
        save_expansion(folder / "whole", folder / "new", folder / "other")
    tiny_dense("gpt2").save_pretrained(folder / "unlike")
    with pytest.raises(InputError, match=r"lacks most tensors of .*unlike: give the base"):
        save_expansion(folder / "whole", folder / "new", folder / "unlike")
    assert not (folder / "new").exists()


LAYER_MOE = Plan("layer-moe", [3, 1, 2], [2], old=["en"], new=["el"])
LORA = {"expert_kind": "lora", "lora_rank": 3, "lora_alpha": 5.0}


@pytest.mark.parametrize(("backbone", "tied"), [("qwen2", True), ("qwen2", False), ("bloom", True), ("gpt2", False)])
def test_it_shares_the_dense_models_memory_and_new_experts_are_copies(backbone, tied):
    dense = tiny_dense(backbone, tie_word_embeddings=tied)
    model = expand_model(dense, LAYER_MOE)
    theirs = {parameter.data_ptr(): name for name, parameter in dense.named_parameters()}
    ours = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    assert set(theirs) <= set(ours)
    assert len(ours) == len(list(model.named_parameters()))
    for pointer in ours.keys() - theirs.keys():
        assert any(part in ours[pointer] for part in (".experts.1.", ".experts.2.", "router", "classifier"))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    before = {name: parameter.clone() for name, parameter in dense.named_parameters()}
    with torch.no_grad():
        for ffn in model.expanded_ffns().values():
            for parameter in (*ffn.experts[1:].parameters(), ffn.router.weight):
                parameter.add_(1)
    assert all(torch.equal(parameter, before[name]) for name, parameter in dense.named_parameters())


def test_the_dense_model_stays_as_it_was():
    dense = tiny_dense("qwen2").train()
    dense.set_attn_implementation("eager")
    dense.requires_grad_(False)
    config = dense.config.to_dict()
    ids = torch.randint(0, 256, (2, 9))
    expected = dense(ids).logits
    model = expand_model(dense, LAYER_MOE)
    assert model.training
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"eager"}
    model.set_attn_implementation("sdpa")
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in dense.parameters())
    assert dense.config.to_dict() == config
    assert dense.config._attn_implementation == "eager"
    assert torch.equal(dense(ids).logits, expected)


def test_the_base_is_named_without_a_local_path(tmp_path, monkeypatch):
    save_dense(tmp_path / "my-base")
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path / "my-base", "my-base", "./my-base"):
        assert base_of(AutoModelForCausalLM.from_pretrained(name)) == ("my-base", None)
    dense = tiny_dense("qwen2")
    commit = "0123456789" * 4
    cached = f"/home/someone/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/{commit}"
    cases = {
        "Qwen/Qwen2.5-0.5B": ("Qwen/Qwen2.5-0.5B", None),
        cached: ("Qwen/Qwen2.5-0.5B", commit),
        "/home/someone/gone": ("gone", None),
        "runs/one/gone": ("gone", None),
        "": ("Qwen2ForCausalLM", None),
    }
    for name, expected in cases.items():
        dense.config._name_or_path = name
        assert base_of(dense) == expected
    dense.config._name_or_path, dense.config._commit_hash = "Qwen/Qwen2.5-0.5B", commit
    assert base_of(dense) == ("Qwen/Qwen2.5-0.5B", commit)


def test_models_that_cannot_be_expanded_are_refused(tmp_path):
    def refused(dense, message, plan=LAYER_MOE, **options):
        with pytest.raises(InputError, match=message):
            expand_model(dense, plan, **options)

    dense = tiny_dense("qwen2")
    refused(nn.Linear(2, 2), "Linear: not a model of transformers")
    refused(get_peft_model(tiny_dense("qwen2"), LoraConfig(target_modules=["q_proj"])), "merge_and_unload")
    adapted = tiny_dense("qwen2")
    adapted.add_adapter(LoraConfig(target_modules=["q_proj"]))
    refused(adapted, "tensors that the backbone does not know")
    refused(AutoModel.from_config(tiny_config("qwen2")), "load a Qwen2ForCausalLM")
    refused(expand_model(dense, LAYER_MOE), "is an expanded checkpoint already")
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(tiny_config("qwen2"))
    refused(empty, "weights lie on meta")
    refused(dense, "plan is for 2 layers, but Qwen2ForCausalLM has 3", Plan("moe-lpr", [2, 2]))
    refused(dense, "made to grow", Plan("moe-lpr", [3, 3, 3], grows_from=[2, 2, 2]))
    refused(dense, "expert_init: Input should be 'copy' or 'random'", expert_init="zero")
    refused(dense, "lora_rank is 90", expert_kind="lora", lora_rank=90)
    groups = Plan("dmoe", [2, 1, 2], groups=[["el"], ["hu"]])
    refused(dense, "which in a DMoE belongs to a group", groups, conditional_routing=True)


@pytest.mark.parametrize("model_class", [LayerMoEForCausalLM, DMoEForCausalLM])
def test_loading_a_dense_checkpoint_never_makes_experts_up(model_class, base, tmp_path):
    config_class = model_class.config_class
    groups = {"language_groups": [["el"], ["hu"]]} if config_class is DMoEConfig else {}
    config = config_class.from_dense(tiny_config("qwen2"), num_experts_per_layer=[2, 1, 2], **groups)
    with pytest.raises(ValueError, match=r"holds a qwen2 model.*expand_model\(.*expand_checkpoint\("):
        model_class.from_pretrained(base, config=config)
    refused(model_class.from_pretrained, base, says=r"expand_model.*expand_checkpoint", raises=ValueError)
    model_class(config).save_pretrained(tmp_path / "expanded")
    assert isinstance(model_class.from_pretrained(tmp_path / "expanded", config=config), model_class)


TEXTS = {"en": ["the cat sat on the mat again"] * 60, "el": ["η γάτα κάθισε ξανά στο χαλί"] * 60}
QUICK = GateSettings(tokens=300, anchor_tokens=200, unseen_share=0.99)  # a tiny model with random weights knows nothing


def assert_same_model(model, folder):
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    found, state = model.state_dict(), expected.state_dict()
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    for config in (model.config, expected.config):
        for stage in config.expansions[-1]["stages"]:
            (stage.get("settings") or {}).pop("models", None)  # the names of folders
    left_out = {"_name_or_path", "transformers_version"}
    assert {k: v for k, v in model.config.to_dict().items() if k not in left_out} == {
        k: v for k, v in expected.config.to_dict().items() if k not in left_out
    }
    ids = torch.arange(1, 9)[None]
    assert torch.equal(*(one.generate(ids, max_new_tokens=3, do_sample=False) for one in (model, expected)))


@pytest.mark.parametrize(("backbone", "dtype"), [("gemma3_text", torch.float32), ("qwen2", torch.bfloat16)])
def test_gates_and_averages_of_loaded_models_are_those_of_folders(backbone, dtype, tmp_path, quick_gates):
    model = moved(expand_model(tiny_dense(backbone, dtype=dtype), LAYER_MOE), scale=0.1)
    dense = tiny_dense(backbone, seed=1, dtype=dtype)
    for name, one in (("model", model), ("dense", dense)):
        one.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = fit_gates(model.train(), texts=TEXTS, settings=QUICK, processing_class=byte_tokenizer())
    of_folder = fit_gates(tmp_path / "model", tmp_path / "gated", TEXTS, settings=QUICK)
    assert model.training
    assert not report.model.training  # in training the gate would judge nothing
    assert (report.out, report.gates) == (None, of_folder.gates)
    assert not any(line.startswith("wrote") for line in report.lines())
    assert_same_model(report.model, tmp_path / "gated")
    average_experts(tmp_path / "gated", tmp_path / "averaged", 0.3)
    assert_same_model(average_experts(report.model, weight=0.3), tmp_path / "averaged")
    average_checkpoints([tmp_path / "model", tmp_path / "dense"], tmp_path / "mean", [0.25, 0.75])
    assert_same_model(average_checkpoints([model.eval(), dense], weights=[0.25, 0.75]), tmp_path / "mean")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert {p.data_ptr() for n, p in report.model.named_parameters() if "gate" not in n} <= shared


def test_loaded_models_and_folders_are_told_apart(tmp_path):
    model = expand_model(tiny_dense("qwen2"), LAYER_MOE)
    model.save_pretrained(tmp_path / "model")
    refused = {
        "texts is None": lambda: fit_gates(model, processing_class=byte_tokenizer()),
        "processing_class is None": lambda: fit_gates(model, texts=TEXTS),
        "out is None": lambda: fit_gates(tmp_path / "model", texts=TEXTS),
        "out is 'x'": lambda: average_experts(model, "x"),
        "out is None: give": lambda: average_experts(tmp_path / "model"),
        "models holds loaded models and names": lambda: average_checkpoints([model, tmp_path / "model"]),
        "is a dense model": lambda: average_experts(tiny_dense("qwen2")),
        "is not expanded": lambda: fit_gates(tiny_dense("qwen2"), texts=TEXTS, processing_class=byte_tokenizer()),
        "a DMoE keeps no language of its base": lambda: fit_gates(
            expand_model(tiny_dense("qwen2"), Plan("dmoe", [2, 1, 2], groups=[["el"], ["tr"]])),
            texts=TEXTS, processing_class=byte_tokenizer(),
        ),
    }  # fmt: skip
    for message, work in refused.items():
        with pytest.raises(InputError, match=message):
            work()


def test_a_base_that_was_saved_in_shards_will_do(folder):
    AutoModelForCausalLM.from_pretrained(folder / "base").save_pretrained(folder / "shards", max_shard_size="40KB")
    assert len(list((folder / "shards").glob("*.safetensors"))) > 2
    save_expansion(folder / "whole", folder / "small", folder / "shards", max_shard_size="40KB")
    assert len(list((folder / "small").glob("expansion-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(folder / "small", base_model=folder / "shards").state_dict()
    whole = load_file(folder / "whole" / "model.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in whole.items())


def test_training_it_leaves_the_base_s_files_alone(folder):
    before = {**contents(folder / "base"), **contents(folder / "added")}
    model = AutoModelForCausalLM.from_pretrained(folder / "added", base_model=folder / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert {**contents(folder / "base"), **contents(folder / "added")} == before
