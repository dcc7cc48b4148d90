"""Checkpoint files of strangers: what a header, an index or a configuration says is checked before it is believed."""

import json
import resource
import struct
from pathlib import Path

import pytest
import torch
from conftest import save_dense
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint import reader as reader_module
from hf_moe_expand.checkpoint.grow import grow_checkpoint
from hf_moe_expand.checkpoint.reader import CheckpointReader, StoredTensor
from hf_moe_expand.checkpoint.source import load_config
from hf_moe_expand.checkpoint.stored import StoredModel
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.report.inspection import inspect_checkpoint

PLAN = Plan("layer-moe", [2, 1, 2], [], old=["en"], new=["el"])


def write_raw(folder: Path, header: dict, data: bytes = b"") -> None:
    """`model.safetensors` with this header, whatever it says."""
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def entry(start, end, dtype="F32", shape=(2,)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(-8, 0)}, "-8"),
        ({"a": entry(8, 0)}, "invalid offset"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, "invalid offset"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, "invalid offset"),
        ({"a": entry(0, 8, shape=(2.0,))}, "floating point"),
        ({"a": entry(0, 8, shape=(1 << 40, 1 << 40))}, "overflow"),
        ({"a": entry(0, 8, dtype="F33")}, "F33"),
        ({"a": entry(0, 8, dtype="F33\n")}, "F33"),
        ({"a": entry(0, 80, shape=(20,))}, "incomplete"),
        ({"a": entry(0, 4, shape=(1,))}, "incomplete"),
        ({"a": 7}, "not a safetensors file"),
        ([], "not a safetensors file"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, message):
    write_raw(tmp_path, header, bytes(8))
    with pytest.raises(InputError, match=message) as refused:
        CheckpointReader(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_file_that_may_not_be_read_or_is_none_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"model\.safetensors: "):
        CheckpointReader(tmp_path)


def test_checking_a_large_file_takes_no_memory(tmp_path):
    size = 40 << 30  # a sparse file
    write_raw(tmp_path, {"a": entry(0, size, shape=(size // 4,))})
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate((tmp_path / "model.safetensors").stat().st_size + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert CheckpointReader(tmp_path).tensors["a"].nbytes == size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def sharded(folder: Path, where: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, folder / "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"a": "../x.safetensors"}, "not a safetensors file in this folder"),
        ({"a": "/etc/passwd"}, "not a safetensors file in this folder"),
        ({"a": "config.json"}, "not a safetensors file in this folder"),
        ({"a": ["model-1.safetensors"]}, "not a safetensors file in this folder"),
        ({"a": None}, "not a safetensors file in this folder"),
        ({"a": "link.safetensors"}, "link that leads out of the folder"),
        ({"a": "model-3.safetensors"}, "but the file is missing"),
        ({}, "weight_map is missing"),
        ("model-1.safetensors", "weight_map is missing"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, where, message):
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    folder = sharded(tmp_path / "checkpoint", where)
    (folder / "link.safetensors").symlink_to(tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=message):
        CheckpointReader(folder)


def test_an_index_may_name_tensors_that_no_file_holds_and_the_wrong_file(tmp_path):
    swapped = {"a": "model-2.safetensors", "b": "model-1.safetensors", "mtp.c": "model-1.safetensors"}
    reader = CheckpointReader(sharded(tmp_path / "checkpoint", swapped))
    assert (sorted(reader.tensors), reader.absent) == (["a", "b"], ["mtp.c"])


def test_the_same_bytes_in_another_shape_or_type_are_another_tensor(tmp_path):
    ones = torch.ones(2, 2, dtype=torch.int32)
    others = {"b": ones, "flat": ones.flatten(), "floats": ones.view(torch.float32)}
    save_file({"a": ones} | {name: tensor.clone() for name, tensor in others.items()}, tmp_path / "model.safetensors")
    stored = CheckpointReader(tmp_path).tensors
    assert [name for name in sorted(stored) if stored["a"].same_bytes(stored[name])] == ["a", "b"]


def test_links_of_the_hub_s_cache_are_followed(tmp_path):
    folder = tmp_path / "models--me--x" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    sharded(folder, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    (tmp_path / "models--me--x" / "blobs").mkdir()
    (folder / "model-1.safetensors").rename(tmp_path / "models--me--x" / "blobs" / "1")
    (folder / "model-1.safetensors").symlink_to("../../blobs/1")
    assert set(CheckpointReader(folder).tensors) == {"a", "b"}


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = sharded(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, folder / "model-2.safetensors")
    with pytest.raises(InputError, match=r"model-2.safetensors: tensor 'a' is in model-1.safetensors too"):
        CheckpointReader(folder)


def test_of_two_sets_of_weights_it_reads_the_one_that_transformers_reads(tmp_path):
    folder = save_dense(tmp_path / "base")
    one = load_file(folder / "model.safetensors")
    other = {name: torch.zeros_like(value) for name, value in one.items()}
    save_file(other, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    reader = CheckpointReader(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(reader.tensor(name), theirs[name]) for name in reader.tensors)
    (folder / "model.safetensors").unlink()
    save_file({"stale": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")  # the index does not name it
    reader = CheckpointReader(folder)
    assert "stale" not in reader.tensors
    assert not any(reader.tensor(name).any() for name in reader.tensors)


@pytest.fixture(scope="module")
def expanded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors")
    expand_checkpoint(save_dense(folder / "base"), folder / "expanded", PLAN)
    grow_checkpoint(folder / "expanded", folder / "grown", Plan("layer-moe", [3, 1, 3], [], old=["en", "el"],
                                                               new=["tr"], grows_from=[2, 1, 2]))  # fmt: skip
    return folder


def copied(source: Path, target: Path, change=lambda tensors: None, **fields) -> Path:
    """A copy of a checkpoint with other tensors or fields of config.json."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return target


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NAME), f"missing from the checkpoint: {NAME}"),
        (lambda tensors: tensors.update({NAME: tensors[NAME][:3].clone()}), r"has shape \[3, 32\]"),
        (lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.int8)}), "stored as I8"),
        (lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.float8_e4m3fn)}), "stored as F8_E4M3"),
    ],
)
def test_an_incomplete_or_quantised_checkpoint_is_refused_at_every_door(expanded, tmp_path, change, message):
    for number, start in enumerate(("base", "expanded")):
        folder = copied(expanded / start, tmp_path / str(number), change)
        with pytest.raises(InputError, match=message):
            StoredModel(folder, load_config(folder))
        with pytest.raises(InputError, match=message):
            load_for_inference(folder)
    grown = copied(expanded / "grown", tmp_path / "grown", change)
    plan = Plan("layer-moe", [4, 1, 4], [], old=["en", "el", "tr"], new=["hu"], grows_from=[3, 1, 3])
    with pytest.raises(InputError, match=message):
        grow_checkpoint(grown, tmp_path / "out", plan)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(expanded, tmp_path, value):
    folder = copied(expanded / "expanded", tmp_path / "x", lambda tensors: tensors[NAME].view(-1).__setitem__(7, value))
    with pytest.raises(InputError, match=f"tensor '{NAME}' holds NaN or infinite values"):
        load_for_inference(folder)
    load_for_inference(expanded / "expanded")


@pytest.mark.parametrize("count", [5, 4000, 10**9, 10**30])
@pytest.mark.parametrize("door", [inspect_checkpoint, load_for_inference])
def test_more_layers_or_experts_than_tensors_are_refused_at_once(expanded, tmp_path, count, door):
    start = expanded / "expanded"
    layers = {"num_hidden_layers": count, "num_experts_per_layer": None, "layer_types": None, "max_window_layers": 1}
    for number, fields in enumerate((layers, {"num_experts_per_layer": [count * 100, 1, 1]})):
        folder = copied(start, tmp_path / str(number), **fields)
        if (count, number) == (5, 0) and door is inspect_checkpoint:
            continue  # as many layers as there may be: the missing tensors show where weights are read
        with pytest.raises(InputError):
            door(folder)


STAGE = {"stage": "review", "steps": 3, "seed": 0}
EXPANSION = {"method": "layer-moe", "base_model": "x", "old_languages": ["en"], "new_languages": ["el"], "stages": []}


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "magic"},
        {"hidden_act": 7},
        {"num_attention_heads": 0},
        {"num_hidden_layers": "three"},
        {"num_hidden_layers": True},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 2.5},
        {"hidden_size": 0},
        {"hidden_size": [32]},
        {"vocab_size": 10**20},
        {"dtype": "float99"},
        {"dtype": ["float32"]},
        {"rope_parameters": 3},
        {"layer_types": ["nothing"] * 3},
        {"text_config": {"num_hidden_layers": 17}},
        {"model_type": 7},
        {"model_type": ["qwen2"]},
        {"model_type": "no-such-model"},
        {"model_type": None},
        {"num_experts_per_layer": [2, 1]},
        {"num_experts_per_layer": "2 1 2"},
        {"num_experts_per_layer": [2, 1, "2"]},
        {"num_experts_per_layer": [2, 1, 2.5]},
        {"num_experts_per_layer": {}},
        {"router_top_k": "2"},
        {"router_top_k": 0},
        {"classifier_layers": 3},
        {"classifier_layers": [9]},
        {"expansions": {}},
        {"expansions": [3]},
        {"expansions": [{}]},
        {"expansions": [{**EXPANSION, "old_languages": None}]},
        {"expansions": [{**EXPANSION, "new_languages": [1]}]},
        {"expansions": [{**EXPANSION, "stages": [STAGE, None]}]},
        {"expansions": [{**EXPANSION, "stages": [{**STAGE, "steps": "3"}]}]},
        {"expansions": [{**EXPANSION, "base_model": ["x"]}]},
        {"earlier_experts_per_layer": [[1]]},
        {"earlier_experts_per_layer": [1, 2, 3]},
        {"backbone_model_type": "no-such-model"},
        {"backbone_model_type": None},
        {"expert_kind": "big"},
        {"conditional_routing": "yes"},
        {"transformers_weights": "other.safetensors"},
        {"pad_token_id": "x"},
        {"initializer_range": "x"},
    ],
    ids=lambda fields: str(fields)[1:60],
)
def test_a_configuration_with_a_wrong_value_is_one_sentence(expanded, tmp_path, fields):
    folder = copied(expanded / "expanded", tmp_path / "x", **fields)
    for door in (inspect_checkpoint, load_for_inference):
        with pytest.raises(InputError, match=f"^{folder}: ") as refused:
            door(folder)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_attention_heads": 5},
        {"num_key_value_heads": 3},
        {"rope_parameters": {"rope_type": "spiral"}},
        {"rope_parameters": {"rope_type": "linear", "factor": "x"}},
    ],
    ids=lambda fields: str(fields)[1:60],
)
def test_a_model_that_cannot_run_as_configured_is_one_sentence(expanded, tmp_path, fields):
    folder = copied(expanded / "expanded", tmp_path / "x", **fields)
    with pytest.raises(InputError, match=f"^{folder}: ") as refused:
        load_for_inference(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("history", [None, []])
def test_a_checkpoint_without_a_history_does_not_grow(expanded, tmp_path, history):
    folder = copied(expanded / "expanded", tmp_path / "x", expansions=history)
    plan = Plan("layer-moe", [3, 1, 3], [], old=["en", "el"], new=["tr"], grows_from=[2, 1, 2])
    with pytest.raises(InputError, match=r"x: config\.json records no expansion"):
        grow_checkpoint(folder, tmp_path / "out", plan)


def test_a_tokenizer_of_another_model_is_refused(expanded, tmp_path):
    folder = copied(expanded / "expanded", tmp_path / "x")
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**fields, "eos_token": "new"}))
    with pytest.raises(InputError, match="token 'new' has number 258, but the model has 257 tokens"):
        load_for_inference(folder)
    folder = copied(expanded / "expanded", tmp_path / "y")
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["model"]["vocab"]["a"] = 1000
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(InputError, match="token 'a' has number 1000, but the model has 257 tokens"):
        load_for_inference(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "found a list"),
        ('{"a": 1, "b": 2, "a": 3}', "duplicate key 'a'"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": [-Infinity]}', "-Infinity is not a JSON number"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "[" * 100_000, "nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "thousands of digits"),
        (r'{"a": "\ud800"}', "surrogate"),
        ("\xff", "not a configuration"),
    ],
    ids=lambda text: text[:12],
)
def test_a_config_json_that_is_no_json_is_one_sentence(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=message) as refused:
        load_config(tmp_path)
    assert "\n" not in str(refused.value)


def test_json_files_with_a_byte_order_mark_are_read(expanded, tmp_path):
    folder = copied(expanded / "expanded", tmp_path / "x")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("\n", "\r\n"), encoding="utf-8-sig")
    from hf_moe_expand.core.jsonfile import read_json

    assert read_json(folder / "config.json", "x") == json.loads(text)


def test_a_tensor_put_together_has_the_bytes_of_one_stored_whole(tmp_path, monkeypatch):
    """However large the pieces are in which both are read; and two of one file are not taken for the same."""
    monkeypatch.setattr(reader_module, "_CHUNK", 8)
    parts = {f"{name}{row}": torch.full((3,), float(row + 10 * (name == "b"))) for name in "ab" for row in range(2)}
    whole = torch.stack([parts["a0"], parts["a1"]])
    save_file({**parts, "whole": whole}, tmp_path / "model.safetensors")
    stored = CheckpointReader(tmp_path).tensors

    def together(name):
        rows = [stored[f"{name}{row}"] for row in range(2)]
        return StoredTensor(
            name, "F32", (2, 3), rows[0].file, compute=lambda: torch.stack([row.load() for row in rows])
        )

    assert together("a").same_bytes(stored["whole"])
    assert stored["whole"].same_bytes(together("a"))
    assert not together("a").same_bytes(together("b"))
