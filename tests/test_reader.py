"""Which tensors a reader finds in the files of a checkpoint, and which of them are the same."""

import json
import resource
import struct
from pathlib import Path

import torch
from conftest import save_dense
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_moe_expand.checkpoint import reader as reader_module
from hf_moe_expand.checkpoint.reader import CheckpointReader, StoredTensor
from hf_moe_expand.core.jsonfile import read_json


def test_checking_a_large_file_takes_no_memory(tmp_path):
    size = 40 << 30  # a sparse file
    header = json.dumps({"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert CheckpointReader(tmp_path).tensors["a"].nbytes == size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def sharded(folder: Path, where: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, folder / "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


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


def test_json_files_with_a_byte_order_mark_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"a":\r\n1}\r\n', encoding="utf-8-sig")
    assert read_json(tmp_path / "config.json", "x") == {"a": 1}


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
