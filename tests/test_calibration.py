"""The calibration of a joined model: its gates, the scores without and with them, refusals and leftovers."""

import json
import re

import pytest
import torch
from conftest import byte_tokenizer, invoke, load, save_dense, write_texts
from test_join import join_with_scales, same_files
from transformers import AutoModelForCausalLM

from hf_moe_expand import Plan, expand_checkpoint, join_calibrated, join_expansions
from hf_moe_expand.analysis import calibration
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.scratch import leftovers
from hf_moe_expand.evaluation.perplexity import evaluate_model

TEXTS = {
    "en": ["the river runs under the old bridge and the boats wait for the morning " * 3] * 4,
    "el": ["το ποτάμι κυλάει κάτω από την παλιά γέφυρα " * 4] * 4,
    "hu": ["a folyó az öreg híd alatt folyik, és a csónakok várnak " * 4] * 4,
}


def make_pack(folder, base, code, seed):
    """A pack whose experts know the bytes of its language, and whose router finds the tokens of its language."""
    plan = Plan("moe-lpr", [2, 2, 2], old=["en"], new=[code])
    expand_checkpoint(base, folder, plan, seed=seed)
    train(folder)
    return folder


def train(folder):
    """A few steps on both languages, of the new experts and the routers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    code = json.loads((folder / "config.json").read_text())["expansions"][0]["new_languages"][0]
    tokenizer = byte_tokenizer()
    parts = [p for n, p in model.named_parameters() if ".experts.1." in n or "router" in n]
    model.requires_grad_(False)
    for parameter in parts:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(parts, lr=5e-3)
    blocks = {c: torch.tensor(tokenizer(TEXTS[c][0]).input_ids[:60])[None] for c in (code, "en")}
    for _ in range(40):
        optimizer.zero_grad()
        with model.capture_routing() as routing:
            loss = model(blocks[code], labels=blocks[code]).loss
            at_new = [layer.router_logits.log_softmax(-1)[:, 1].mean() for layer in routing.layers.values()]
        with model.capture_routing() as routing:
            model(blocks["en"])
            at_home = [layer.router_logits.log_softmax(-1)[:, 0].mean() for layer in routing.layers.values()]
        (loss - sum(at_new) - sum(at_home)).backward()
        optimizer.step()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """A base and packs of it."""
    home = tmp_path_factory.mktemp("packs")
    base = save_dense(home / "base")
    trained = {code: make_pack(home / code, base, code, seed) for seed, code in enumerate(("el", "hu"), start=1)}
    expand_checkpoint(base, home / "tr", Plan("moe-lpr", [2, 2, 2], old=["en"], new=["tr"]))
    return {"base": base, "tr": home / "tr", **trained}


def scored(folder):
    """Bits per byte of the text that a calibration with 100 tokens reads; each byte is a token."""
    texts = {code: ["".join(texts).encode()[:100].decode(errors="ignore")] for code, texts in TEXTS.items()}
    return {code: s.bits_per_byte for code, s in evaluate_model(load(folder), byte_tokenizer(), texts, 64).items()}


def test_gates_are_fitted_and_nothing_else_remains(packs, tmp_path, quick_gates):
    chosen = [packs["el"], packs["hu"]]
    report, found = join_calibrated(chosen, tmp_path / "out", TEXTS, tokens=100)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (report.packs, report.experts_per_layer) == (["el", "hu"], [3, 3, 3])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["language_gate"]["languages"][1:] == [["el"], ["hu"]]
    join_expansions(chosen, tmp_path / "plain")
    assert found.before == pytest.approx(scored(tmp_path / "plain"), rel=1e-3)
    # Told its language, a text gets what its pack alone computes; one of the base's, what the base does.
    alone = {"en": scored(packs["base"])["en"], **{code: scored(packs[code])[code] for code in ("el", "hu")}}
    assert found.after == pytest.approx(alone, rel=1e-3)
    assert sum(found.after.values()) < sum(found.before.values())


def test_gates_take_the_place_of_the_factors_of_an_earlier_release(packs, tmp_path, quick_gates):
    join_with_scales([packs["el"], packs["hu"]], tmp_path / "old", [0.25, 4.0])
    for name, chosen in {"two": [packs["el"], packs["hu"]], "again": [tmp_path / "old"]}.items():
        join_calibrated([*chosen, packs["tr"]], tmp_path / name, {**TEXTS, "tr": TEXTS["en"]}, tokens=100)
    same_files(tmp_path / "two", tmp_path / "again")


@pytest.mark.parametrize(
    ("texts", "tokens", "said"),
    [
        ({**TEXTS, "fr": ["a"]}, 100, r"fr: not a language of the packs \(el, en, hu\)"),
        ({"en": TEXTS["en"], "el": TEXTS["el"]}, 100, r"no text in a language of hu \(hu\)"),
        ({**TEXTS, "el": ["λίγο"]}, 100, "Language 'el' has 8 tokens, but the calibration reads 100"),
        (TEXTS, 1, "tokens is 1: must be at least 16"),
    ],
)
def test_text_that_it_cannot_use_is_refused_before_anything_is_written(
    packs, tmp_path, monkeypatch, texts, tokens, said
):
    monkeypatch.setattr(calibration, "write_joined", None)
    with pytest.raises(InputError, match=said):
        join_calibrated([packs["el"], packs["hu"]], tmp_path / "out", texts, tokens=tokens)
    assert not list(tmp_path.iterdir())


def test_a_killed_calibration_leaves_what_the_next_one_removes(packs, tmp_path, quick_gates):
    left = tmp_path / ".out.joined-999999"
    left.mkdir()
    (sentence,) = leftovers(tmp_path / "out")
    assert "is of a killed process" in sentence
    join_calibrated([packs["el"], packs["hu"]], tmp_path / "out", TEXTS, tokens=50)
    assert not left.exists()


def test_the_command(packs, tmp_path, quick_gates):
    for code, texts in TEXTS.items():
        write_texts(tmp_path / f"{code}.jsonl", texts)
    given = [part for code in TEXTS for part in ("--calibrate", f"{code}={tmp_path / code}.jsonl")]
    said = invoke("join", tmp_path / "out", packs["el"], packs["hu"], *given, "--tokens", 100)
    number = r"\d\.\d{3}"
    told = rf"gates fitted; without them, and told the languages: bits per byte {number} to {number}"
    assert re.search(rf"calibration        {told} \(en {number} to {number}, el {number} to", said)
    assert "pack 2  hu: hu\n" in said
    assert f"wrote {tmp_path / 'out'}\n" in said
    with pytest.raises(InputError, match="--tokens belongs to --calibrate"):
        invoke("join", tmp_path / "no", packs["el"], packs["hu"], "--tokens", 100)
    other = make_pack(tmp_path / "other", packs["base"], "hu", 3)
    with pytest.raises(InputError, match="hu: hu and other both add it"):
        invoke("join", tmp_path / "no", packs["hu"], other)
    invoke("join", tmp_path / "both", packs["hu"], other, "--keep-both")
    with pytest.raises(InputError, match="exists already"):
        invoke("join", tmp_path / "both", packs["el"], packs["hu"])
    assert "pack 1  el: el" in invoke("join", tmp_path / "both", packs["el"], packs["hu"], "--overwrite")
