"""Prefix gates that a join fits on text, in closed form."""

import json

import pytest
import torch
from conftest import byte_tokenizer, invoke, save_dense, write_texts
from test_join import EL, HU, TR, load, make_pack, same_files

from hf_moe_expand import join_calibrated, join_expansions, leave_out_pack
from hf_moe_expand.analysis.gate_fit import RIDGE, SLOPE, fit_gates
from hf_moe_expand.errors import InputError
from hf_moe_expand.models import load_for_inference

TEXTS = {
    "en": ["the river runs under the old bridge and the boats wait for the morning " * 4] * 3,
    "de": ["der fluss fliesst unter der alten bruecke und die boote warten auf den morgen " * 4] * 3,
    "el": ["το ποτάμι κυλάει κάτω από την παλιά γέφυρα " * 6] * 3,
    "hu": ["ŐŰŐŰ ÖÜÓ ŐÚÉ ÁŰÍ ŐŰÜ ÖÓŐ ÚÉÁ " * 8] * 3,
    "tr": ["?!;:,.()[]{}<>|~^&*%$#@+=-_ " * 8] * 3,
}
TWO = {code: TEXTS[code] for code in ("en", "el", "hu")}


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    home = tmp_path_factory.mktemp("packs")
    base = save_dense(home / "base")
    return {
        code: make_pack(home / f"qwen-{code}", base, plan, seed)
        for seed, (code, plan) in enumerate({"el": EL, "hu": HU, "tr": TR}.items(), 1)
    }


def test_the_rows_are_the_ridge_regression_of_the_class_indicators(packs, tmp_path):
    join_expansions([packs["el"], packs["hu"]], tmp_path / "out")
    model, tokenizer = load_for_inference(tmp_path / "out")
    ids = {code: tokenizer(texts[0]).input_ids[:60] for code, texts in {**TWO, "de": TEXTS["de"]}.items()}
    found = fit_gates(model, ids)
    assert set(found) == {0, 1, 2}
    seen = {}
    for code, tokens in ids.items():
        inputs = {}
        handles = [
            ffn.register_forward_pre_hook(lambda _, args, layer=layer, inputs=inputs: inputs.update({layer: args[0]}))
            for layer, ffn in model.expanded_ffns().items()
        ]
        with torch.no_grad():
            model(torch.tensor([tokens]), languages=code)
        for handle in handles:
            handle.remove()
        seen[code] = inputs
    number, share = {"en": 0, "de": 0, "el": 1, "hu": 2}, {"en": 1 / 6, "de": 1 / 6, "el": 1 / 3, "hu": 1 / 3}
    for layer, rows in found.items():
        x = torch.cat([seen[code][layer][0] for code in ids]).double()
        y = torch.cat([torch.eye(3, dtype=torch.double)[number[code]].expand(60, 3) for code in ids])
        w = torch.cat([torch.full((60, 1), share[code] / 60, dtype=torch.double) for code in ids])
        ridge = RIDGE * (w * x**2).sum() / 32
        # The same minimum as an ordinary least-squares problem with h more rows.
        left = torch.cat([w.sqrt() * x, ridge.sqrt() * torch.eye(32, dtype=torch.double)])
        right = torch.cat([w.sqrt() * y, torch.zeros(32, 3, dtype=torch.double)])
        weight = torch.linalg.lstsq(left, right).solution.T
        torch.testing.assert_close(rows.double(), SLOPE * (weight[1:] - weight[:1]), rtol=1e-3, atol=1e-4)


def test_gated_packs_give_each_language_its_own_pack(packs, tmp_path):
    report, found = join_calibrated([packs["el"], packs["hu"]], tmp_path / "out", TWO, tokens=150, gates=True)
    assert report.scales == [1.0, 1.0]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["classifier_layers"] == [0, 1, 2]
    assert config["prefix_gate"] == {"decay": 0.95, "bound": 4.0, "reach": "layer"}
    model = load(tmp_path / "out")
    for code, number in (("en", 0), ("el", 1), ("hu", 2)):
        ids = torch.tensor([byte_tokenizer()(TWO[code][0]).input_ids[:100]])
        with torch.no_grad(), model.capture_routing() as routing:
            judged = model(ids).logits
        classes = torch.stack([layer.token_classes for layer in routing])
        assert (classes[:, 20:] == number).float().mean() > 0.9
        if bool((classes == number).all()):
            assert torch.equal(judged, model(ids, languages=code).logits)
    assert set(found.after) == set(TWO)


def test_a_gated_join_comes_apart_again(packs, tmp_path):
    chosen = [packs["el"], packs["hu"], packs["tr"]]
    join_calibrated(
        chosen, tmp_path / "three", {code: TEXTS[code] for code in ("en", "el", "hu", "tr")}, tokens=100, gates=True
    )
    report = leave_out_pack(tmp_path / "three", tmp_path / "two", "hu")
    assert report.restored
    two, three = load(tmp_path / "two"), load(tmp_path / "three")
    for layer, ffn in two.expanded_ffns().items():
        assert torch.equal(ffn.classifier.weight, three.expanded_ffns()[layer].classifier.weight[[0, 1, 3]])
    leave_out_pack(tmp_path / "two", tmp_path / "one", "tr")
    same_files(tmp_path / "one", packs["el"])


def test_gates_need_text_of_every_class(packs, tmp_path):
    chosen = [packs["el"], packs["hu"]]
    with pytest.raises(InputError, match=r"no text in a language of the base \(en, de\)"):
        join_calibrated(chosen, tmp_path / "out", {"el": TEXTS["el"], "hu": TEXTS["hu"]}, tokens=50, gates=True)
    assert not list(tmp_path.iterdir())


def test_the_command_fits_gates(packs, tmp_path):
    for code, texts in TWO.items():
        write_texts(tmp_path / f"{code}.jsonl", texts)
    given = [part for code in TWO for part in ("--calibrate", f"{code}={tmp_path / code}.jsonl")]
    said = invoke("join", tmp_path / "out", packs["el"], packs["hu"], *given, "--tokens", 100, "--gates")
    assert "gates fitted; without them, and told the languages: bits per byte" in said
    assert "judge the text so far" in invoke("inspect", tmp_path / "out")
    with pytest.raises(InputError, match="--gates fits gates on text"):
        invoke("join", tmp_path / "no", packs["el"], packs["hu"], "--gates")
