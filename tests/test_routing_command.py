"""`analyze routing` on the command line."""

import json

import pytest
from conftest import invoke, save_dense, write_texts
from test_routing_analysis import TEXTS

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.planning.results import NO_CHOICE, RoutingResult


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("routing")
    plan = Plan("layer-moe", [3, 1, 2], classifier_layers=[2], old=["en"], new=["el"])
    expand_checkpoint(save_dense(root / "dense"), root / "expanded", plan)
    for code in ("en", "el", "hu"):
        write_texts(root / f"{code}.jsonl", TEXTS[code])
    return root


def analyze(root, model, *arguments):
    return invoke("analyze", "routing", root / model, "--out", root / "routing.json", *arguments)


def data(root, *codes):
    return [word for code in codes for word in ("--data", f"{code}={root / f'{code}.jsonl'}")]


def test_the_command_line(checkpoint):
    small = ["--tokens", 60, "--block-size", 16, "--batch-size", 2]
    said = analyze(checkpoint, "expanded", *data(checkpoint, "en", "el"), *small)
    assert "E_50%" in said
    assert "random experts" in said
    assert "co-location" in said
    assert "…" not in said  # no heading is cut off at 80 columns
    found = json.loads((checkpoint / "routing.json").read_text())
    assert (found["classes"], found["layers"], found["tokens"]) == ({"en": 0, "el": 1}, [0, 2], 60)
    # Copies of one FFN: it does not matter which experts a token takes.
    for language, perplexity in found["perplexity"].items():
        assert found["random_perplexity"][language] == pytest.approx(perplexity, rel=1e-4)
    with pytest.raises(InputError, match=r"routing.json: exists already"):
        analyze(checkpoint, "expanded", *data(checkpoint, "en"))


def test_the_command_says_that_there_is_no_choice(tmp_path):
    plan = Plan("moe-lpr", [2, 1, 2], old=["en"], new=["el"])
    expand_checkpoint(save_dense(tmp_path / "base"), tmp_path / "moe", plan)
    write_texts(tmp_path / "el.jsonl", TEXTS["el"])
    tokens = ["--tokens", 60, "--block-size", 16, "--out", tmp_path / "routing.json"]
    said = invoke("analyze", "routing", tmp_path / "moe", "--data", f"el={tmp_path / 'el.jsonl'}", *tokens)
    assert NO_CHOICE in said
    assert not RoutingResult.from_json(tmp_path / "routing.json").has_choice
