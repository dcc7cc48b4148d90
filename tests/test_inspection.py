"""What `inspect` and `diff` say of checkpoints: every line, of facts that are written down here."""

import json
import shutil

import pytest
import torch
from conftest import BACKBONE_NAMES, save_dense, tiny_dense
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_moe_expand import Plan, cli, expand_checkpoint
from hf_moe_expand.checkpoint import reader
from hf_moe_expand.checkpoint.compare import compare_checkpoints, part_of
from hf_moe_expand.checkpoint.facts import JoinedPack
from hf_moe_expand.checkpoint.records import ExpansionRecord, StageRecord
from hf_moe_expand.modeling import decoder_ffns
from hf_moe_expand.modeling.language_gate import GateRule
from hf_moe_expand.report.inspection import Inspection

PLAIN = {
    "backbone": "qwen2", "top_k": 2, "layers": [(2, False, 5), (1, False, 3), (3, True, 9)], "total": 3000,
    "active": 2500, "base": 1000, "trainable": {"review": 30},
}  # fmt: skip
FIRST = ExpansionRecord(method="moe-lpr", old_languages=["en"], new_languages=["el"], base_model="tiny")


def test_a_plain_model():
    review = StageRecord(stage="review", steps=1200, seed=3, tokens={"en": 9000}, tokens_seen=4000)
    expansion = FIRST.model_copy(update={"stages": [StageRecord(stage="graft"), review]})
    assert Inspection(**PLAIN, expansions=[expansion]).lines() == [
        "backbone            qwen2, 3 layers",
        "experts per layer   2 1 3 (total 6, top-2)",
        "classifier layers   2",
        "parameters          3,000 (3.00 x the base model's 1,000)",
        "active for a token  2,500",
        "trained in review           30 (1.00 %)",
        "expansion 1         moe-lpr on tiny: old en; new el",
        "  graft",
        "  review, 1,200 steps, seed 3, 4,000 tokens seen of 9,000 at hand",
    ]


def test_everything_that_there_can_be():
    shares = {"el": {"end": 0.914}, "hu": {"end": 1.0}}
    before = StageRecord(stage="gates", settings={"shares": {"el": {"end": 0.1}}, "home": {}})
    fitted = StageRecord(stage="gates", settings={"shares": shares, "home": {"en": 0.004}})
    parts = {"method": "own", "stages": [StageRecord(stage="review")]}
    expansions = [
        ExpansionRecord(old_languages=["en", "hu"], new_languages=["el"], pack="greek", **parts),
        ExpansionRecord(old_languages=["und", "el", "tr"], new_languages=["hu"], pack="magyar", **parts),
        ExpansionRecord(
            method="own", old_languages=["en", "el"], new_languages=["tr"],
            stages=[StageRecord(stage="review"), before, fitted],
        ),
    ]  # fmt: skip
    facts = PLAIN | {"layers": [(2, True, 5), (1, False, 3), (3, True, 9)]}
    model = Inspection(
        **facts, expansions=expansions, experts="updates of rank 8", mixtures=[1, 2], leftovers=["A folder is left."],
        encoder_layers=1,
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
        "expansion 3         own on None: old en, el; new tr",
        "  review",
        "  gates",
        "  gates",
        "left over           A folder is left.",
    ]


runner = CliRunner()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """An expanded checkpoint, and that with a router, an expert and a norm changed, one tensor gone and one new."""
    root = tmp_path_factory.mktemp("pair")
    save_dense(root / "base")
    expand_checkpoint(root / "base", root / "a", Plan("layer-moe", [3, 1, 2], [2]))
    shutil.copytree(root / "a", root / "b")
    weights = load_file(root / "b" / "model.safetensors")
    for name in ("layers.0.mlp.router", "layers.2.mlp.experts.1.up_proj", "norm"):
        weights[f"model.{name}.weight"].view(-1)[-1] += 1
    del weights["model.layers.2.mlp.classifier.weight"]
    weights["extra.weight"] = torch.ones(2)
    save_file(weights, root / "b" / "model.safetensors", metadata={"format": "pt"})
    return root


def diff(*arguments):
    return runner.invoke(cli.app, ["diff", *map(str, arguments)])


def test_what_changed_by_part_and_by_name(pair):
    done = diff(pair / "a", pair / "b", "--json")
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert found["changed"] == [
        "model.layers.0.mlp.router.weight",
        "model.layers.2.mlp.experts.1.up_proj.weight",
        "model.norm.weight",
    ]
    assert found["removed"] == ["model.layers.2.mlp.classifier.weight"]
    assert found["added"] == ["extra.weight"]
    parts = found["by_part"]
    assert parts["router"] == {"identical": 1, "changed": 1, "removed": 0, "added": 0}
    assert parts["other experts"] == {"identical": 8, "changed": 1, "removed": 0, "added": 0}
    assert parts["expert 0"] == {"identical": 6, "changed": 0, "removed": 0, "added": 0}
    assert parts["classifier"] == {"identical": 0, "changed": 0, "removed": 1, "added": 0}
    assert parts["extra"] == {"identical": 0, "changed": 0, "removed": 0, "added": 1}
    assert sum(sum(counts.values()) for counts in parts.values()) == len(found["identical"]) + 5
    short, long = diff(pair / "a", pair / "b"), diff(pair / "a", pair / "b", "--all")
    assert short.exit_code == long.exit_code == 1
    assert "router" in short.output
    assert "model.norm.weight" not in short.output
    said = set(long.output.splitlines())
    expected = {"changed  model.norm.weight", "removed  model.layers.2.mlp.classifier.weight", "added  extra.weight"}
    assert expected <= said


def test_tensors_of_different_types_are_identical_where_their_values_are(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_PIECE", 100)
    weights = load_file(pair / "a" / "model.safetensors")
    weights = {name: value.bfloat16() for name, value in weights.items()}
    norm, other = "model.norm.weight", "model.layers.0.mlp.router.weight"
    weights[norm][1], weights[norm][2] = float("nan"), float("inf")
    wide = {name: value.float() for name, value in weights.items()}
    wide[other] = wide[other].clone()
    wide[other].view(-1)[-1] += 1e-7
    for name, tensors in (("bf16", weights), ("fp32", wide)):
        shutil.copytree(pair / "a", tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    found = compare_checkpoints(tmp_path / "bf16", tmp_path / "fp32")
    assert found.changed == [other]
    assert norm in found.identical


@pytest.mark.parametrize("backbone", BACKBONE_NAMES)
def test_the_part_of_a_tensor_is_a_module_of_its_layer_or_one_beside_the_layers(backbone):
    model = tiny_dense(backbone)
    layers = {ffn.place.rpartition(".")[0] for ffn in decoder_ffns(model)}
    for name, _ in model.named_parameters():
        layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if layer is None:
            assert part_of(name) == name.split(".")[-2]
        else:
            assert part_of(name) in dict(model.get_submodule(layer).named_children()), name
