"""Checkpoints that hold only what an expansion added: they load as the whole one does, or say why not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import refused, save_dense, tiny_dense
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from hf_moe_expand import Plan, expand_checkpoint, save_expansion
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
        ("qwen2", {"tie_word_embeddings": True}),
        ("gemma3_text", {}),  # tied too
        ("bloom", {}),
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


def test_a_base_that_was_saved_in_shards_will_do(folder):
    AutoModelForCausalLM.from_pretrained(folder / "base").save_pretrained(folder / "shards", max_shard_size="40KB")
    assert len(list((folder / "shards").glob("*.safetensors"))) > 2
    save_expansion(folder / "whole", folder / "small", folder / "shards", max_shard_size="40KB")
    assert len(list((folder / "small").glob("expansion-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(folder / "small", base_model=folder / "shards").state_dict()
    whole = load_file(folder / "whole" / "model.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in whole.items())


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
    assert not (folder / "new").exists()


def test_training_it_leaves_the_base_s_files_alone(folder):
    before = {**contents(folder / "base"), **contents(folder / "added")}
    model = AutoModelForCausalLM.from_pretrained(folder / "added", base_model=folder / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert {**contents(folder / "base"), **contents(folder / "added")} == before
