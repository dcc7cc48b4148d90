"""Expansion from folder to folder, in memory, and as a checkpoint of what it added alone; export, the way back."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import byte_tokenizer, moved, refused, run_fresh, save_dense, tensors, tiny_config, tiny_dense
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

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
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.checkpoint.stored import base_of

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


def test_the_seed_decides_and_random_experts_are_drawn_as_the_backbone_draws(tmp_path):
    config = tiny_config("gpt_neox", hidden_size=64, intermediate_size=512, initializer_range=0.05)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        plan = Plan("moe-lpr", [3, 3, 3])
        expand_checkpoint(tmp_path / "base", tmp_path / name, plan, seed=seed, expert_init="random")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    a, c, layer = tensors(tmp_path / "a"), tensors(tmp_path / "c"), "gpt_neox.layers.{}.mlp.".format
    new = {name for name in a if "router" in name or ".experts.1." in name or ".experts.2." in name}
    assert {name for name in a if not torch.equal(a[name], c[name])} == {name for name in new if "bias" not in name}
    assert not any(a[name].any() for name in new if "bias" in name)
    assert a[f"{layer(0)}experts.1.dense_h_to_4h.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    routers = [a[f"{layer(number)}router.weight"] for number in range(2)]
    assert not torch.equal(*routers)
    assert routers[0].std().item() == pytest.approx((2 / (64 + 3)) ** 0.5, rel=0.3)


def test_companions_travel_along_and_provenance_holds_no_local_path(tmp_path):
    base = save_dense(tmp_path / "base")
    GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=256).save_pretrained(base)
    (base / "README.md").write_text("the base model's card")
    expand_checkpoint(base, tmp_path / "out", PLAN, seed=7)
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7
    assert not (tmp_path / "out" / "README.md").exists()
    text = (tmp_path / "out" / "config.json").read_text()
    assert str(tmp_path) not in text
    (entry,) = json.loads(text)["expansions"]
    assert entry.items() >= {
        "method": "layer-moe", "base_model": "base", "old_languages": ["en"], "new_languages": ["el"],
        "experts_per_layer": [3, 1, 2], "seed": 7,
    }.items()  # fmt: skip
    assert entry["versions"]["torch"] == torch.__version__


def test_refusals_name_what_is_wrong_and_leave_nothing(base, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, plan, says, options in (
        (tmp_path / "nowhere", PLAN, "no such folder", {}),
        (tmp_path / "empty", PLAN, "not a checkpoint: it has no config.json", {}),
        (base, Plan("moe-lpr", [2, 2]), "plan is for 2 layers, but .* has 3", {}),
        (base, PLAN, "expert_init: Input should be 'copy' or 'random'", {"expert_init": "zero"}),
        (base / "config.json", PLAN, "not a checkpoint", {}),
    ):
        refused(expand_checkpoint, source, tmp_path / "out", plan, says=says, **options)
    of_base = json.loads((base / "config.json").read_text())
    cannot = "a {} checkpoint cannot be expanded: {}".format
    bases = {
        "led": ({}, cannot("led", "it is an encoder-decoder that pads a text inside its encoder")),
        "vit": ({}, cannot("vit", "it is not a language model that transformers knows")),
        "bert": ({}, cannot("bert", "it is an encoder, or an encoder that may run as a decoder: ")),
        "mamba": ({}, cannot("mamba", "on a tiny twin .*MambaForCausalLM cannot be expanded: layer 0 has no FFN")),
        "qwen2": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "is quantised"),
        "bloom": ({"slow_but_exact": True, "pretraining_tp": 2}, "the FFN in slices"),
    }
    for name, (fields, says) in bases.items():
        shutil.copytree(base, tmp_path / name)
        config = (of_base | fields if fields else {}) | {"model_type": name}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        refused(expand_checkpoint, tmp_path / name, tmp_path / "out", PLAN, says=says)
    shutil.copytree(base, tmp_path / "pickled")
    os.rename(tmp_path / "pickled/model.safetensors", tmp_path / "pickled/pytorch_model.bin")
    refused(expand_checkpoint, tmp_path / "pickled", tmp_path / "out", PLAN, says="pickled weights are not read")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", *bases, "pickled"}


def test_what_stands_in_the_place_of_the_output(base, tmp_path):
    expand_checkpoint(base, tmp_path / "done", PLAN)
    again = tmp_path / "again"
    refused(expand_checkpoint, tmp_path / "done", again, PLAN, says="is an expanded checkpoint already")
    refused(expand_checkpoint, base, tmp_path / "done", PLAN, says="exists already")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "last.tex").touch()
    (tmp_path / "link").symlink_to(tmp_path / "done")
    for name, says in (("thesis", r"is not a checkpoint .* not overwritten"), ("link", "is .* a link, not a folder")):
        refused(expand_checkpoint, base, tmp_path / name, PLAN, overwrite=True, says=f"{name}: {says}")
    assert (tmp_path / "thesis" / "last.tex").is_file()
    expand_checkpoint(base, tmp_path / "done", Plan("moe-lpr", [2, 2, 2]), overwrite=True)
    assert LayerMoEForCausalLM.from_pretrained(tmp_path / "done").config.num_experts_per_layer == [2, 2, 2]


def test_the_export_needs_nothing_of_ours(tmp_path):
    save_dense(tmp_path / "base", "qwen3")
    expand_checkpoint(tmp_path / "base", tmp_path / "model", Plan("moe-lpr", [3, 1, 3], old=["en"], new=["el"]))
    GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=256).save_pretrained(tmp_path / "model")
    export_dense(tmp_path / "model", tmp_path / "out", expert=2)
    assert not list((tmp_path / "out").glob("*.py"))
    text = (tmp_path / "out" / "config.json").read_text()
    assert str(tmp_path) not in text
    (entry,) = json.loads(text)["history"]
    assert entry["settings"]["expansions"][0]["new_languages"] == ["el"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7
    code = "from transformers import AutoModelForCausalLM as A\nprint(type(A.from_pretrained(sys.argv[1])).__name__)"
    assert run_fresh(code, str(tmp_path / "out")).strip() == "Qwen3ForCausalLM"


def test_an_expert_that_not_every_layer_has(base, tmp_path):
    out, no = tmp_path / "out", tmp_path / "no"
    expand_checkpoint(base, out, Plan("moe-lpr", [3, 1, 2]))
    refused(export_dense, out, no, says=r"layer 2 has no expert 2; give one of 0\.\.1", expert=2)
    export_dense(out, tmp_path / "one", expert=1)
    refused(export_dense, base, no, says="not an expanded one", expert=0)
    refused(export_dense, out, no, says="has no expert -1", expert=-1)
    for both in ({}, {"expert": 1, "language": "el"}):
        refused(export_dense, out, no, says=r"Give one of --language CODE and --expert NUMBER, or --peft", **both)
    assert not no.exists()


def test_an_ffn_that_the_backbone_does_not_initialise_is_not_written_at_random(base, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", lambda self, module: None)
    said = r"has no random first weights of 'down_proj\.weight': take `copy`"
    refused(expand_checkpoint, base, tmp_path / "out", PLAN, says=said, expert_init="random")
    assert not (tmp_path / "out").exists()


def make(folder, backbone="qwen2", **changes):
    """A base, a whole expanded checkpoint, and its expansion only."""
    save_dense(folder / "base", backbone, **changes)
    expand_checkpoint(folder / "base", folder / "whole", PLAN)
    save_expansion(folder / "whole", folder / "added", folder / "base")
    return folder


def load(folder, base):
    return AutoModelForCausalLM.from_pretrained(folder, base_model=base)


def assert_holds(model, file):
    """Whether the model's tensors are those of the file."""
    stored = load_file(file)
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return make(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to change at will."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def change(file, name, by=1.0):
    weights = load_file(file)
    weights[name] = weights[name] + by
    save_file(weights, file, metadata={"format": "pt"})


def test_it_loads_as_the_whole_checkpoint_does(tmp_path):
    make(tmp_path, "gpt_neox", dtype=torch.bfloat16)  # stores its head as embed_out
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "added", base_model=tmp_path / "base", output_loading_info=True
    )
    assert not any(info.values())
    assert loaded.dtype == whole.dtype == torch.bfloat16
    assert loaded.state_dict().keys() == whole.state_dict().keys()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in whole.state_dict().items())
    assert loaded.generation_config.to_dict() == whole.generation_config.to_dict()
    assert loaded.config.name_or_path == str(tmp_path / "added")
    assert "expansion_only" not in loaded.config.parts
    body, ids = AutoModel.from_pretrained(tmp_path / "added", base_model=tmp_path / "base"), torch.arange(5)[None]
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
    whole, loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole"), load(tmp_path / "added", base)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in whole.state_dict().items())


def test_a_base_that_is_unknown_or_another_model_is_refused(folder):
    """One that differs, with its first such tensor."""
    said = "added to base, a local folder: give base_model=FOLDER"
    refused(AutoModelForCausalLM.from_pretrained, folder / "added", says=said, raises=ValueError)
    refused(CheckpointReader, folder / "added", says="base_model=FOLDER")
    said = "was expanded from base, a local folder: give `base`"
    refused(save_expansion, folder / "whole", folder / "other", says=said)
    for name, model in (("other", tiny_dense("qwen2", seed=5)), ("unlike", tiny_dense("gpt2"))):
        model.save_pretrained(folder / name)
        said = rf"lacks most tensors of .*{name}(, such as \S+)?: give the base"
        refused(save_expansion, folder / "whole", folder / "new", folder / name, says=said)
    assert not (folder / "new").exists()
    file = folder / "base" / "model.safetensors"
    for name in ("model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        change(file, name)
    said = r"not the base model that was expanded: tensor model\.layers\.0\.mlp\.down_proj\.weight differs"
    refused(load, folder / "added", folder / "base", says=said, raises=ValueError)
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    refused(load, folder / "added", folder / "base", says=r"it has no tensor model\.norm\.weight", raises=ValueError)


def test_tensors_of_the_base_that_training_changed_travel_along(folder):
    """Also of a base that was saved in shards."""
    AutoModelForCausalLM.from_pretrained(folder / "base").save_pretrained(folder / "shards", max_shard_size="40KB")
    assert len(list((folder / "shards").glob("*.safetensors"))) > 2
    name = "model.layers.0.input_layernorm.weight"
    change(folder / "whole" / "model.safetensors", name)
    for base, size in (("base", "1GB"), ("shards", "40KB")):
        new = folder / f"new-{base}"
        assert save_expansion(folder / "whole", new, folder / base, max_shard_size=size).changed == [name]
        assert_holds(load(new, folder / base), folder / "whole" / "model.safetensors")
    assert len(list(new.glob("expansion-*.safetensors"))) > 1


@pytest.mark.parametrize(("backbone", "tied"), [("qwen2", False), ("bloom", True)])
def test_it_shares_the_dense_models_memory_and_new_experts_are_copies(backbone, tied):
    dense = tiny_dense(backbone, tie_word_embeddings=tied)
    model = expand_model(dense, PLAN)
    theirs = {parameter.data_ptr(): name for name, parameter in dense.named_parameters()}
    ours = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    assert set(theirs) <= set(ours)
    assert len(ours) == len(list(model.named_parameters()))
    for pointer in ours.keys() - theirs.keys():
        assert any(part in ours[pointer] for part in (".experts.1.", ".experts.2.", "router", "classifier"))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_the_dense_model_stays_as_it_was():
    dense = tiny_dense("qwen2").train()
    dense.set_attn_implementation("eager")
    dense.requires_grad_(False)
    config = dense.config.to_dict()
    ids = torch.randint(0, 256, (2, 9))
    expected = dense(ids).logits
    model = expand_model(dense, PLAN)
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
    dense, hub, commit = tiny_dense("qwen2"), "Qwen/Qwen2.5-0.5B", "0123456789" * 4
    cached = f"/home/someone/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/{commit}"
    for name, loaded_commit, expected in (
        (hub, None, (hub, None)), (hub, commit, (hub, commit)), (cached, None, (hub, commit)),
        ("/home/someone/gone", None, ("gone", None)), ("runs/one/gone", None, ("gone", None)),
        ("", None, ("Qwen2ForCausalLM", None)),
    ):  # fmt: skip
        dense.config._name_or_path, dense.config._commit_hash = name, loaded_commit
        assert base_of(dense) == expected


def test_models_that_cannot_be_expanded_are_refused():
    dense, adapted, lora = tiny_dense("qwen2"), tiny_dense("qwen2"), LoraConfig(target_modules=["q_proj"])
    adapted.add_adapter(lora)
    for model, says in (
        (nn.Linear(2, 2), "dense is of type Linear: must be"),
        (get_peft_model(tiny_dense("qwen2"), lora), "dense is of type Peft.*: must be"),
        (adapted, "tensors that the backbone does not know"),
        (AutoModel.from_config(tiny_config("qwen2")), "tensors that the backbone does not know"),
        (expand_model(dense, PLAN), "is an expanded checkpoint already"),
    ):
        refused(expand_model, model, PLAN, says=says)
    grows, groups = Plan("moe-lpr", [3, 3, 3], grows_from=[2, 2, 2]), Plan("dmoe", [2, 1, 2], groups=[["el"], ["hu"]])
    for plan, says, options in (
        (Plan("moe-lpr", [2, 2]), "plan is for 2 layers, but Qwen2ForCausalLM has 3", {}),
        (grows, "made to grow", {}),
        (groups, "which in a DMoE belongs to a group", {"conditional_routing": True}),
    ):
        refused(expand_model, dense, plan, says=says, **options)


@pytest.mark.parametrize("model_class", [LayerMoEForCausalLM, DMoEForCausalLM])
def test_loading_a_dense_checkpoint_never_makes_experts_up(model_class, base, tmp_path):
    config_class = model_class.config_class
    groups = {"language_groups": [["el"], ["hu"]]} if config_class is DMoEConfig else {}
    config = config_class.from_dense(tiny_config("qwen2"), num_experts_per_layer=[2, 1, 2], **groups)
    refused(model_class.from_pretrained, base, says="expand_model.*expand_checkpoint", raises=ValueError)
    refused(config_class, backbone_model_type="later", says="does not know the backbone 'later'", raises=ValueError)
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
    configs = [one.config.to_dict() for one in (model, expected)]
    for config in configs:
        del config["_name_or_path"], config["transformers_version"]
        for stage in config["expansions"][-1]["stages"]:
            (stage.get("settings") or {}).pop("models", None)  # the names of folders
    assert configs[0] == configs[1]


def test_gates_and_averages_of_loaded_models_are_those_of_folders(tmp_path, quick_gates):
    """Of a tied model in bfloat16."""
    own, dense = (tiny_dense("gemma3_text", seed, torch.bfloat16) for seed in (0, 1))
    model = moved(expand_model(own, PLAN), scale=0.1)
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
    dense, model, given = tiny_dense("qwen2"), expand_model(tiny_dense("qwen2"), PLAN), {"texts": TEXTS}
    dmoe = expand_model(tiny_dense("qwen2"), Plan("dmoe", [2, 1, 2], groups=[["el"], ["tr"]]))
    model.save_pretrained(tmp_path / "model")
    whole = {**given, "processing_class": byte_tokenizer()}
    for says, call, arguments, options in (
        ("texts is None", fit_gates, [model], {"processing_class": byte_tokenizer()}),
        ("processing_class is None", fit_gates, [model], given),
        ("out is None", fit_gates, [tmp_path / "model"], given),
        ("out is 'x'", average_experts, [model, "x"], {}),
        ("out is None: ", average_experts, [tmp_path / "model"], {}),
        ("models holds loaded models and names", average_checkpoints, [[model, tmp_path / "model"]], {}),
        ("is a dense model", average_experts, [dense], {}),
        ("is not expanded", fit_gates, [dense], whole),
        ("a DMoE keeps no language of its base", fit_gates, [dmoe], whole),
    ):
        refused(call, *arguments, says=says, **options)


def test_training_it_leaves_the_base_s_files_alone(folder):
    files = [*(folder / "base").iterdir(), *(folder / "added").iterdir()]
    before = [file.read_bytes() for file in files]
    model = load(folder / "added", folder / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert [file.read_bytes() for file in files] == before
