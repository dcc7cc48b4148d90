"""The language gate: its rule, the evidence of tokens and texts against a slow loop; the gate of a dense base."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import invoke, refused, tiny_config, write_texts
from gated_models import TWO, clear_texts, gated_model, padded, slow_class, slow_sums, tokens
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_gates import ANCHORS, SETTINGS, TEXTS

from hf_moe_expand import DMoEConfig, LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_checkpoint, fit_gates
from hf_moe_expand.analysis.gating import fit_base_gate, gate_from_file
from hf_moe_expand.checkpoint.gate import Gate
from hf_moe_expand.checkpoint.stored import StoredModel, gate_home
from hf_moe_expand.modeling.language_gate import (
    UNIT,
    GateRule,
    classes_of_sums,
    counted_tokens,
    token_evidence,
)
from hf_moe_expand.modeling.part_gate import Answers
from hf_moe_expand.modeling.routing_control import RowClasses

RULE = {"layer": 1, "languages": [["en"], ["el"]], "bound": 2.0, "window": 5}
# With learned positions, a window of attention, convolutions, a recurrence; and the first token that a gate may have.
BACKBONES = (("gpt2", 251), ("gemma3_text", None), ("lfm2", 251), ("qwen3_5_text", None), ("bloom", 251))


def test_evidence_is_the_bounded_log_odds_of_classes_in_whole_numbers():
    logits = torch.tensor([[1.0, 2.0, -30.0, 0.5, 0.5]])
    home = math.log(math.exp(1) + math.exp(2))
    of_template = 1 / sum(map(math.exp, [0.0, 1.0, -31.0, -0.5, -0.5]))  # how likely the first row is
    for has_template, weight in ((False, 1.0), (True, 1 - of_template)):
        found = token_evidence(logits, [2, 1, 2], 4.0, has_template=has_template)
        odds = [-30 - home, 0.5 + math.log(2) - home]
        assert found.tolist() == [[round(1024 * weight * 4 * math.tanh(value / 4)) for value in odds]]
        assert found.dtype == torch.int32


def test_a_class_is_the_largest_sum_or_the_one_before_between_the_thresholds():
    sums = torch.tensor([[0, 0], [-1, -5], [7, 7], [7, 8], [0, 3], [1, 1], [-3000, -2049], [-3000, -2048]])
    assert classes_of_sums(sums).tolist() == [0, 0, 1, 2, 2, 1, 0, 0]
    before = torch.tensor([2, 1, 2, 1, 1, 0, 2, 2])
    assert classes_of_sums(sums, before, -2.0).tolist() == [2, 1, 1, 2, 2, 1, 0, 2]
    # What went home leaves it above a number alone, and what left it does not care.
    before, nats = torch.tensor([0, 0, 2, 0]), torch.tensor([[1024, 0], [1025, 0], [7, 0], [0, 2048]])
    assert classes_of_sums(nats, before, -2.0, 1.0).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("row", "counted"),
    [
        ([9, 9, 5, 6, 9, 7], "001111"),  # 9 is padding at either end alone
        ([5, 6, 7, 9], "1110"),
        ([9, 5, 6, 0, 0, 0], "011000"),  # a run at the end
        ([5, 6, 0], "111"),  # of one token: none
        ([0, 0, 5, 6], "1111"),  # at the beginning it is none
        ([9, 9, 9], "111"),  # never the whole row
        ([0, 0, 0], "111"),
        ([9, 9, 4], "001"),
        ([9, 5, 5], "011"),  # nor all that is left of it
    ],
)
def test_without_a_mask_padding_is_told_by_ids(row, counted):
    found = counted_tokens(torch.tensor([row, [1, 2, 3, 4, 5, 6][: len(row)]]), None, 9).int().tolist()
    assert ["".join(map(str, own)) for own in found] == [counted, "1" * len(row)]
    mask = torch.tensor([[0] * 2 + [1] * len(row)])  # what it says of a longer text
    assert counted_tokens(torch.tensor([row]), mask, 9).all()


@torch.no_grad()
@pytest.mark.parametrize(("backbone", "begin"), BACKBONES)
def test_a_text_has_one_class_however_it_is_given(backbone, begin):
    """Padded on either side, with a mask and without, in another order, as embeddings, behind virtual vectors."""
    model = gated_model(backbone, TWO, rule={"begin": begin})
    texts = clear_texts(model, 3, 9, 21, 4, 1)
    expected = torch.tensor([slow_class(slow_sums(model, text)) for text in texts])
    assert expected.bincount().tolist() == [3, 3, 3]
    embed = model.get_input_embeddings()
    assert [model.judge(torch.tensor([text])).item() for text in texts] == expected.tolist()
    for side in ("left", "right"):
        for pad in (256, 0) if side == "right" else (256,):
            ids, mask = padded(texts, side, pad)
            assert torch.equal(model.judge(ids), expected)
            assert torch.equal(model.judge(torch.where(mask.bool(), ids, tokens(*ids.shape)), mask), expected)
            assert torch.equal(model.judge(ids.flip(0), mask.flip(0)), expected.flip(0))
        embedded = embed(ids)
        assert torch.equal(model.judge(attention_mask=mask, inputs_embeds=embedded), expected)
        virtual, ones = torch.randn(9, 5, embedded.shape[-1]), torch.ones(9, 5, dtype=torch.long)
        given = {"attention_mask": torch.cat([ones, mask], 1), "inputs_embeds": torch.cat([virtual, embedded], 1)}
        assert torch.equal(model.judge(**given), expected)
    if begin is not None:
        ids, mask = padded([[begin, *text] for text in texts])
        assert torch.equal(model.judge(ids, mask), expected)
        assert torch.equal(model.judge(attention_mask=mask, inputs_embeds=embed(ids)), expected)


def test_a_text_is_its_last_128_tokens_alone():
    model = gated_model(expansions=TWO, window=64, rule={"begin": 251})
    ids = tokens(6, 200)
    sums = model._sums(ids)
    for row, text in enumerate(ids.tolist()):
        assert sums[row].tolist() == pytest.approx([1024 * nats for nats in slow_sums(model, text)], abs=10)
    other = torch.cat([tokens(6, 72, seed=9), ids[:, 72:]], 1)
    assert torch.equal(model._sums(other), sums)
    assert torch.equal(model._sums(ids[:, 72:]), sums)
    assert not torch.equal(model._sums(ids[:, 73:]), sums)  # also what is older than the window is read
    hidden = torch.cat([ids, tokens(6, 30, seed=8)], 1), torch.ones(6, 230).masked_fill(torch.arange(230) >= 200, 0)
    assert torch.equal(model._sums(*hidden), sums)


def test_rows_without_text_stay_home():
    model = gated_model(rule={"begin": 251})
    (text,) = (text for text in clear_texts(model, 1, 6) if slow_class(slow_sums(model, text)))
    ids, mask = padded([[], text, [251], []])
    assert model.judge(ids, mask).tolist() == [0, 1, 0, 0]
    assert model.judge(ids[:1], mask[:1]).tolist() == [0]
    assert model.judge(tokens(2, 0)).tolist() == [0, 0]


def test_without_a_gate_and_in_training_nothing_is_judged():
    config = LayerMoEConfig.from_dense(tiny_config("qwen2"), num_experts_per_layer=[1, 2, 2])
    assert not hasattr(LayerMoEForCausalLM(config), "judge")
    refused(gated_model().train().judge, tokens(1, 4), says=r"call model.eval\(\) first", raises=ValueError)


def test_a_wrong_rule_is_refused():
    for said, rule, *more in (
        ("layer is 3, .*but the layers are 0 to 2", {"layer": 3}),
        ("window 0", {"window": 0}),
        ("window 129.*1 to 128", {"window": 129}),
        ("bound inf", {"bound": math.inf}),
        ("begin '<s>'.*begin an id", {"begin": "<s>"}),
        ("home 1 and .*home at most 0", {"home": 1}),
        ("each class has some", {"languages": [["en"]]}),
        ("each language once", {"languages": [["en"], ["el", "en"]]}),
        ("has 3 classes, but the model has 2", {"languages": [["en"], ["el"], ["hu"]]}),
        ("leave classifier_layers out", {}, {"classifier_layers": [1]}),
        ("a DMoE keeps no language of its base", {}, {"language_groups": [["en"], ["el"]]}),
    ):
        given = {"num_experts_per_layer": [1, 2, 2], "language_gate": RULE | rule, **(more[0] if more else {})}
        kind = DMoEConfig if "language_groups" in given else LayerMoEConfig
        refused(kind.from_dense, tiny_config("qwen2"), says=said, raises=ValueError, **given)


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
    assert (report.named, report.unseen, report.old) == (later.gates.named, later.gates.unseen, later.gates.old)
    assert report.new == pytest.approx(later.gates.new, abs=0.05)
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["expansions"][-1]["language_gate"] == config["parts"]["gate"]


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


def test_another_base_is_refused_but_not_for_layers_that_the_gate_does_not_read(base, file, tmp_path):
    """Each differs in one value of one tensor."""
    layer = gate_from_file(file, base, NEW)[0].rule.layer
    said = "was fitted on another base than .*, or on other weights: fit the gate of this base"
    for name in ("embed_tokens", f"layers.{layer}.self_attn.q_proj", f"layers.{layer + 1}.mlp.up_proj"):
        folder = shutil.copytree(base, tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        tensors[f"model.{name}.weight"].view(-1)[0] += 1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if "up_proj" in name:
            assert gate_from_file(file, folder, NEW)[0].rule.layer == layer
        else:
            refused(gate_from_file, file, folder, NEW, says=said)


def test_a_file_that_is_none_of_a_gate_and_text_that_makes_none_are_refused(base, file, tmp_path):
    (tmp_path / "half").write_bytes(file.read_bytes()[:5000])
    with safe_open(str(file), "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    tensors.pop("bias")
    save_file(tensors, tmp_path / "less", metadata=metadata)
    for none in (tmp_path / "absent", base / "model.safetensors", tmp_path / "half", tmp_path / "less"):
        refused(gate_from_file, none, base, NEW, says="is no file of a gate")
    for out, texts, new, said in (
        (file, TEXTS, NEW, "exists already"),
        (file / "x", TEXTS, NEW, "x: cannot be written there"),
        (tmp_path / "no", TEXTS, ["el", "tr"], "no text in tr"),
        (tmp_path / "no", TEXTS, [], "name the languages of --data that will be new"),
        (tmp_path / "no", {**TEXTS, "hu": ["őű"]}, NEW, "hu has .* tokens"),
    ):
        refused(fit_base_gate, base, out, texts, new, ANCHORS, SETTINGS, says=said)
    assert not (tmp_path / "no").exists()


def test_the_command_line(base, tmp_path):
    for code, text in {**TEXTS, **ANCHORS}.items():
        write_texts(tmp_path / f"{code}.jsonl", text)
    PLAN.save(tmp_path / "plan.json")
    data = [part for code in TEXTS for part in ("--data", f"{code}={tmp_path / code}.jsonl")]
    anchors = [part for code in ANCHORS for part in ("--anchors", f"{code}={tmp_path / code}.jsonl")]
    options = ["--tokens", 400, "--anchor-tokens", 150, "--unseen-share", 0.02, "--new", "el,hu"]
    command = ("gates", base, *data, *anchors, *options, "--out", tmp_path / "gate.safetensors")
    refused(invoke, *command, "--max-shard-size", "1MB", says="--max-shard-size has no effect beside --out")
    assert "gate               in layer 0" in invoke(*command)
    plan = ("--plan", tmp_path / "plan.json", "--gate", tmp_path / "gate.safetensors")
    assert "unseen languages" in invoke("expand", base, tmp_path / "one", *plan)
    assert "9 languages stay home, as does what it does not know; new: el, hu" in invoke("inspect", tmp_path / "one")
    refused(invoke, "gates", base, *data, says="Give OUT, the folder of an expanded model's gate, or --out FILE")
    says = "--new has no effect beside OUT"
    refused(invoke, "gates", tmp_path / "one", tmp_path / "no", *data, "--new", "el", says=says)


@pytest.mark.parametrize(("before", "nats", "after"), [(0, 4, 0), (0, 6, 1), (1, 4, 1), (1, -3, 1), (1, -41, 0)])
def test_an_answer_leaves_home_above_a_number_and_goes_home_below_another(before, nats, after):
    rule = GateRule(0, [["en"], ["el"]], leave=5.0)
    sums = torch.tensor([[nats * 1024]])
    answers = Answers(rule, lambda _: sums, RowClasses.of([before], "cpu"), [False], start=2, moves=False)
    assert answers.rows(torch.zeros(1, 17, dtype=torch.long)) is None  # 15 tokens of its own
    assert answers.rows(torch.zeros(1, 18, dtype=torch.long)).numbers == (after,)


def test_an_answer_keeps_the_class_of_its_last_mark():
    marks = {16: 100, **dict.fromkeys((32, 64, 128, 192), -1), 256: -50, 320: 1}  # nats: new, kept, home, as before
    rule = GateRule(0, [["en"], ["el"]], leave=30.0)

    def judge(answers: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[UNIT * marks[answers.shape[1]]]])

    answers = Answers(rule, judge, RowClasses.of([0], "cpu"), [False], start=2, moves=False)
    found = {n: rows.numbers for n in range(330) if (rows := answers.rows(torch.arange(2 + n)[None])) is not None}
    assert found == {16: (1,), 32: (1,), 64: (1,), 128: (1,), 192: (1,), 256: (0,), 320: (0,)}
