"""What `inspect` and `diff` say of checkpoints, every line; the base's tensors that moved are named."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import COMMON_BACKBONES, invoke, load, refused, save_dense, tiny_dense
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_moe_expand import Plan, cli, expand_checkpoint, expand_model, grow_checkpoint, make_card
from hf_moe_expand.checkpoint import reader
from hf_moe_expand.checkpoint.compare import BASE_CHECK, compare_checkpoints, moved_tensors, part_of, recorded_verdict
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.facts import JoinedPack
from hf_moe_expand.checkpoint.peft import export_peft
from hf_moe_expand.checkpoint.records import ExpansionRecord, History, StageRecord
from hf_moe_expand.checkpoint.stored import StoredModel
from hf_moe_expand.hub.published import published_files
from hf_moe_expand.inference.verbs_writing import _warn_of_moved
from hf_moe_expand.modeling import decoder_ffns
from hf_moe_expand.modeling.language_gate import GateRule
from hf_moe_expand.report.inspection import Inspection, inspect_checkpoint

PLAIN = {
    "backbone": "qwen2", "top_k": 2, "layers": [(2, False, 5), (1, False, 3), (3, True, 9)], "total": 3000,
    "active": 2500, "base": 1000, "trainable": {"review": 30},
}  # fmt: skip


def test_everything_that_there_can_be():
    shares = {"el": {"end": 0.914}, "hu": {"end": 1.0}}
    before = StageRecord(stage="gates", settings={"shares": {"el": {"end": 0.1}}, "home": {}})
    fitted = StageRecord(stage="gates", settings={"shares": shares, "home": {"en": 0.004}})
    parts = {"method": "own", "stages": [StageRecord(stage="review")]}
    review = StageRecord(stage="review", steps=1200, seed=3, tokens={"en": 9000}, tokens_seen=4000)
    expansions = [
        ExpansionRecord(old_languages=["en", "hu"], new_languages=["el"], pack="greek", **parts),
        ExpansionRecord(old_languages=["und", "el", "tr"], new_languages=["hu"], pack="magyar", **parts),
        ExpansionRecord(
            method="own", old_languages=["en", "el"], new_languages=["tr"], base_model="tiny",
            stages=[review, before, fitted],
        ),
    ]  # fmt: skip
    facts = PLAIN | {"layers": [(2, True, 5), (1, False, 3), (3, True, 9)]}
    model = Inspection(
        **facts, expansions=expansions, experts="updates of rank 8", mixtures=[1, 2], encoder_layers=1,
        gate=GateRule(1, [["en", "zxx", "de"], ["el"], ["hu"]]), exclusive=True,
        packs=[JoinedPack("greek", ["el"], 2, "FFNs"), JoinedPack("magyar", ["und"], 1, "FFNs")],
    )  # fmt: skip
    assert model.lines() == [
        "backbone            qwen2, 1 encoder and 2 decoder layers",
        "experts per layer   encoder 2, decoder 1 3 (total 6, exclusive)",
        "new experts         updates of rank 8",
        "pack 1              greek: el; FFNs, 2 expansions",
        "pack 2              magyar: und (undetermined); FFNs",
        "mixtures before     layers decoder.0, decoder.1; not expanded: decoder.0",
        "language gate       in layer 1: 2 languages stay home, as does what it does not know; new: el, hu",
        "  to new experts    el 91 %, hu 100 %, en 0 % of the texts",
        "parameters          3,000 (3.00 x the base model's 1,000)",
        "active for a token  2,500",
        "trained in review           30 (1.00 %)",
        "expansion 1         pack greek: own on None: old en; new el",
        "  review",
        "expansion 2         pack magyar: own on None: old und (undetermined), tr; new hu",
        "  review",
        "expansion 3         own on tiny: old en, el; new tr",
        "  review, 1,200 steps, seed 3, 4,000 tokens seen of 9,000 at hand",
        "  gates",
        "  gates",
    ]


CHANGED = ("layers.0.mlp.router", "layers.2.mlp.experts.1.up_proj", "norm")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """An expanded checkpoint, and that with a router, an expert and a norm changed, one tensor gone and one new."""
    root = tmp_path_factory.mktemp("pair")
    save_dense(root / "base")
    expand_checkpoint(root / "base", root / "a", Plan("layer-moe", [3, 1, 2], [2]))
    shutil.copytree(root / "a", root / "b")
    weights = load_file(root / "b" / "model.safetensors")
    for name in CHANGED:
        weights[f"model.{name}.weight"].view(-1)[-1] += 1
    del weights["model.layers.2.mlp.classifier.weight"]
    weights["extra.weight"] = torch.ones(2)
    save_file(weights, root / "b" / "model.safetensors", metadata={"format": "pt"})
    return root


def diff(*arguments):
    return CliRunner().invoke(cli.app, ["diff", *map(str, arguments)])


def test_what_changed_by_part_and_by_name(pair):
    changed = [f"model.{name}.weight" for name in CHANGED]
    done = diff(pair / "a", pair / "b", "--json")
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert found["changed"] == changed
    assert (found["removed"], found["added"]) == (["model.layers.2.mlp.classifier.weight"], ["extra.weight"])
    parts = {name: [*counts.values()] for name, counts in found["by_part"].items()}
    assert [*found["by_part"]["router"]] == ["identical", "changed", "removed", "added"]
    assert (parts["router"], parts["other experts"], parts["expert 0"]) == ([1, 1, 0, 0], [8, 1, 0, 0], [6, 0, 0, 0])
    assert (parts["classifier"], parts["extra"]) == ([0, 0, 1, 0], [0, 0, 0, 1])
    assert sum(map(sum, parts.values())) == len(found["identical"]) + 5
    short, long = diff(pair / "a", pair / "b"), diff(pair / "a", pair / "b", "--all")
    assert short.exit_code == long.exit_code == 1
    assert "router" in short.output
    assert "model.norm.weight" not in short.output
    expected = {"changed  model.norm.weight", "removed  model.layers.2.mlp.classifier.weight", "added  extra.weight"}
    assert expected <= set(long.output.splitlines())
    equal = diff(pair / "a", pair / "a", "--all")
    assert equal.exit_code == 0
    assert "changed  " not in equal.output.replace("│", "")
    assert compare_checkpoints(pair / "a", pair / "a").same


def test_tensors_of_different_types_are_identical_where_their_values_are(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_PIECE", 100)
    weights = {name: value.bfloat16() for name, value in load_file(pair / "a" / "model.safetensors").items()}
    norm, other = "model.norm.weight", "model.layers.0.mlp.router.weight"
    weights[norm][1], weights[norm][2] = float("nan"), float("inf")
    wide = {name: value.float().clone() for name, value in weights.items()}
    wide[other].view(-1)[-1] += 1e-7
    for name, tensors in (("bf16", weights), ("fp32", wide)):
        shutil.copytree(pair / "a", tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    found = compare_checkpoints(tmp_path / "bf16", tmp_path / "fp32")
    assert found.changed == [other]
    assert norm in found.identical


@pytest.mark.parametrize("backbone", [*COMMON_BACKBONES, "falcon", "gpt2", "mpt", "opt"])
def test_the_part_of_a_tensor_is_a_module_of_its_layer_or_one_beside_the_layers(backbone):
    model = tiny_dense(backbone)
    layers = {ffn.place.rpartition(".")[0] for ffn in decoder_ffns(model)}
    for name, _ in model.named_parameters():
        layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if layer is None:
            assert part_of(name) == name.split(".")[-2]
        else:
            assert part_of(name) in dict(model.get_submodule(layer).named_children()), name


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


def edited(model, out, name="model.embed_tokens.weight"):
    """A copy one of whose tensors was changed by hand."""
    network = load(model)
    network.get_parameter(name).data.add_(0.5)
    shutil.copytree(model, out, ignore=shutil.ignore_patterns(BASE_CHECK))
    network.save_pretrained(out)
    return out


def hashes(model):
    """What the model, or the one in a folder, knows of its base's tensors."""
    return History.of((load(model) if isinstance(model, Path) else model).config).first.base_hashes


def test_an_untouched_base_is_as_it_was(base, model, tmp_path):
    assert check(model).checked
    assert not check(model).moved
    export_peft(model, tmp_path / "adapter")
    assert inspect_checkpoint(model).base_check == "as the base"
    assert AS_IT_WAS in str(make_card(model))
    assert BASE_CHECK not in published_files(model)
    assert hashes(expand_model(load(base), ADAPTERS, expert_kind="adapter")) == hashes(model)
    grow_checkpoint(model, tmp_path / "grown", Plan("moe-lpr", [3] * 3, new=["hu"], exclusive=True, grows_from=[2] * 3))
    assert not (tmp_path / "grown" / BASE_CHECK).exists()
    assert check(tmp_path / "grown").words == "as the base"


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_tensors_that_moved_are_named(model, tmp_path, name, capsys):
    changed = edited(model, tmp_path / "changed", name)
    _warn_of_moved(str(changed), None)
    assert "moved since" not in capsys.readouterr().err  # unchecked
    assert check(changed).moved == [name]
    _warn_of_moved(str(changed), None)  # as chat does
    assert f"{name} moved since" in capsys.readouterr().err
    refused(export_peft, changed, tmp_path / "out", says=f"{name}.* moved since the expansion")
    card = str(make_card(changed))
    assert AS_IT_WAS not in card
    assert name in card
    export_dense(changed, tmp_path / "home", language="en")
    assert name in capsys.readouterr().out
    assert f"base inside         moved: {check(changed).names}" in invoke("inspect", changed)


@pytest.mark.parametrize("tied", [True, False])
def test_a_float32_copy_of_a_bfloat16_base_has_not_moved(tmp_path, tied):
    base = save_dense(tmp_path / "base", dtype=torch.bfloat16, tie_word_embeddings=tied)
    expand_checkpoint(base, tmp_path / "model", ADAPTERS)
    assert check(tmp_path / "model").words == "as the base"
    load(tmp_path / "model", dtype=torch.float32).save_pretrained(tmp_path / "wide")
    assert StoredModel(tmp_path / "wide")["model.embed_tokens.weight"].dtype == "F32"
    assert check(tmp_path / "wide").words == "as the base"
    assert check(edited(tmp_path / "wide", tmp_path / "edited")).moved == ["model.embed_tokens.weight"]
    assert hashes(expand_model(load(base, dtype=torch.bfloat16), ADAPTERS)) == hashes(tmp_path / "model")


def test_experts_that_train_leave_the_base(base, tmp_path):
    expand_checkpoint(base, tmp_path / "model", ADAPTERS)
    for expert, says in ((1, "as the base"), (0, "moved: model.layers.1.mlp.up_proj.weight")):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        assert check(edited(tmp_path / "model", tmp_path / f"{expert}", name)).words == says


def test_a_mixture_is_compared_in_its_fused_tensors(tmp_path):
    base, added = save_dense(tmp_path / "base", "qwen3_moe"), {"expert_kind": "added", "expert_width": 8}
    plan = Plan("moe-lpr", [2] * 3, old=["en"], new=["el"])
    expand_checkpoint(base, tmp_path / "model", plan, **added)
    load(tmp_path / "model").save_pretrained(tmp_path / "again")
    assert {check(tmp_path / name).words for name in ("model", "again")} == {"as the base"}
    assert hashes(expand_model(load(base), plan, **added)) == hashes(tmp_path / "model")


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
    old = shutil.copytree(OLD / "moe_lpr", tmp_path / "old")
    assert check(old).words == "unchecked"
    assert not (old / BASE_CHECK).exists()
