"""Checkpoint surgery reads in pieces: no step holds a whole tensor, but for routers and classifiers."""

import pytest
import torch
from conftest import ADDED, save_dense

from hf_moe_expand import Plan, expand_checkpoint, graft_delta, grow_checkpoint
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint import reader
from hf_moe_expand.checkpoint.average import average_checkpoints
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.graft import merge_delta

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
    read = reader.StoredTensor.load

    def routing_only(self):
        # A mixture's tensor is put together, for its hash, of its experts'.
        whole = ("router", "classifier", *([".mlp.experts."] if "mixture" in name else []))
        assert any(part in self.name for part in whole), f"{self.name} is read as a whole"
        return read(self)

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
