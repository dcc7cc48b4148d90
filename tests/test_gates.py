"""The fit of the language gate of an expanded model: with anchors, kept to a promise, written, grown, refused."""

import json
import math
import re
import shutil

import pytest
import torch
from conftest import byte_tokenizer, invoke, move, refused, write_texts
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing

from hf_moe_expand import Plan, expand_checkpoint, fit_gates
from hf_moe_expand.analysis import gate_fit, gating
from hf_moe_expand.analysis.gate_fit import FittedGate, Scored, Texts
from hf_moe_expand.analysis.gate_text import LEAST, gate_examples
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.inference.models import load_for_inference
from hf_moe_expand.modeling.language_gate import token_evidence
from hf_moe_expand.report.inspection import inspect_checkpoint

TEMPLATE = "<|u|>Be kind to all. {{ messages[0]['content'] }}<|a|>Answer: "
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
pytestmark = pytest.mark.usefixtures("given_anchors_alone")


@pytest.fixture(scope="module")
def expanded(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("gates") / "one"
    expand_checkpoint(base, out, Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el", "hu"]))
    return move(out)


@pytest.fixture(scope="module")
def gated(expanded, tmp_path_factory):
    out = tmp_path_factory.mktemp("gated") / "out"
    return fit_gates(expanded, out, TEXTS, ANCHORS, SETTINGS)


def slow_loss(x, row, weight, bias):
    """The mean over rows of the mean over tokens of the cross-entropy, and the penalty."""
    total = gate_fit.PENALTY / 2 * sum(float(w) ** 2 for w in weight.flatten())
    rows = sorted(set(row.tolist()))
    for number in rows:
        tokens = [t for t in range(len(x)) if row[t] == number]
        for t in tokens:
            logits = [float(x[t] @ weight[r] + bias[r]) for r in range(len(weight))]
            total += (math.log(sum(map(math.exp, logits))) - logits[number]) / len(tokens) / len(rows)
    return total


def test_the_rows_are_the_minimum_of_the_penalised_cross_entropy():
    torch.manual_seed(0)
    raw = torch.randn(60, 5) * torch.tensor([1.0, 3.0, 0.2, 1.0, 1.0]) + 2
    row = torch.arange(60).remainder(7).clamp(max=2)  # more tokens of the last one
    mean, scale = gate_fit._moments(raw, row)
    x = (raw - mean) / scale
    for number in range(5):
        of_rows = [x[row == r, number] for r in range(3)]
        assert sum(float(part.mean()) for part in of_rows) == pytest.approx(0, abs=1e-5)
        assert sum(float(part.square().mean()) for part in of_rows) / 3 == pytest.approx(1, abs=1e-4)
    weight, bias = gate_fit.softmax_regression(x, row, 3)
    least = slow_loss(x, row, weight, bias)
    for number in range(20):
        torch.manual_seed(number)
        other = slow_loss(x, row, weight + torch.randn(3, 5) * 0.02, bias + torch.randn(3) * 0.02)
        assert other > least - 1e-6
    again = gate_fit.softmax_regression(x, row, 3, (weight + 0.01, bias - 0.01))  # from near it: the same minimum
    assert slow_loss(x, row, *again) == pytest.approx(least, abs=1e-5)


def test_all_languages_are_shown_in_the_same_forms():
    tokenizer = byte_tokenizer("<|u|>{{ messages[0]['content'] }}<|a|>")
    found = gate_examples({"en": TEXTS["en"]}, tokenizer, 600, 128)["en"]
    own = [tokenizer.decode(example.ids[example.start : example.end]) for example in found]
    assert all("<|" not in text for text in own)
    inside = [tokenizer.decode(example.ids).endswith("<|a|>") for example in found]
    assert inside == [example.has_template for example in found]
    assert max(len(example.ids) for example in found) == 128  # the template's beginning is cut off
    assert 0.3 < sum(inside) / len(inside) < 0.7
    short = sum(len(text) for text in own if len(text) <= 60)
    assert 0.3 < short / sum(map(len, own)) < 0.7
    assert max(map(len, own)) > 100
    refused(gate_examples, {"en": ["short"]}, tokenizer, 600, 128, says=rf"en has \d+ tokens.*at least {LEAST}")


def judged(model, tokenizer, text, count=60):
    """The classes of a text's beginnings of 20 to `count` tokens."""
    ids = tokenizer(" ".join(text)).input_ids
    return [int(model.judge(torch.tensor([ids[:end]]))) for end in range(20, count)]


def test_new_text_is_recognised_and_the_report_says_where_texts_go(gated):
    model, tokenizer = load_for_inference(gated.out)
    strange = words("4567890!?", 60)  # in no text that the gate saw
    for text, new in ((TEXTS["el"], True), (TEXTS["hu"], True), (TEXTS["en"], False), (ANCHORS["qcc"], False),
                      (strange, False)):  # fmt: skip
        assert sum(judged(model, tokenizer, text)) > 30 if new else not sum(judged(model, tokenizer, text))
    ids = torch.arange(60, 90)[None]
    with torch.no_grad(), model.use_expert(0):
        home = model(ids).logits
    assert torch.equal(model(ids, languages="qaa").logits, home)  # anchors may be named
    report = gated.gates
    assert (set(report.unseen), set(report.new)) == (set(ANCHORS), {"el", "hu"})
    over = {code for code, share in report.unseen.items() if share > SETTINGS.unseen_share}
    assert over == set(report.named)
    assert len(over) <= 1  # a tenth of the anchors, but one at least
    assert report.old["en"] == 0
    assert report.passing == (report.new["el"] + report.new["hu"]) / 2 > 0.7
    assert report.home <= 0 <= report.leave
    said = "\n".join(gated.lines())
    assert f"gate               in layer {report.layer}\n" in said
    assert f"el                 {100 * report.new['el']:.0f} % of its texts go to new experts" in said
    assert f"answers            go home below {report.home:.0f} nats" in said


def test_a_near_relative_of_a_new_language_is_named(expanded, tmp_path):
    """An anchor with the letters of a new language is taken for it when the gate has not seen it."""
    anchors = {**ANCHORS, "qzz": words("αβγδεζη", 60, 9)}
    report = fit_gates(expanded, tmp_path / "out", TEXTS, anchors, SETTINGS).gates
    assert report.named == {"qzz": "el"}
    assert report.unseen["qzz"] > SETTINGS.unseen_share
    (line,) = [line for line in report.lines() if line.startswith("qzz")]
    share = f"{100 * report.unseen['qzz']:.0f} %"
    assert f"is taken for el: a gate that was not shown it sends {share} of its texts to new experts" in line
    assert line.endswith("and this one may send those of its relatives without an anchor")


def test_a_chat_begins_at_home_and_is_answered_in_its_language(expanded, tmp_path):
    folder = shutil.copytree(expanded, tmp_path / "chat")
    byte_tokenizer(TEMPLATE).save_pretrained(folder)
    made = fit_gates(folder, tmp_path / "out", TEXTS, ANCHORS, SETTINGS)
    model, tokenizer = load_for_inference(made.out)
    assert model.config.language_gate["languages"][0][0] == "zxx"
    assert "9 languages stay home" in "\n".join(inspect_checkpoint(made.out).lines())

    def new(text):
        "The class of a message in the template, and of its beginning, which is the template's own."
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=True, return_tensors="pt")
        return int(model.judge(**ids)), int(model.judge(ids["input_ids"][:, :22]))

    assert new("αβγδεζη βαγ δεζ ηζε αβγδ " * 2) == (1, 0)
    assert new("aei noun tea ion ate nut in a tin") == (0, 0)


def test_all_but_the_gate_is_byte_for_byte_the_same(expanded, gated):
    before, after = (load_file(folder / "model.safetensors") for folder in (expanded, gated.out))
    added = {name for name in after if name not in before}
    layer = gated.gates.layer
    assert added == {f"model.layers.{layer}.language_gate.{kind}" for kind in ("weight", "bias")}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    config = json.loads((gated.out / "config.json").read_text())
    languages = [["en", *sorted(ANCHORS)], ["el", "hu"]]
    rule = {"layer": layer, "languages": languages, "bound": 4.0, "window": 64, "begin": None}
    assert config["parts"]["gate"] == {**rule, "home": gated.gates.home, "leave": gated.gates.leave}
    assert config["classifier_layers"] == []
    stage = config["expansions"][-1]["stages"][-1]
    settings = {name: stage["settings"][name] for name in ("unseen_share", "layer")}
    assert (stage["stage"], settings) == ("gates", {"unseen_share": 0.02, "layer": layer})
    assert stage["settings"]["shares"]["el"] == {"end": round(gated.gates.new["el"], 4)}
    assert config["expansions"][-1]["language_gate"] == config["parts"]["gate"]


def test_growth_leaves_the_gate_out_and_each_expansion_gets_a_class(gated, tmp_path):
    plan = Plan("moe-lpr", [3, 3, 3], old=["en", "el", "hu"], new=["tr"], grows_from=[2, 2, 2])
    plan.save(tmp_path / "plan.json")
    said = invoke("grow", gated.out, tmp_path / "grown", "--plan", tmp_path / "plan.json")
    assert "fit it again" in said
    assert json.loads((tmp_path / "grown" / "config.json").read_text()).get("language_gate") is None
    texts = {**TEXTS, "tr": words("çşğıöü")}
    refused(fit_gates, tmp_path / "grown", tmp_path / "no", TEXTS, ANCHORS, SETTINGS, says="no text in tr")
    again = fit_gates(tmp_path / "grown", tmp_path / "again", texts, ANCHORS, SETTINGS)
    model, tokenizer = load_for_inference(again.out)
    assert [len(codes) for codes in model.config.language_gate["languages"]] == [1 + len(ANCHORS), 2, 1]
    for code, number in (("tr", 2), ("el", 1), ("hu", 1)):
        assert judged(model, tokenizer, texts[code]).count(number) > 30
    refitted = fit_gates(again.out, tmp_path / "twice", texts, ANCHORS, SETTINGS)  # in the place of the gate it had
    assert (refitted.out / "model.safetensors").read_bytes() == (again.out / "model.safetensors").read_bytes()


def test_the_layer_may_be_chosen_and_else_those_of_the_first_third_are_tried(expanded, tmp_path):
    assert [gate_fit.candidates(count) for count in (3, 24, 30)] == [[0], [5, 6, 7], [7, 8, 9]]
    chosen, beyond = (SETTINGS.model_copy(update={"layer": layer}) for layer in (2, 3))
    made = fit_gates(expanded, tmp_path / "out", TEXTS, ANCHORS, chosen)
    assert made.gates.layer == 2
    assert "model.layers.2.language_gate.bias" in load_file(made.out / "model.safetensors")
    refused(fit_gates, expanded, tmp_path / "no", TEXTS, ANCHORS, beyond, says=r"layer is 3, but the model has the")


def test_text_that_cannot_make_gates_is_refused_before_anything_is_written(expanded, tmp_path):
    for texts, anchors, said in (
        ({"en": TEXTS["en"], "el": TEXTS["el"]}, ANCHORS, "no text in hu"),
        ({**TEXTS, "xx": TEXTS["en"]}, ANCHORS, "xx: not a language of the model"),
        (TEXTS, {**ANCHORS, "hu": TEXTS["hu"]}, "anchors: hu is a new language"),
        ({**TEXTS, "hu": ["őűá"]}, ANCHORS, "hu has .* tokens"),
    ):
        refused(fit_gates, expanded, tmp_path / "out", texts, anchors, SETTINGS, says=said)
    assert not list(tmp_path.iterdir())


def test_a_promise_that_no_layer_keeps_is_refused_with_the_best_ones_figures(base, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_moe_expand.analysis.gating.shipped_sentences", lambda code: [])
    plan = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"])
    expand_checkpoint(base, tmp_path / "one", plan)  # its experts are equal, and so is the text
    settings = GateSettings(tokens=400, anchor_tokens=400, unseen_share=0.001)
    same = {"en": TEXTS["en"], "el": TEXTS["en"]}
    given = (tmp_path / "one", tmp_path / "out", same, dict.fromkeys(ANCHORS, TEXTS["en"]), settings)
    refused(fit_gates, *given, says=r"none of the layers 0 keeps unseen_share 0\.001 .* in the best, layer 0, \d")
    assert not (tmp_path / "out").exists()


def test_the_command_line(expanded, tmp_path, monkeypatch):
    """An anchor that is given stands beside the package's, or in the place of the one of its language."""
    package = {**ANCHORS, "qaa": TEXTS["el"]}
    without = lambda leave_out: {code: text for code, text in package.items() if code not in leave_out}  # noqa: E731
    monkeypatch.setattr(gating, "shipped_anchors", without)
    for code, text in {**TEXTS, "qaa": ANCHORS["qaa"]}.items():
        write_texts(tmp_path / f"{code}.jsonl", text)
    data = [part for code in TEXTS for part in ("--data", f"{code}={tmp_path / code}.jsonl")]
    options = ["--tokens", 400, "--anchor-tokens", 150, "--unseen-share", 0.02]
    for out, anchors in (("out", ["--anchors", f"qaa={tmp_path / 'qaa'}.jsonl"]), ("other", [])):
        said = invoke("gates", expanded, tmp_path / out, *data, *anchors, *options)
        assert "unseen languages" in said
        assert bool(re.search("^qaa +is taken for el", said, re.MULTILINE)) == (out == "other")
    shown = invoke("inspect", tmp_path / "out")
    assert "9 languages stay home" in shown
    assert "to new experts" in shown


def slow_sum(evidence, end, window):
    """The evidence of the last tokens before `end`, for each class."""
    return [sum(int(token[g]) for token in evidence[max(0, end - window) : end]) for g in range(len(evidence[0]))]


@pytest.mark.parametrize(("has_template", "bias"), [(False, 1.5), (True, 0.0), (True, 1.5)])
def test_what_texts_are_evidence_of_is_as_in_a_slow_loop(has_template, bias):
    torch.manual_seed(3)
    lengths, settings = [5, 70, 17, 128], GateSettings(window=9)
    logits = torch.randn(sum(lengths), 5) * 2
    logits[:5, 3] = float("-inf")  # a row that the fit lacks
    scored = Scored(logits, torch.tensor([[length, number == 2] for number, length in enumerate(lengths)]))
    codes, classes = ["zxx", "el", "de", "en", "hu"], {"el": 1, "hu": 2}
    order, sizes = gate_fit.by_class(codes, classes)
    assert (order.tolist(), sizes) == ([0, 2, 3, 1, 4], [3, 1, 1])
    gate = FittedGate(0, None, codes if has_template else ["it", *codes[1:]], [], logits, logits, {})
    less = torch.tensor([0, 0, 0, bias, bias])
    evidence = token_evidence(logits[:, order] - less, sizes, settings.bound, has_template)
    texts = [part.tolist() for part in evidence.split(lengths)]
    ends = [slow_sum(text, len(text), 9) for text in texts]
    found = Texts.of({"en": scored, "de": scored}, gate, classes, settings)
    torch.testing.assert_close(found.sums(bias), torch.tensor(ends * 2), rtol=0, atol=9)
    share = sum(max(end) > 0 for end in ends) / 4
    assert found.shares(bias) == {"en": share, "de": share}
    at_17 = [slow_sum(text[:17], 17, 9) for text in texts if len(text) >= 17]
    torch.testing.assert_close(found.sums(bias, 17), torch.tensor(at_17 * 2), rtol=0, atol=9)
    plain = Texts.of({"en": scored}, gate, classes, settings, plain=True)
    marks = [[slow_sum(text, mark, 9) for mark in gate_fit.MARKS if mark <= len(text)] for text in texts[1::2]]
    least = [min(map(max, sums)) for sums in marks]
    torch.testing.assert_close(plain.least(bias), torch.tensor(least).float(), rtol=0, atol=9)


def test_answers_leave_home_above_other_text_and_below_new_text_and_go_home_below_it():
    new, far, near = (1024 * torch.arange(start, start + 101) for start in (10, -150, -90))
    leave, none = gate_fit.leave_of, torch.ones(0)
    assert leave(new, far, near) == leave(new, near, far) == (20 + 9) / 2
    assert leave(new, far) == 0.0  # halfway is below 0
    assert leave(near + 9 * 1024, new) == 0.0  # text that nothing tells apart
    assert leave(new, new + 9999 * 1024) == 20.0  # most new answers are to arrive
    assert leave(new, 1024 * torch.full((9,), -10), none) == (20 - 10) / 2
    assert leave(new, none, none) == 10.0
    assert leave(none, none) == 0.0
    new, other = torch.arange(-10, 90) * 1024, torch.arange(-199, -99) * 1024
    home = gate_fit.home_of(new, other)
    assert (new / 1024 < home).float().mean() <= 0.02
    assert (other / 1024 < home).float().mean() >= 0.9
    assert home == pytest.approx(-110, abs=1)
    assert (new / 1024 < gate_fit.home_of(new, new)).float().mean() <= 0.02  # nothing tells it apart: none leaves
    assert gate_fit.home_of(torch.ones(3), torch.ones(3)) == gate_fit.home_of(none, none) == 0.0


def drawn_gate(near, near_old):
    """A gate of 20 anchors, an old and two new languages, of drawn logits; `near`, `near_old`: how like the last of
    these three anchors are, and the old language."""
    draw = torch.Generator().manual_seed(0)
    anchors = [f"q{chr(97 + number)}a" for number in range(20)]
    codes = ["en", *anchors, "el", "hu"]
    scored = {}
    for row, code in enumerate(codes):
        lengths = torch.randint(16, 129, (6,), generator=draw)
        logits = torch.randn(int(lengths.sum()), len(codes), generator=draw) * 2
        logits[:, row] = float("-inf") if code in anchors else logits[:, row] + 3
        logits[:, -1] += near * (code in anchors[:3]) + near_old * (code == "en")
        scored[code] = Scored(logits, torch.stack([lengths, torch.arange(6) % 2], 1))
    return FittedGate(0, None, codes, anchors, torch.zeros(len(codes), 2), torch.zeros(len(codes)), scored)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5])
@pytest.mark.parametrize(("near", "near_old"), [(0.0, 0.0), (8.0, 0.0), (0.0, 5.0)])
def test_of_an_anchor_and_an_old_language_no_more_texts_than_promised_go_astray(near, near_old, share):
    """But of near relatives, at most a tenth of the anchors; and no more new text is lost for it than must be."""
    gate = drawn_gate(near, near_old)
    report = gate_fit.report_of(gate, {"el": 1, "hu": 1}, GateSettings(unseen_share=share))

    def astray(code, bias):
        gone = 0
        lengths = gate.scored[code].texts_M2[:, 0].tolist()
        for logits in gate.scored[code].logits_TR.split(lengths):
            home, new = logits[:, :-2].logsumexp(1), logits[:, -2:].logsumexp(1) - bias
            gone += int((4096 * ((new - home) / 4).tanh()).round()[-64:].sum() > 0)
        return gone / 6

    def named_at(bias):
        return {code for code in gate.anchors if astray(code, bias) > share}

    assert report.unseen == {code: pytest.approx(astray(code, report.bias)) for code in sorted(gate.anchors)}
    assert set(report.named) == named_at(report.bias)
    assert len(report.named) <= 2
    assert report.new == {code: astray(code, report.bias) for code in ("el", "hu")}
    assert report.old == {"en": pytest.approx(astray("en", report.bias))}
    assert report.old["en"] <= share
    smaller = [report.bias - 0.02 * step for step in range(1, 20)]
    assert all(len(named_at(bias)) > 2 or astray("en", bias) > share for bias in smaller)
    if near_old:  # which then decides
        assert astray("en", smaller[0]) > share
    assert all(other == "hu" for code, other in report.named.items() if near == 8)
    assert report.home <= 0 <= report.leave


@pytest.mark.parametrize(("template", "begins"), [(None, True), (TEMPLATE, False)])
def test_the_fit_cuts_and_reads_texts_as_the_model_judges_them(expanded, tmp_path, begins, template):
    """The sums of a fit's texts are those that the model with its gate finds in the same ids."""
    folder = shutil.copytree(expanded, tmp_path / "model")
    tokenizer = byte_tokenizer(template)
    if begins:
        one = tokenizer.convert_ids_to_tokens(7)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=[one, "$A"], special_tokens=[(one, 7)])
    tokenizer.save_pretrained(folder)
    model, tokenizer = load_for_inference(folder)
    classes = {"en": 0, "el": 1, "hu": 1}
    gate, report = gating.fitted(model, tokenizer, TEXTS, ANCHORS, SETTINGS, classes)
    assert gate.begin == (7 if begins else None)
    made = gating.gate_of(gate, classes, report, SETTINGS)
    assert (made.rule.begin, made.rule.home) == (gate.begin, report.home)
    with_gate = fit_gates(folder, tmp_path / "out", TEXTS, ANCHORS, SETTINGS).out
    model, _ = load_for_inference(with_gate)
    assert torch.equal(model.language_gate.weight, made.weight_Rh)
    examples = gate_examples({"el": TEXTS["el"]}, tokenizer, 400, 64)["el"]
    states = gate_fit._read(model, examples, gate.begin, [report.layer])[report.layer]
    scored = Scored(states.float() @ gate.weight_Rh.T + gate.bias_R, torch.tensor([[len(e.ids), 0] for e in examples]))
    sums = Texts.of({"el": scored}, gate, classes, SETTINGS).sums(report.bias)
    for example, found in zip(examples, sums, strict=True):
        for before in ([], [50] * (128 - len(example.ids)) if len(example.ids) == 128 else []):
            ids = torch.tensor([[*before, *example.ids]])
            assert int((model._sums(ids, torch.ones_like(ids)) - found).abs().max()) < 64 * 20, example
