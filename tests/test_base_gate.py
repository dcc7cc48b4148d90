"""The gate of a dense base, fitted to a file before anything is expanded, and where it is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import invoke, refused, save_dense, write_texts
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_gates import ANCHORS, SETTINGS, TEXTS

from hf_moe_expand import Plan, expand_checkpoint, fit_gates
from hf_moe_expand.analysis.gating import fit_base_gate, gate_from_file
from hf_moe_expand.checkpoint.gate import Gate
from hf_moe_expand.checkpoint.stored import StoredModel, gate_home
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.modeling.language_gate import GateRule

NEW = ["el", "hu"]
PLAN = Plan("moe-lpr", [2, 2, 2], old=["en"], new=NEW)
pytestmark = pytest.mark.usefixtures("given_anchors_alone")


@pytest.fixture(scope="module")
def file(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("file") / "gate.safetensors"
    report = fit_base_gate(base, out, TEXTS, NEW, ANCHORS, SETTINGS)
    assert report.out == out
    return out


def the_gate(folder):
    stored = StoredModel(folder)
    rule = GateRule.of(stored.config)
    place = gate_home(stored.network, rule.layer)
    return Gate(rule, *(stored[f"{place}.{inner}"].load() for inner in ("language_gate.weight", "language_gate.bias")))


def test_it_is_the_gate_that_the_expanded_model_would_get(base, file, tmp_path):
    gate, report = gate_from_file(file, base, NEW)
    expand_checkpoint(base, tmp_path / "one", PLAN, gate=gate)
    expand_checkpoint(base, tmp_path / "plain", PLAN)
    later = fit_gates(tmp_path / "plain", tmp_path / "two", TEXTS, ANCHORS, SETTINGS)
    one, two = the_gate(tmp_path / "one"), the_gate(tmp_path / "two")
    assert replace(one.rule, home=0) == replace(two.rule, home=0)
    assert one.rule.layer == gate.rule.layer == 0
    assert one.rule.languages == [["en", *sorted(ANCHORS)], NEW]
    torch.testing.assert_close(one.weight_Rh, two.weight_Rh, rtol=1e-3, atol=1e-4)
    # The file keeps the texts' logits in half precision, from which the bias follows in steps of 0.02.
    torch.testing.assert_close(one.bias_R, two.bias_R, rtol=0, atol=0.05)
    assert one.rule.home == pytest.approx(two.rule.home, abs=3)
    assert one.rule.begin is two.rule.begin is None
    assert report.named == later.gates.named
    assert report.unseen == later.gates.unseen
    assert report.new == pytest.approx(later.gates.new, abs=0.05)
    assert report.old == later.gates.old
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["expansions"][-1]["language_gate"] == config["parts"]["gate"]
    assert config["classifier_layers"] == []


def test_one_file_serves_any_choice_of_its_languages(base, file):
    """Rows of a language that is not new go home; fewer new languages pass less of the anchors."""
    both, _ = gate_from_file(file, base, NEW)
    one, of_one = gate_from_file(file, base, ["hu"])
    assert one.rule.languages[1] == ["hu"]
    assert set(one.rule.languages[0]) == {"en", "el", *ANCHORS}
    rows = [one.rule.languages[0].index("el"), len(both.rule.languages[0])]
    assert torch.equal(one.weight_Rh[rows[0]], both.weight_Rh[rows[1]])
    assert {*of_one.new} == {"hu"}
    assert {*of_one.old} == {"en", "el"}
    refused(gate_from_file, file, base, ["tr"], says="has no row for tr: fit the gate with text")


def changed_base(base, place, name):
    """The base with one value of one tensor changed."""
    folder = shutil.copytree(base, place)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_another_base_is_refused_but_not_for_layers_that_the_gate_does_not_read(base, file, tmp_path):
    layer = gate_from_file(file, base, NEW)[0].rule.layer
    said = "was fitted on another base than .*, or on other weights: fit the gate of this base"
    refused(gate_from_file, file, save_dense(tmp_path / "other", seed=5), NEW, says=said)
    for number, name in enumerate(("embed_tokens.weight", f"layers.{layer}.self_attn.q_proj.weight")):
        refused(gate_from_file, file, changed_base(base, tmp_path / f"{number}", f"model.{name}"), NEW, says=said)
    above = changed_base(base, tmp_path / "above", f"model.layers.{layer + 1}.mlp.up_proj.weight")
    assert gate_from_file(file, above, NEW)[0].rule.layer == layer


def test_experts_may_stand_below_the_gate_and_need_not_stand_beside_it(base, tmp_path):
    settings = SETTINGS.model_copy(update={"layer": 1})
    fit_base_gate(base, tmp_path / "gate.safetensors", TEXTS, NEW, ANCHORS, settings)
    gate, _ = gate_from_file(tmp_path / "gate.safetensors", base, NEW)
    assert gate.rule.layer == 1
    for number, counts in enumerate(([2, 2, 2], [1, 1, 2], [2, 1, 1])):
        out = tmp_path / f"{number}"
        expand_checkpoint(base, out, Plan("moe-lpr", counts, old=["en"], new=NEW), gate=gate)
        assert the_gate(out).rule == gate.rule
    beyond = SETTINGS.model_copy(update={"layer": 3})
    said = r"layer is 3, but the model has the layers 0\.\.2"
    refused(fit_base_gate, base, tmp_path / "no", TEXTS, NEW, ANCHORS, beyond, overwrite=True, says=said)


def test_a_file_that_is_none_of_a_gate_is_refused(base, file, tmp_path):
    refused(gate_from_file, tmp_path / "absent", base, NEW, says="absent: no such file")
    refused(gate_from_file, base / "model.safetensors", base, NEW, says="is no file of a gate")
    (tmp_path / "half").write_bytes(file.read_bytes()[:5000])
    refused(gate_from_file, tmp_path / "half", base, NEW, says="is no file of a gate")
    with safe_open(str(file), "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    tensors.pop("bias")
    save_file(tensors, tmp_path / "less", metadata=metadata)
    refused(gate_from_file, tmp_path / "less", base, NEW, says="is no file of a gate")
    refused(fit_base_gate, base, file, TEXTS, NEW, ANCHORS, SETTINGS, says="exists already")


def test_the_command_line(base, tmp_path):
    for code, text in {**TEXTS, **ANCHORS}.items():
        write_texts(tmp_path / f"{code}.jsonl", text)
    data = [part for code in TEXTS for part in ("--data", f"{code}={tmp_path / code}.jsonl")]
    anchors = [part for code in ANCHORS for part in ("--anchors", f"{code}={tmp_path / code}.jsonl")]
    options = ["--tokens", 400, "--anchor-tokens", 150, "--unseen-share", 0.02, "--new", "el,hu"]
    file = tmp_path / "gate.safetensors"
    with pytest.raises(InputError, match="--max-shard-size: a gate is one file"):
        invoke("gates", base, *data, *anchors, *options, "--out", file, "--max-shard-size", "1MB")
    said = invoke("gates", base, *data, *anchors, *options, "--out", file)
    assert "gate               in layer 0" in said
    PLAN.save(tmp_path / "plan.json")
    said = invoke("expand", base, tmp_path / "one", "--plan", tmp_path / "plan.json", "--gate", file)
    assert "unseen languages" in said
    shown = invoke("inspect", tmp_path / "one")
    assert "9 languages stay home" in shown
    assert "new: el, hu" in shown
    refused(invoke, "gates", base, *data, says="Give OUT, the folder of an expanded model's gate, or --out FILE")
    refused(invoke, "gates", tmp_path / "one", tmp_path / "no", *data, "--new", "el", says="--new is for a dense base")
