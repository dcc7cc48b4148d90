"""The base's tensors inside an expanded model: those that moved are named, whatever moved them."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import invoke, load, save_dense
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from hf_moe_expand import Plan, expand_checkpoint, expand_model, grow_checkpoint, make_card
from hf_moe_expand.checkpoint.compare import BASE_CHECK, moved_tensors, recorded_verdict
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.peft import export_peft
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.checkpoint.stored import StoredModel
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.hub.published import published_files
from hf_moe_expand.inference.verbs_writing import _warn_of_moved
from hf_moe_expand.report.inspection import inspect_checkpoint

OLD = Path(__file__).resolve().parent / "checkpoints"
ADAPTERS = Plan("moe-lpr", [2] * 3, old=["en"], new=["el"], exclusive=True)
AS_IT_WAS = "All other tokens run the base model as it was."


@pytest.fixture(scope="module")
def model(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("model") / "model"
    expand_checkpoint(base, out, ADAPTERS, expert_kind="adapter")
    return out


def check(folder):
    return moved_tensors(StoredModel(folder))


def edited(model, out):
    """A copy whose embedding was changed by hand."""
    shutil.copytree(model, out, ignore=shutil.ignore_patterns(BASE_CHECK))
    network = load(model)
    with torch.no_grad():
        network.get_input_embeddings().weight.add_(0.5)
    network.save_pretrained(out)
    return out


def with_lora(model, out):
    lora = get_peft_model(load(model), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    lora.merge_and_unload().save_pretrained(out)


def plainly_trained(model, out):
    arguments = TrainingArguments(
        out / "run", max_steps=1, use_cpu=True, report_to="none", save_strategy="no", learning_rate=1e-2
    )
    rows = [{"input_ids": list(range(12)), "labels": list(range(12))}] * 4
    network = load(model)
    Trainer(network, arguments, train_dataset=rows).train()
    network.save_pretrained(out)


def test_an_untouched_base_is_as_it_was(base, model, tmp_path):
    assert check(model).checked
    assert not check(model).moved
    export_peft(model, tmp_path / "adapter")
    assert inspect_checkpoint(model).base_check == "as the base"
    assert AS_IT_WAS in str(make_card(model))
    assert BASE_CHECK not in published_files(model)
    expanded = expand_model(load(base), ADAPTERS, expert_kind="adapter")
    assert History.of(expanded.config).first.base_hashes == History.of(load(model).config).first.base_hashes
    grow_checkpoint(model, tmp_path / "grown", Plan("moe-lpr", [3] * 3, new=["hu"], exclusive=True, grows_from=[2] * 3))
    assert not (tmp_path / "grown" / BASE_CHECK).exists()
    assert check(tmp_path / "grown").words == "as the base"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (edited, "model.embed_tokens.weight"),
        (with_lora, "model.layers.0.self_attn.q_proj.weight"),
        (plainly_trained, "model.embed_tokens.weight"),
    ],
)
def test_tensors_that_moved_are_named(model, tmp_path, change, name, capsys):
    change(model, tmp_path / "changed")
    assert name in check(tmp_path / "changed").moved
    with pytest.raises(InputError, match=f"{name}.* moved since the expansion.*`export --language`"):
        export_peft(tmp_path / "changed", tmp_path / "out")
    card = str(make_card(tmp_path / "changed"))
    assert AS_IT_WAS not in card
    assert name in card
    capsys.readouterr()
    export_dense(tmp_path / "changed", tmp_path / "home", language="en")
    assert name in capsys.readouterr().out
    assert f"base inside         moved: {check(tmp_path / 'changed').names}" in invoke("inspect", tmp_path / "changed")


@pytest.mark.parametrize("tied", [True, False])
def test_a_float32_copy_of_a_bfloat16_base_has_not_moved(tmp_path, tied):
    base = save_dense(tmp_path / "base", dtype=torch.bfloat16, tie_word_embeddings=tied)
    plan = Plan("moe-lpr", [2] * 3, old=["en"], new=["el"], exclusive=True)
    expand_checkpoint(base, tmp_path / "model", plan)
    assert check(tmp_path / "model").words == "as the base"
    load(tmp_path / "model", dtype=torch.float32).save_pretrained(tmp_path / "wide")
    assert StoredModel(tmp_path / "wide")["model.embed_tokens.weight"].dtype == "F32"
    assert check(tmp_path / "wide").words == "as the base"
    moved = check(edited(tmp_path / "wide", tmp_path / "edited")).moved
    assert moved == ["model.embed_tokens.weight"]
    in_memory = expand_model(load(base, dtype=torch.bfloat16), plan).config
    assert History.of(in_memory).first.base_hashes == History.of(load(tmp_path / "model").config).first.base_hashes


def test_experts_that_train_leave_the_base(base, tmp_path):
    expand_checkpoint(base, tmp_path / "model", ADAPTERS)
    network = load(tmp_path / "model")
    with torch.no_grad():
        for ffn in network.expanded_ffns().values():
            for parameter in ffn.experts[1].parameters():
                parameter.add_(1)
    network.save_pretrained(tmp_path / "trained")
    assert check(tmp_path / "trained").words == "as the base"
    with torch.no_grad():
        network.expanded_ffns()[1].experts[0].up_proj.weight.add_(1)
    network.save_pretrained(tmp_path / "home")
    assert check(tmp_path / "home").moved == ["model.layers.1.mlp.up_proj.weight"]


def test_a_mixture_is_compared_in_its_fused_tensors(tmp_path):
    base = save_dense(tmp_path / "base", "qwen3_moe")
    plan = Plan("moe-lpr", [2] * 3, old=["en"], new=["el"])
    expand_checkpoint(base, tmp_path / "model", plan, expert_kind="added", expert_width=8)
    assert check(tmp_path / "model").words == "as the base"
    load(tmp_path / "model").save_pretrained(tmp_path / "again")
    assert check(tmp_path / "again").words == "as the base"
    in_memory = expand_model(load(base), plan, expert_kind="added", expert_width=8).config
    assert History.of(in_memory).first.base_hashes == History.of(load(tmp_path / "model").config).first.base_hashes


def test_a_verdict_holds_while_the_weights_stay(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    check(tmp_path / "model")
    assert recorded_verdict(tmp_path / "model").checked
    weights = tmp_path / "model" / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert recorded_verdict(tmp_path / "model").words == "unchecked"
    check(tmp_path / "model")
    (tmp_path / "model" / BASE_CHECK).write_text("[")
    assert inspect_checkpoint(tmp_path / "model").base_check == "unchecked"


def test_an_old_checkpoint_is_unchecked(tmp_path):
    shutil.copytree(OLD / "moe_lpr", tmp_path / "old")
    assert check(tmp_path / "old").words == "unchecked"
    assert not (tmp_path / "old" / BASE_CHECK).exists()


def test_chat_warns_where_the_base_inside_moved(model, tmp_path, capsys):
    moved = edited(model, tmp_path / "moved")
    _warn_of_moved(str(moved), None)
    assert "moved since" not in capsys.readouterr().err  # unchecked
    check(moved)
    _warn_of_moved(str(moved), None)
    assert "model.embed_tokens.weight moved since" in capsys.readouterr().err
