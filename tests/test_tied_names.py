"""A tied matrix is stored under either of its names, and a base's files may lack the base model's prefix."""

import pytest
import torch
from conftest import byte_tokenizer, tiny_dense
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_moe_expand import Plan, expand_checkpoint, graft_delta
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint.average import average_checkpoints
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.reader import CheckpointReader

PLAN = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"])
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


@pytest.mark.parametrize("backbone", ["qwen2", "llama"])
def test_a_tied_matrix_under_the_heads_name(tmp_path, backbone):
    def to_head(name):
        return "lm_head.weight" if name == "model.embed_tokens.weight" else name

    base = make(tmp_path / "base", to_head, backbone, tie_word_embeddings=True)
    assert "model.embed_tokens.weight" not in CheckpointReader(base).tensors
    expected = logits(base)
    expand_checkpoint(base, tmp_path / "expanded", PLAN)
    made = {
        "average": lambda out: average_checkpoints([tmp_path / "expanded", base], out),
        "graft": lambda out: graft_delta(tmp_path / "expanded", out, base, base),
        "depth": lambda out: expand_depth(base, out, 1),
        "expert": lambda out: export_dense(tmp_path / "expanded", out, expert=0),
    }
    torch.testing.assert_close(logits(tmp_path / "expanded"), expected)
    for name, make_it in made.items():
        make_it(tmp_path / name)
        torch.testing.assert_close(logits(tmp_path / name), expected, msg=name)
    assert compare_checkpoints(base, tmp_path / "expert").same


@pytest.mark.parametrize(("backbone", "prefix"), [("bloom", "transformer."), ("llama", "model.")])
def test_expert_0_is_a_base_whose_names_lack_the_prefix(tmp_path, backbone, prefix):
    base = make(tmp_path / "base", lambda name: name.removeprefix(prefix), backbone)
    assert not any(name.startswith(prefix) for name in CheckpointReader(base).tensors)
    expand_checkpoint(base, tmp_path / "expanded", PLAN)
    export_dense(tmp_path / "expanded", tmp_path / "out", expert=0)
    found = compare_checkpoints(base, tmp_path / "out")
    assert found.same
    assert len(found.identical) == len(CheckpointReader(base).tensors)
    export_dense(tmp_path / "expanded", tmp_path / "same", expert=1)
    weights = load_file(tmp_path / "same" / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, tmp_path / "same" / "model.safetensors", metadata={"format": "pt"})
    assert compare_checkpoints(base, tmp_path / "same").changed == [next(iter(weights))]
