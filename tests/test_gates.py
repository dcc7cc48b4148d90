"""The fit of the language gate of an expanded model: with anchors, kept to a promise, written, grown, refused."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import byte_tokenizer, invoke, run_fresh, save_dense, write_texts
from gated_models import decisions
from safetensors.torch import load_file

from hf_moe_expand import (
    LayerMoEForCausalLM,
    Plan,
    expand_checkpoint,
    fit_gates,
    grow_checkpoint,
)
from hf_moe_expand.analysis.gate_fit import PENALTY, _marked, candidates, softmax_regression
from hf_moe_expand.analysis.gate_text import LEAST, Example, gate_examples
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.cli.common import texts_of
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.anchors import shipped_anchors, shipped_sentences
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.report.inspection import inspect_checkpoint

ALPHABETS = ("abcdefg", "hijklmn", "opqrstu", "vwxyzAB", "CDEFGHI", "JKLMNOP", "QRSTUVW", "XYZ0123")


def words(letters, count=400, seed=0):
    """Lines of words of these letters."""
    draw = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(letters) + 1, (count * 4,), generator=draw).tolist()
    text = "".join((letters + " ")[i] for i in picked)
    return [text[start : start + 60] for start in range(0, len(text), 60)]


TEXTS = {"en": words("aeiou nt"), "el": words("αβγδεζη"), "hu": words("őűáéíóú")}
ANCHORS = {f"q{chr(97 + n)}{chr(97 + n)}": words(letters, 60, n) for n, letters in enumerate(ALPHABETS)}
SETTINGS = GateSettings(tokens=400, anchor_tokens=150, unseen_share=0.02)


@pytest.fixture(scope="module")
def expanded(tmp_path_factory):
    home = tmp_path_factory.mktemp("gates")
    save_dense(home / "base")
    expand_checkpoint(home / "base", home / "one", Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el", "hu"]))
    model = LayerMoEForCausalLM.from_pretrained(home / "one")
    with torch.no_grad():  # experts that differ
        for ffn in model.expanded_ffns().values():
            for parameter in ffn.experts[1].parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(home / "one")
    return home / "one"


@pytest.fixture(scope="module")
def gated(expanded, tmp_path_factory):
    out = tmp_path_factory.mktemp("gated") / "out"
    return fit_gates(expanded, out, TEXTS, ANCHORS, SETTINGS)


def test_the_rows_are_the_minimum_of_the_penalised_cross_entropy():
    torch.manual_seed(0)
    x = torch.randn(60, 5) * torch.tensor([1.0, 3.0, 0.2, 1.0, 1.0]) + 2
    row = torch.arange(60) % 3
    share = torch.rand(60).softmax(0)
    weight, bias = softmax_regression(x, row, share, 3)
    mean = (share[:, None] * x).sum(0)
    scale = (share[:, None] * (x - mean).square()).sum(0).sqrt()
    w = (weight * scale).requires_grad_()
    b = (bias + weight @ mean).requires_grad_()
    loss = (F.cross_entropy((x - mean) / scale @ w.T + b, row, reduction="none") * share).sum()
    loss = loss + PENALTY / 2 * w.square().sum()
    for gradient in torch.autograd.grad(loss, (w, b)):
        assert gradient.abs().max() < 2e-3


def test_all_languages_are_shown_in_the_same_forms():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<|u|>{{ messages[0]['content'] }}<|a|>"
    found = gate_examples({"en": TEXTS["en"]}, tokenizer, 600, 128)["en"]
    own = [tokenizer.decode(example.ids[example.start : example.end]) for example in found]
    assert all("<|" not in text for text in own)
    inside = [tokenizer.decode(example.ids).startswith("<|u|>") for example in found]
    assert 0.3 < sum(inside) / len(inside) < 0.7
    short = sum(len(text) for text in own if len(text) <= 60)
    assert 0.3 < short / sum(map(len, own)) < 0.7
    assert max(map(len, own)) > 100
    with pytest.raises(InputError, match=rf"en has \d+ tokens.*at least {LEAST}"):
        gate_examples({"en": ["short"]}, tokenizer, 600, 128)


def classes_of(model, ids):
    """The gate's classes of a text's tokens."""
    with torch.no_grad(), decisions() as found:
        model(ids)
    return found[0][0]


def share_taken(model, tokenizer, text):
    """The share of a text's tokens that new experts take."""
    ids = torch.tensor([tokenizer(" ".join(text)).input_ids[:60]])
    return classes_of(model, ids).bool().float().mean().item()


def test_new_text_is_recognised_and_a_language_that_nobody_named_goes_home(gated):
    model, tokenizer = load_for_inference(gated.out)
    assert share_taken(model, tokenizer, TEXTS["el"]) > 0.7
    assert share_taken(model, tokenizer, TEXTS["hu"]) > 0.7
    assert share_taken(model, tokenizer, TEXTS["en"]) < 0.05
    assert share_taken(model, tokenizer, ANCHORS["qcc"]) < 0.05
    assert share_taken(model, tokenizer, words("4567890!?", 60)) < 0.1  # in no text that the gates saw


def test_the_report_says_where_tokens_go(gated):
    report = gated.gates
    assert set(report.unseen) == set(ANCHORS)
    assert set(report.new) == {"el", "hu"}
    assert set(report.new["el"]) == {0, 8, 32, "end"}
    over = {code for code, share in report.unseen.items() if share > SETTINGS.unseen_share}
    assert over == set(report.named)
    assert len(over) <= 1  # a tenth of the anchors, but one at least
    assert report.home["en"] < 0.05
    assert report.passing == (report.new["el"][0] + report.new["hu"][0]) / 2 > 0.7
    said = "\n".join(gated.lines())
    assert f"in layer {report.layer}, for it and all later layers" in said
    assert "unseen languages" in said
    assert "old languages" in said
    assert "of the first 8:" in said
    assert "of its texts, judged by their end" in said


def test_a_near_relative_of_a_new_language_is_named(expanded, tmp_path):
    """An anchor with the letters of a new language is taken for it when the gate has not seen it."""
    anchors = {**ANCHORS, "qzz": words("αβγδεζη", 60, 9)}
    report = fit_gates(expanded, tmp_path / "out", TEXTS, anchors, SETTINGS).gates
    assert report.named == {"qzz": "el"}
    assert report.unseen["qzz"] > SETTINGS.unseen_share
    assert any(line.startswith("qzz") and "is taken for el" in line for line in report.lines())


def test_a_chat_begins_at_home_and_is_answered_in_its_language(expanded, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(expanded, folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<|u|>Be kind to all. {{ messages[0]['content'] }}<|a|>Answer: "
    tokenizer.save_pretrained(folder)
    made = fit_gates(folder, tmp_path / "out", TEXTS, ANCHORS, SETTINGS)
    model, tokenizer = load_for_inference(made.out)
    assert model.config.language_gate["languages"][0][0] == "zxx"
    assert "9 languages stay home" in "\n".join(inspect_checkpoint(made.out).lines())

    def new(text):
        "The share of tokens that new experts take: before a message, and after it."
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=True, return_tensors="pt")
        taken = classes_of(model, ids["input_ids"]).bool().float()
        return taken[:22].mean(), taken[-13:].mean()

    before, after = new("αβγδεζη βαγ δεζ ηζε αβγδ " * 2)
    assert before == 0 < 0.5 < after
    before, after = new("aei noun tea ion ate nut in a tin")
    assert before == after == 0


def test_a_stricter_promise_lets_less_pass(expanded, gated, tmp_path):
    strict = GateSettings(tokens=400, anchor_tokens=150, unseen_share=0.001)
    found = fit_gates(expanded, tmp_path / "out", TEXTS, ANCHORS, strict).gates
    assert sum(found.unseen.values()) <= sum(gated.gates.unseen.values())
    assert found.new["el"][0] <= gated.gates.new["el"][0] + 1e-6


def test_all_but_the_gate_is_byte_for_byte_the_same(expanded, gated):
    before, after = (load_file(folder / "model.safetensors") for folder in (expanded, gated.out))
    added = {name for name in after if name not in before}
    layer = gated.gates.layer
    assert added == {f"model.layers.{layer}.mlp.language_gate.{kind}" for kind in ("weight", "bias")}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    config = json.loads((gated.out / "config.json").read_text())
    languages = [["en", *sorted(ANCHORS)], ["el", "hu"]]
    assert config["language_gate"] == {"layer": layer, "languages": languages, "bound": 4.0, "window": 64}
    assert config["classifier_layers"] == []
    stage = config["expansions"][-1]["stages"][-1]
    assert stage["stage"] == "gates"
    assert stage["settings"]["unseen_share"] == 0.02
    assert stage["settings"]["layer"] == layer
    assert config["expansions"][-1]["language_gate"] == config["language_gate"]


def test_it_loads_without_the_package_and_saves_the_same_bytes(gated, tmp_path):
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()\n"
        "print(model(torch.arange(60, 90)[None]).logits.double().sum().item())\nmodel.save_pretrained(sys.argv[2])\n"
    )
    said = float(run_fresh(code, str(gated.out), str(tmp_path / "again")).split()[0])
    model = LayerMoEForCausalLM.from_pretrained(gated.out).eval()
    with torch.no_grad():
        assert said == pytest.approx(model(torch.arange(60, 90)[None]).logits.double().sum().item(), rel=1e-6)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (gated.out / file).read_bytes()


def test_token_by_token_is_one_pass_and_anchors_may_be_named(gated):
    model, tokenizer = load_for_inference(gated.out)
    ids = torch.tensor([tokenizer("αβγ δεζ ηαβ γδ").input_ids])
    with torch.no_grad():
        whole = model(ids).logits
        cache, rows = None, []
        for token in ids[0]:
            step = model(token.view(1, 1), past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            rows.append(step.logits[0, 0])
        torch.testing.assert_close(torch.stack(rows), whole[0], rtol=1e-4, atol=1e-4)
        with model.use_expert(0):
            base = model(ids).logits
        assert torch.equal(model(ids, languages="qaa").logits, base)


def test_growth_leaves_the_gate_out_and_says_so(gated, tmp_path):
    plan = Plan("moe-lpr", [3, 3, 3], old=["en", "el", "hu"], new=["tr"], grows_from=[2, 2, 2])
    plan.save(tmp_path / "plan.json")
    said = invoke("grow", gated.out, tmp_path / "grown", "--plan", tmp_path / "plan.json")
    assert "fit it again" in said
    config = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert not config["classifier_layers"]
    assert config.get("language_gate") is None


def test_numbers_of_what_is_not_there_are_refused(gated):
    model, _ = load_for_inference(gated.out)
    for number in (-1, 2, "1", None):
        with pytest.raises(ValueError, match=f"Expansion {number!r} was asked for, but the model has 0"):
            model.use_expansion(number)
    for number in (-1, "1", None, [0]):
        with pytest.raises(ValueError, match=r"Expert .* was asked for: give a number from 0"):
            model.use_expert(number)


def test_each_expansion_has_a_class(gated, tmp_path):
    plan = Plan("moe-lpr", [3, 3, 3], old=["en", "el", "hu"], new=["tr"], grows_from=[2, 2, 2])
    grow_checkpoint(gated.out, tmp_path / "grown", plan)
    texts = {**TEXTS, "tr": words("çşğıöü")}
    with pytest.raises(InputError, match="no text in tr"):
        fit_gates(tmp_path / "grown", tmp_path / "no", TEXTS, ANCHORS, SETTINGS)
    again = fit_gates(tmp_path / "grown", tmp_path / "again", texts, ANCHORS, SETTINGS)
    model, tokenizer = load_for_inference(again.out)
    assert [len(codes) for codes in model.config.language_gate["languages"]] == [1 + len(ANCHORS), 2, 1]
    for code, number in (("tr", 2), ("el", 1), ("hu", 1)):
        ids = torch.tensor([tokenizer(" ".join(texts[code])).input_ids[:60]])
        assert (classes_of(model, ids)[20:] == number).float().mean() > 0.7
    refitted = fit_gates(
        again.out, tmp_path / "twice", texts, ANCHORS, SETTINGS
    )  # in the place of the gate that it had
    assert (refitted.out / "model.safetensors").read_bytes() == (again.out / "model.safetensors").read_bytes()


def test_the_layer_may_be_chosen(expanded, tmp_path):
    made = fit_gates(expanded, tmp_path / "out", TEXTS, ANCHORS, SETTINGS.model_copy(update={"layer": 2}))
    assert made.gates.layer == 2
    assert "model.layers.2.mlp.language_gate.bias" in load_file(made.out / "model.safetensors")
    with pytest.raises(
        InputError, match=r"layer is 7, but the gate stands in a layer that has, or will have, experts: 0\.\.2"
    ):
        fit_gates(expanded, tmp_path / "no", TEXTS, ANCHORS, SETTINGS.model_copy(update={"layer": 7}))


def test_layers_of_the_first_third_are_tried():
    assert candidates(range(3), 3) == [0]
    assert candidates(range(24), 24) == [5, 6, 7]
    assert candidates(range(6, 24), 24) == [6, 7]
    assert candidates(range(12, 24), 24) == [12]  # no expert is in the first third


@pytest.mark.parametrize(
    ("texts", "anchors", "said"),
    [
        ({"en": TEXTS["en"], "el": TEXTS["el"]}, ANCHORS, "no text in hu"),
        ({**TEXTS, "xx": TEXTS["en"]}, ANCHORS, "xx: not a language of the model"),
        (TEXTS, {**ANCHORS, "hu": TEXTS["hu"]}, "anchors: hu is a new language"),
        (TEXTS, {"qaa": ANCHORS["qaa"]}, r"1 language\(s\) were given"),
        ({**TEXTS, "hu": ["őűá"]}, ANCHORS, "hu has .* tokens"),
    ],
)
def test_text_that_cannot_make_gates_is_refused_before_anything_is_written(expanded, texts, anchors, said, tmp_path):
    with pytest.raises(InputError, match=said):
        fit_gates(expanded, tmp_path / "out", texts, anchors, SETTINGS)
    assert not list(tmp_path.iterdir())


def test_a_promise_that_no_layer_keeps_is_refused_with_the_best_ones_figures(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_moe_expand.analysis.gating.shipped_sentences", lambda code: [])
    save_dense(tmp_path / "base")
    plan = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"])
    expand_checkpoint(tmp_path / "base", tmp_path / "one", plan)  # its experts are equal, and so is the text
    settings = GateSettings(tokens=400, anchor_tokens=400, unseen_share=0.001)
    same = {"en": TEXTS["en"], "el": TEXTS["en"]}
    with pytest.raises(InputError, match=r"none of the layers 0 keeps unseen_share 0\.001 .* in the best, layer 0, \d"):
        fit_gates(tmp_path / "one", tmp_path / "out", same, dict.fromkeys(ANCHORS, TEXTS["en"]), settings)
    assert not (tmp_path / "out").exists()


def test_other_models_are_refused(tmp_path):
    save_dense(tmp_path / "base")
    expand_checkpoint(tmp_path / "base", tmp_path / "dmoe", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))
    with pytest.raises(InputError, match="is a DMoE"):
        fit_gates(tmp_path / "dmoe", tmp_path / "out", TEXTS, ANCHORS)


def test_the_packages_own_sentences_are_the_default_and_stand_on_their_languages_side():
    assert "hu" not in shipped_anchors(leave_out=["hu", "en"])
    assert shipped_sentences("hu") == shipped_anchors()["hu"]
    assert shipped_sentences("nb") == shipped_anchors()["no"]
    assert shipped_sentences("kk") == shipped_sentences("und") == []


def test_the_command_line(expanded, tmp_path):
    for code, text in TEXTS.items():
        write_texts(tmp_path / f"{code}.jsonl", text)
    for code, text in ANCHORS.items():
        write_texts(tmp_path / f"{code}.jsonl", text)
    data = [part for code in TEXTS for part in ("--data", f"{code}={tmp_path / code}.jsonl")]
    anchors = [part for code in ANCHORS for part in ("--anchors", f"{code}={tmp_path / code}.jsonl")]
    options = ["--tokens", 400, "--anchor-tokens", 150, "--unseen-share", 0.02]
    said = invoke("gates", expanded, tmp_path / "out", *data, *anchors, *options)
    assert "unseen languages" in said
    assert "el " in said
    shown = invoke("inspect", tmp_path / "out")
    assert "9 languages stay home" in shown
    assert "new: el, hu" in shown
    assert "to new experts" in shown


def test_the_command_reads_files_in_a_recipes_order(tmp_path):
    """A gate reads a file's first tokens: shuffled, so that they are not those of the file's first source."""
    file = write_texts(tmp_path / "el.jsonl", [f"{number}" for number in range(50)])
    recipe = LanguageText("el", str(file)).load().shuffle(seed=3)["text"]
    assert texts_of([f"el={file}"], seed=3)["el"][:] == recipe[:] != texts_of([f"el={file}"])["el"][:]


def test_what_a_template_puts_around_a_message_is_of_no_language():
    chat, line = Example([1, 2, 3, 4, 5], 2, 4), Example([6, 7, 8], 1, 3)
    states = torch.arange(8.0).unsqueeze(1)
    assert _marked([chat, line], states).flatten().tolist() == [2, 3, 6, 7]
    assert _marked([chat, line], states, of_template=True).flatten().tolist() == [0, 1, 4]
