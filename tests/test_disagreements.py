"""Bases whose configuration and files say different things: what transformers makes of them, or one refusal."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, refused, save_dense, tiny_dense
from encoder_decoders import PLAN as PAIR_PLAN
from encoder_decoders import batch, tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_moe_expand import Plan, expand_checkpoint, expand_model, graft_delta, grow_checkpoint
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint.average import average_checkpoints
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.source import load_config
from hf_moe_expand.checkpoint.stored import StoredModel
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.stages.distributed import save_whole

PLAN = Plan("moe-lpr", [2, 1, 2], old=["en"], new=["el"])
BRANCHES = Plan("dmoe", [2, 2, 2], groups=[["en"], ["el"]])
IDS = torch.arange(40).view(2, 20)
TIED = ("qwen2", "gpt2", "opt")


def edit(folder: Path, tensors=None, **fields) -> Path:
    """Changes fields of config.json (None takes one out) and tensors of a checkpoint in one file."""
    config = json.loads((folder / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        state = load_file(folder / "model.safetensors")
        save_file(tensors(state) or state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_head(folder: Path, backbone: str, same: bool) -> Path:
    """A checkpoint whose configuration ties the head, which the file holds nevertheless."""
    model = tiny_dense(backbone, tie_word_embeddings=True)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (name,) = [key for key in model.all_tied_weights_keys if key.endswith("weight")]
    value = model.get_input_embeddings().weight.detach().clone()
    return edit(folder, lambda state: {**state, name: value if same else value.flip(0).contiguous()})


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


@pytest.mark.parametrize("same", [True, False], ids=["the same head", "another head"])
@pytest.mark.parametrize("backbone", TIED)
def test_a_head_beside_a_tie_is_what_transformers_makes_of_it(tmp_path, backbone, same):
    base = with_head(tmp_path / "base", backbone, same)
    wanted = logits(base)
    report = expand_checkpoint(base, tmp_path / "out", PLAN)
    assert report.left_out == []
    torch.testing.assert_close(logits(tmp_path / "out"), wanted, rtol=0, atol=1e-5)
    stored = StoredModel(tmp_path / "out")
    assert stored.config.tie_word_embeddings == same
    dense = AutoModelForCausalLM.from_pretrained(base)
    in_memory = expand_model(dense, PLAN)
    with torch.no_grad():
        torch.testing.assert_close(in_memory(IDS).logits, wanted, rtol=0, atol=1e-5)
    in_memory.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(tmp_path / "saved"), wanted, rtol=0, atol=1e-5)
    # What a stage writes, from the base and from an expanded checkpoint.
    for start in (base, tmp_path / "out"):
        model = AutoModelForCausalLM.from_pretrained(start)
        save_whole(model.state_dict(), StoredModel(start).config, tmp_path / "trained", start)
        assert compare_checkpoints(start, tmp_path / "trained").same
        torch.testing.assert_close(logits(tmp_path / "trained"), wanted, rtol=0, atol=1e-5)
        shutil.rmtree(tmp_path / "trained")


def test_every_verb_keeps_a_head_beside_a_tie(tmp_path):
    base = with_head(tmp_path / "base", "qwen2", same=False)
    wanted = logits(base)
    expand_checkpoint(base, tmp_path / "out", PLAN)
    more = Plan("moe-lpr", [3, 1, 3], old=["en", "el"], new=["tr"], grows_from=[2, 1, 2])
    made = {
        "average": lambda out: average_checkpoints([tmp_path / "out", base], out),
        "graft": lambda out: graft_delta(tmp_path / "out", out, base, base),
        "grown": lambda out: grow_checkpoint(tmp_path / "out", out, more),
        "depth": lambda out: expand_depth(base, out, 1),
        "expert": lambda out: export_dense(tmp_path / "out", out, expert=0),
        "branches": lambda out: expand_branches([base, base], out, BRANCHES),
    }
    for name, make in made.items():
        make(tmp_path / name)
        torch.testing.assert_close(logits(tmp_path / name), wanted, rtol=0, atol=1e-5, msg=name)
    assert not load_config(tmp_path / "expert").tie_word_embeddings


@pytest.mark.parametrize("shape", ["mt5", "m2m_100", "marian"])
def test_an_encoder_decoders_own_head_is_kept_too(tmp_path, shape):
    changes = {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": 300} if shape == "marian" else {}
    model = tiny(shape, **changes)
    model.save_pretrained(tmp_path / "base")
    head = model.get_input_embeddings().weight.detach().flip(0).contiguous()
    edit(tmp_path / "base", lambda state: {**state, "lm_head.weight": head})

    def outputs(folder: Path) -> torch.Tensor:
        with torch.no_grad():
            return AutoModelForSeq2SeqLM.from_pretrained(folder)(**batch()).logits

    wanted = outputs(tmp_path / "base")
    expand_checkpoint(tmp_path / "base", tmp_path / "out", PAIR_PLAN)
    torch.testing.assert_close(outputs(tmp_path / "out"), wanted, rtol=0, atol=1e-4)
    with torch.no_grad():
        in_memory = expand_model(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base"), PAIR_PLAN)
        torch.testing.assert_close(in_memory(**batch()).logits, wanted, rtol=0, atol=1e-4)
    trained = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    save_whole(trained.state_dict(), StoredModel(tmp_path / "out").config, tmp_path / "trained", tmp_path / "out")
    assert compare_checkpoints(tmp_path / "out", tmp_path / "trained").same
    torch.testing.assert_close(outputs(tmp_path / "trained"), wanted, rtol=0, atol=1e-4)


def test_tensors_that_the_model_does_not_have_are_said(tmp_path):
    base = save_dense(tmp_path / "base", "llama")
    more = {"mtp.fc.weight": torch.zeros(4, 4), "model.layers.3.mlp.up_proj.weight": torch.zeros(4, 4)}
    edit(base, lambda state: {**state, **more})
    assert expand_checkpoint(base, tmp_path / "out", PLAN).left_out == sorted(more)


def test_an_index_may_name_what_no_file_holds_unless_the_model_has_it(tmp_path):
    tiny_dense("llama").save_pretrained(tmp_path / "base", max_shard_size="20KB")
    index = tmp_path / "base" / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["mtp.fc.weight"] = fields["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(fields))
    assert expand_checkpoint(tmp_path / "base", tmp_path / "out", PLAN).left_out == ["mtp.fc.weight"]
    file = tmp_path / "base" / fields["weight_map"]["lm_head.weight"]
    state = {name: value for name, value in load_file(file).items() if name != "lm_head.weight"}
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"tensors are missing from the checkpoint: lm_head\.weight"):
        expand_checkpoint(tmp_path / "base", tmp_path / "no", PLAN)


@pytest.mark.parametrize(
    ("fields", "message"),
    {
        "rows": ({"vocab_size": 300}, r"embed_tokens.weight' has shape \[257, 32\], .* asks for \[300, 32\]"),
        "a layer too many": (
            {"num_hidden_layers": 4, "layer_types": None}, r"tensors are missing .*model\.layers\.3\.",
        ),
        "an untied head that is not there": (
            {"tie_word_embeddings": False}, "lm_head.weight. If its head is the embedding, set tie_word_embeddings",
        ),
        "a width": ({"intermediate_size": 40}, r"has shape \[48, 32\], but the configuration asks for \[40, 32\]"),
    }.values(),
)  # fmt: skip
def test_what_the_files_lack_is_refused_before_anything_is_written(tmp_path, fields, message):
    base = edit(save_dense(tmp_path / "base", "qwen2", tie_word_embeddings=True), **fields)
    plan = Plan("moe-lpr", [2] * fields.get("num_hidden_layers", 3), old=["en"], new=["el"])
    refused(expand_checkpoint, base, tmp_path / "out", plan, says=message)
    assert not (tmp_path / "out").exists()
