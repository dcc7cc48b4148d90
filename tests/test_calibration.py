"""The calibration of a joined model's routers."""

import json
import re

import pytest
import torch
from conftest import byte_tokenizer, invoke, save_dense, write_texts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_moe_expand import Plan, calibrate_join, expand_checkpoint, grow_checkpoint, join_calibrated, join_expansions
from hf_moe_expand.analysis import calibration
from hf_moe_expand.errors import InputError
from hf_moe_expand.evaluation.perplexity import evaluate_model
from hf_moe_expand.scratch import leftovers

TEXTS = {
    "en": ["the river runs under the old bridge and the boats wait for the morning " * 3] * 4,
    "el": ["το ποτάμι κυλάει κάτω από την παλιά γέφυρα " * 4] * 4,
    "hu": ["a folyó az öreg híd alatt folyik, és a csónakok várnak " * 4] * 4,
}


def make_pack(folder, base, code, seed, router=1.0):
    """A pack whose experts know the bytes of its language, and whose router finds the tokens of its language."""
    plan = Plan("moe-lpr", [2, 2, 2], old=["en"], new=[code])
    expand_checkpoint(base, folder, plan, seed=seed)
    train(folder, seed)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "router" in name:
            tensor.mul_(router)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def train(folder, seed):
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
    """Packs of one base; `faint` and `loud` are `hu` with a router of other log-odds."""
    home = tmp_path_factory.mktemp("packs")
    base = save_dense(home / "base")
    return {
        "el": make_pack(home / "el", base, "el", 1),
        "hu": make_pack(home / "hu", base, "hu", 2),
        "faint": make_pack(home / "faint", base, "hu", 2, router=0.25),
        "loud": make_pack(home / "loud", base, "hu", 2, router=10),
    }


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def scored(folder):
    """Bits per byte of the text that a calibration with 100 tokens reads; each byte is a token."""
    texts = {code: ["".join(texts).encode()[:100].decode(errors="ignore")] for code, texts in TEXTS.items()}
    return {code: s.bits_per_byte for code, s in evaluate_model(load(folder), byte_tokenizer(), texts, 64).items()}


@pytest.mark.parametrize(("pack", "low", "high"), [("faint", 2, 8), ("loud", 1 / 16, 1 / 2)])
def test_a_router_with_other_log_odds_gets_a_factor_that_undoes_most_of_it(packs, tmp_path, pack, low, high):
    report, found = join_calibrated([packs["el"], packs[pack]], tmp_path / "out", TEXTS, tokens=100, gates=False)
    assert low <= found.factors[1] / found.factors[0] <= high
    assert report.scales == found.factors
    plain = tmp_path / "plain"
    join_expansions([packs["el"], packs[pack]], plain)
    assert found.before == pytest.approx(scored(plain), rel=1e-3)
    assert found.after == pytest.approx(scored(tmp_path / "out"), rel=1e-3)
    assert sum(found.after.values()) < sum(found.before.values()) - 0.3


def test_the_factors_are_written_and_nothing_else_remains(packs, tmp_path):
    chosen = [packs["el"], packs["faint"]]
    _, found = join_calibrated(chosen, tmp_path / "out", TEXTS, tokens=100, gates=False)
    join_expansions(chosen, tmp_path / "same", scales=found.factors)
    for file in (tmp_path / "same").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "same"]
    # A calibrated model that is joined and calibrated again keeps the product.
    again, more = join_calibrated(
        [tmp_path / "out", packs["hu"]], tmp_path / "three", TEXTS, tokens=100, keep_both=True, gates=False
    )
    assert again.scales[:2] == [a * b for a, b in zip(found.factors, more.factors, strict=False)]


def test_a_factor_scales_the_rows_of_all_expansions_of_a_pack(packs, tmp_path):
    plan = Plan("moe-lpr", [3, 4, 3], old=["en", "el"], new=["tr"], grows_from=[2, 2, 2])
    grow_checkpoint(packs["el"], tmp_path / "grown", plan)
    chosen = [tmp_path / "grown", packs["hu"]]
    join_expansions(chosen, tmp_path / "plain")
    join_expansions(chosen, tmp_path / "scaled", scales=[0.7, 4.0])
    scaled = load_file(tmp_path / "scaled" / "model.safetensors")
    model = load(tmp_path / "plain")
    with torch.no_grad(), calibration._scaled(model, [0.7, 4.0]):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, scaled[name]), name


def test_a_loaded_model_stays_as_it_is_and_no_score_gets_worse(packs, tmp_path):
    join_expansions([packs["el"], packs["hu"]], tmp_path / "out")
    model = load(tmp_path / "out")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = calibrate_join(model, byte_tokenizer(), TEXTS, tokens=100)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert sum(found.after.values()) <= sum(found.before.values())
    assert found == calibrate_join(model, byte_tokenizer(), TEXTS, tokens=100)
    with pytest.raises(InputError, match="joins no language packs"):
        calibrate_join(load(packs["el"]), byte_tokenizer(), TEXTS)


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
        join_calibrated([packs["el"], packs["hu"]], tmp_path / "out", texts, tokens=tokens, gates=False)
    assert not list(tmp_path.iterdir())


def test_a_killed_calibration_leaves_what_the_next_one_removes(packs, tmp_path):
    left = tmp_path / ".out.joined-999999"
    left.mkdir()
    (sentence,) = leftovers(tmp_path / "out")
    assert "is of a killed process" in sentence
    join_calibrated([packs["el"], packs["hu"]], tmp_path / "out", TEXTS, tokens=50, gates=False)
    assert not left.exists()


def test_the_command(packs, tmp_path):
    for code, texts in TEXTS.items():
        write_texts(tmp_path / f"{code}.jsonl", texts)
    given = [part for code in TEXTS for part in ("--calibrate", f"{code}={tmp_path / code}.jsonl")]
    said = invoke("join", tmp_path / "out", packs["el"], packs["faint"], *given, "--tokens", 100, "--factors")
    assert re.search(r"calibration        bits per byte 7\.\d+ to 7\.\d+ \(en 8\.\d+ to 8\.\d+, el 6\.", said)
    assert "pack 2  faint: hu (router x 2)" in said
    assert f"wrote {tmp_path / 'out'}\n" in said
    with pytest.raises(InputError, match="--tokens belongs to --calibrate"):
        invoke("join", tmp_path / "no", packs["el"], packs["hu"], "--tokens", 100)
    with pytest.raises(InputError, match="hu: faint and loud both add it"):
        invoke("join", tmp_path / "no", packs["faint"], packs["loud"])
    invoke("join", tmp_path / "both", packs["faint"], packs["loud"], "--keep-both")
    with pytest.raises(InputError, match="exists already"):
        invoke("join", tmp_path / "both", packs["el"], packs["hu"])
    assert "pack 1  el: el" in invoke("join", tmp_path / "both", packs["el"], packs["hu"], "--overwrite")
