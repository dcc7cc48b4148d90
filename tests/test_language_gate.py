"""The language gate: its rule, the evidence of tokens and texts against a slow loop; the gate of a dense base."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import invoke, refused, save_dense, tiny_dense, write_texts
from gated_models import CODES, TWO, clear_texts, gated_model, padded, slow_class, slow_sums, tokens
from peft import PromptTuningConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_gates import ANCHORS, SETTINGS, TEXTS

from hf_moe_expand import DMoEConfig, LayerMoEConfig, LayerMoEForCausalLM, Plan, expand_checkpoint, fit_gates
from hf_moe_expand.analysis.gating import fit_base_gate, gate_from_file
from hf_moe_expand.checkpoint.gate import Gate
from hf_moe_expand.checkpoint.stored import StoredModel, gate_home
from hf_moe_expand.modeling.language_gate import (
    GateRule,
    classes_of_sums,
    counted_tokens,
    last_sums,
    text_ends,
    token_evidence,
)
from hf_moe_expand.modeling.part_gate import Answers
from hf_moe_expand.modeling.routing_control import RowClasses

RULE = {"layer": 1, "languages": [["en"], ["el"]], "bound": 2.0, "window": 5}
# Kinds of FFN calls, learned positions, scaled embeddings, a window of attention; convolutions, and a recurrence.
BACKBONES = ("bloom", "gemma3_text", "gpt2", "gpt_neox", "lfm2", "opt", "qwen2", "qwen3_5_text")


def test_evidence_is_the_bounded_log_odds_of_classes_in_whole_numbers():
    logits = torch.tensor([[1.0, 2.0, -30.0, 0.5, 0.5]])
    found = token_evidence(logits, [2, 1, 2], 4.0, has_template=False)
    home = math.log(math.exp(1) + math.exp(2))
    raw = [-30 - home, 0.5 + math.log(2) - home]
    assert found.tolist() == [[round(1024 * 4 * math.tanh(value / 4)) for value in raw]]
    assert found.dtype == torch.int32
    shares = logits.double().exp() / logits.double().exp().sum()
    weighed = [[round(1024 * (1 - float(shares[0, 0])) * 4 * math.tanh(value / 4)) for value in raw]]
    assert token_evidence(logits, [2, 1, 2], 4.0, has_template=True).tolist() == weighed
    logits = torch.tensor([[30.0, 0.0, 0.0], [-30.0, 9.0, 0.0], [-30.0, 0.0, 9.0]])
    found = token_evidence(logits, [2, 1], 4.0, has_template=True)
    assert found[0].item() == 0
    assert found[1].item() < -3000 < 3000 < found[2].item()


@pytest.mark.parametrize("window", [1, 3, 128])
def test_sums_are_those_of_a_texts_last_tokens(window):
    evidence, lengths = tokens(5, 12, 2) - 125, [12, 7, 2, 1, 0]
    counted = [own[max(0, n - window) : n].tolist() for own, n in zip(evidence, lengths, strict=True)]
    expected = [[sum(one[number] for one in row) for number in range(2)] for row in counted]
    assert last_sums(evidence.int(), torch.tensor(lengths), window).tolist() == expected


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


@pytest.mark.parametrize("begin", [None, 7])
def test_the_ends_of_texts_stand_on_the_left(begin):
    texts = [[1, 2, 3], [7, 5], list(range(10, 150)), [7], [4, 7, 6]]
    ids = torch.tensor([[0, 0, *(token for text in texts for token in text)]])
    numbers = torch.tensor([[-1, -1, *(number for number, text in enumerate(texts) for _ in text)]])
    rows, lengths = text_ends(ids, numbers, None if begin is None else torch.tensor(begin))
    own = [text[1:] if begin in text[:1] else text for text in texts]
    assert lengths.tolist() == [min(128, len(text)) for text in own]
    front = [] if begin is None else [begin]
    for row, text in zip(rows.tolist(), own, strict=True):
        assert row[: len(front) + min(128, len(text))] == front + text[-128:]
        assert not any(row[len(front) + min(128, len(text)) :])


@torch.no_grad()
@pytest.mark.parametrize("begin", [None, 251])
@pytest.mark.parametrize("backbone", BACKBONES)
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
    config = LayerMoEConfig.from_dense(tiny_dense("qwen2").config, num_experts_per_layer=[1, 2, 2])
    with pytest.raises(AttributeError, match="judge"):
        LayerMoEForCausalLM(config).eval().judge(tokens(1, 4))
    refused(gated_model().train().judge, tokens(1, 4), says=r"call model.eval\(\) first", raises=ValueError)


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ({"layer": 3}, "layer is 3, but the layers are 0 to 2"),
        ({"window": 0}, "window 0"),
        ({"window": 129}, "window 129.*1 to 128"),
        ({"bound": math.inf}, "bound inf"),
        ({"begin": "<s>"}, "begin is '<s>': must be a number"),
        ({"home": 1}, "home 1 and .*home at most 0"),
        ({"languages": [["en"]]}, "must name the languages of class 0 and of each"),
        ({"languages": [["en"], ["el", "en"]]}, "each language once"),
        ({"languages": [["en"], ["el"], ["hu"]]}, "has 3 classes, but the model has 2"),
        ({"decay": 0.9}, "must be an object with layer, languages, bound, window, begin, home"),
    ],
)
def test_a_wrong_rule_is_refused(gate, said):
    dense = tiny_dense("qwen2").config
    given = {"num_experts_per_layer": [1, 2, 2], "language_gate": RULE | gate}
    refused(LayerMoEConfig.from_dense, dense, says=said, raises=ValueError, **given)


def test_a_gate_beside_classifiers_and_in_a_dmoe_is_refused():
    for config, fields, said in (
        (LayerMoEConfig, {"classifier_layers": [1]}, "leave classifier_layers out"),
        (DMoEConfig, {"language_groups": [["en"], ["el"]]}, "a DMoE keeps no language of its base"),
    ):
        given = {"num_experts_per_layer": [1, 2, 2], "language_gate": RULE, **fields}
        refused(config.from_dense, tiny_dense("qwen2").config, says=said, raises=ValueError, **given)


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
    refused(gate_from_file, tmp_path / "absent", base, NEW, says="absent: is no file of a gate .No such file")
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
    refused(fit_base_gate, base, file / "x", TEXTS, NEW, ANCHORS, SETTINGS, says="x: cannot be written there")


def test_the_command_line(base, tmp_path):
    for code, text in {**TEXTS, **ANCHORS}.items():
        write_texts(tmp_path / f"{code}.jsonl", text)
    data = [part for code in TEXTS for part in ("--data", f"{code}={tmp_path / code}.jsonl")]
    anchors = [part for code in ANCHORS for part in ("--anchors", f"{code}={tmp_path / code}.jsonl")]
    options = ["--tokens", 400, "--anchor-tokens", 150, "--unseen-share", 0.02, "--new", "el,hu"]
    file = tmp_path / "gate.safetensors"
    command = ("gates", base, *data, *anchors, *options, "--out", file)
    refused(invoke, *command, "--max-shard-size", "1MB", says="--max-shard-size: a gate is one file")
    said = invoke(*command)
    assert "gate               in layer 0" in said
    PLAN.save(tmp_path / "plan.json")
    said = invoke("expand", base, tmp_path / "one", "--plan", tmp_path / "plan.json", "--gate", file)
    assert "unseen languages" in said
    shown = invoke("inspect", tmp_path / "one")
    assert "9 languages stay home" in shown
    assert "new: el, hu" in shown
    refused(invoke, "gates", base, *data, says="Give OUT, the folder of an expanded model's gate, or --out FILE")
    refused(invoke, "gates", tmp_path / "one", tmp_path / "no", *data, "--new", "el", says="--new is for a dense base")


@pytest.mark.parametrize(
    ("texts", "new", "said"),
    [
        (TEXTS, ["el", "tr"], "no text in tr"),
        (TEXTS, [], "name the languages of --data that will be new"),
        ({**TEXTS, "hu": ["őű"]}, NEW, "hu has .* tokens"),
    ],
)
def test_text_that_cannot_make_a_gate_is_refused_before_anything_is_written(base, tmp_path, texts, new, said):
    refused(fit_base_gate, base, tmp_path / "gate.safetensors", texts, new, ANCHORS, SETTINGS, says=said)
    assert not list(tmp_path.iterdir())


def test_virtual_tokens_of_prompt_tuning_are_no_text():
    model = gated_model(expansions=TWO)
    texts = clear_texts(model, 2, 9, 5)
    ids, mask = padded(texts)
    tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    codes = [CODES[number] for number in model.judge(ids, mask)]
    with torch.no_grad():
        assert torch.equal(
            tuned(ids, attention_mask=mask).logits, tuned(ids, attention_mask=mask, languages=codes).logits
        )


@pytest.mark.parametrize(("before", "nats", "after"), [(0, 4, 0), (0, 6, 1), (1, 4, 1), (1, -3, 1), (1, -41, 0)])
def test_an_answer_leaves_home_above_a_number_and_goes_home_below_another(before, nats, after):
    rule = GateRule(0, [["en"], ["el"]], leave=5.0)
    sums = torch.tensor([[nats * 1024]])
    answers = Answers(rule, lambda _: sums, RowClasses.of([before], "cpu"), [False], start=2, moves=False)
    assert answers.rows(torch.zeros(1, 17, dtype=torch.long)) is None  # 15 tokens of its own
    assert answers.rows(torch.zeros(1, 18, dtype=torch.long)).numbers == (after,)
