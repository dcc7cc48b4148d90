"""Tensors in the files of a checkpoint, under whatever name; surgery on them reads in pieces."""

import json
import resource
import struct
from pathlib import Path

import pytest
import torch
from conftest import ADDED, byte_tokenizer, save_dense, tiny_dense
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_moe_expand import Plan, expand_checkpoint, graft_delta, grow_checkpoint
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint import reader
from hf_moe_expand.checkpoint.average import average_checkpoints
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.graft import merge_delta
from hf_moe_expand.checkpoint.reader import CheckpointReader, StoredTensor


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


@pytest.mark.parametrize("dtype", reader.TORCH_DTYPES.values(), ids=str)
def test_values_are_finite_by_their_bits(dtype):
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    values = torch.tensor([0, -0.0, 1, least, -least, largest, -largest, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    assert [reader.is_finite(one) for one in values] == values.isfinite().tolist()
    assert reader.is_finite(values[:7])
    assert reader.is_finite(values[:0])
    assert not reader.is_finite((-values)[9:])


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


def test_a_tensor_put_together_has_the_bytes_of_one_stored_whole(tmp_path, monkeypatch):
    """However large the pieces are in which both are read; and two of one file are not taken for the same."""
    monkeypatch.setattr(reader, "_CHUNK", 8)
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


UNIFORM = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"])
GROUPS = Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]])
LARGEST = 4096  # bytes; the embedding has 32,896


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, a fine-tune of it in another type, and an expanded model."""
    root = tmp_path_factory.mktemp("surgery")
    save_dense(root / "base")
    save_dense(root / "instruct", dtype=torch.bfloat16)
    expand_checkpoint(root / "base", root / "expanded", UNIFORM)
    expand_checkpoint(save_dense(root / "olmoe", "olmoe", num_experts=4), root / "mixture", UNIFORM, **ADDED)
    return root


WORK = {
    "expand": lambda at, out: expand_checkpoint(at / "base", out, UNIFORM),
    "expand a mixture": lambda at, out: expand_checkpoint(at / "olmoe", out, UNIFORM, **ADDED),
    "export --expert of a mixture": lambda at, out: export_dense(at / "mixture", out, expert=0),
    "grow": lambda at, out: grow_checkpoint(
        at / "expanded", out, Plan("moe-lpr", [3, 3, 3], old=["en", "el"], new=["tr"], grows_from=[2, 2, 2])
    ),
    "graft": lambda at, out: graft_delta(at / "expanded", out, at / "base", at / "instruct"),
    "merge delta": lambda at, out: merge_delta(at / "base", out, at / "base", at / "instruct"),
    "merge average": lambda at, out: average_checkpoints([at / "expanded", at / "instruct"], out),
    "expand-branches": lambda at, out: expand_branches([at / "base", at / "instruct"], out, GROUPS),
    "expand-depth": lambda at, out: expand_depth(at / "base", out, 1),
    "export --expert": lambda at, out: export_dense(at / "expanded", out, expert=1),
    "diff": lambda at, out: compare_checkpoints(at / "base", at / "instruct"),
}


@pytest.mark.parametrize("name", WORK)
def test_no_step_reads_a_whole_tensor(place, tmp_path, monkeypatch, name):
    load = reader.StoredTensor.load

    # A mixture's own experts are put together.
    small = ("router", "classifier", *([".experts."] if "mixture" in name else []))

    def routing_only(self):
        assert any(word in self.name for word in small), f"{self.name} is read as a whole"
        return load(self)

    sizes = []

    def watched(method):
        def pieces(self, *arguments, **options):
            for piece in method(self, *arguments, **options):
                sizes.append(piece.nbytes if isinstance(piece, torch.Tensor) else len(piece))
                yield piece

        return pieces

    monkeypatch.setattr(reader, "_PIECE", LARGEST // 4)
    monkeypatch.setattr(reader, "_CHUNK", LARGEST)
    monkeypatch.setattr(reader.StoredTensor, "load", routing_only)
    for method in ("chunks", "pieces"):
        monkeypatch.setattr(reader.StoredTensor, method, watched(getattr(reader.StoredTensor, method)))
    WORK[name](place, tmp_path / "out")
    assert len(sizes) > 20
    assert max(sizes) <= LARGEST


IDS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))


def make(folder, rename, backbone="qwen2", **changes):
    """A dense checkpoint whose file gives its tensors other names."""
    tiny_dense(backbone, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    weights = {rename(name): value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits


@pytest.mark.parametrize(("backbone", "prefix"), [("bloom", "transformer."), ("llama", "model.")])
def test_expert_0_is_a_base_whose_names_lack_the_prefix(tmp_path, backbone, prefix):
    base = make(tmp_path / "base", lambda name: name.removeprefix(prefix), backbone)
    assert not any(name.startswith(prefix) for name in CheckpointReader(base).tensors)
    expand_checkpoint(base, tmp_path / "expanded", UNIFORM)
    export_dense(tmp_path / "expanded", tmp_path / "out", expert=0)
    found = compare_checkpoints(base, tmp_path / "out")
    assert found.same
    assert len(found.identical) == len(CheckpointReader(base).tensors)
    export_dense(tmp_path / "expanded", tmp_path / "same", expert=1)
    weights = load_file(tmp_path / "same" / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, tmp_path / "same" / "model.safetensors", metadata={"format": "pt"})
    assert compare_checkpoints(base, tmp_path / "same").changed == [next(iter(weights))]
