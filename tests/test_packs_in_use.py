"""A joined model in use: inspected, trained, averaged, grown, shown on a card."""

import json

import pytest
from conftest import invoke, save_dense, write_texts
from test_join import EL, HU, TR, make_pack

from hf_moe_expand import Plan, join_expansions, make_card

WORDS = {
    "en": "the cat {} sits",
    "de": "die Katze {} sitzt",
    "el": "η γάτα {} κάθεται",
    "hu": "a macska {} ül",
    "tr": "kedi {}",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Texts, packs and `joined`, which joins el and hu."""
    home = tmp_path_factory.mktemp("home")
    for code, words in WORDS.items():
        write_texts(home / f"{code}.jsonl", [words.format(number) for number in range(20)])
    save_dense(home / "base")
    for seed, (code, plan) in enumerate({"el": EL, "hu": HU, "tr": TR}.items(), start=1):
        make_pack(home / f"qwen-{code}", home / "base", plan, seed)
    join_expansions([home / "qwen-el", home / "qwen-hu", home / "qwen-tr"], home / "joined")
    return home


def data(home, *codes):
    return [part for code in codes for part in ("--data", f"{code}={home / code}.jsonl")]


def test_inspection_and_card_show_the_packs(home, tmp_path):
    plan = Plan("mola", [2, 3, 1], old=["en"], new=["fr"], exclusive=True)
    lora = make_pack(tmp_path / "qwen-fr", home / "base", plan, 7, expert_kind="lora", lora_rank=4, lora_alpha=6.0)
    join_expansions([home / "joined", lora], tmp_path / "out")
    said = invoke("inspect", tmp_path / "out")
    assert "\npack 2              qwen-hu: hu; FFNs\n" in said
    assert "\npack 4              qwen-fr: fr; expert 0 with updates of rank 4, alpha 6\n" in said
    assert "\nexpansion 4         pack qwen-fr: mola on base: old en, de; new fr\n" in said
    card = str(make_card(tmp_path / "out"))
    assert "It joins 4 language packs" in card
    assert "| qwen-hu | hu | FFNs |\n" in card
    assert "| qwen-fr | fr | expert 0 with updates of rank 4, alpha 6 |\n" in card
    assert "Its expansions, in the order of the packs:" in card
    assert "expanded 4 times" not in card
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    fields["expansions"][0]["pack"] = "me/qwen-el"
    (tmp_path / "out" / "config.json").write_text(json.dumps(fields))
    assert "| [me/qwen-el](https://huggingface.co/me/qwen-el) | el |" in str(make_card(tmp_path / "out"))


def test_two_packs_new_languages_are_both_new(home, tmp_path):
    out = tmp_path / "e.json"
    models = (home / "base", home / "qwen-el", home / "qwen-hu")
    said = invoke("evaluate", *models, *data(home, "en", "el", "hu", "tr"), "--block-size", 32, "--out", out)
    found = json.loads(out.read_text())
    assert (found["old"], found["new"], found["unnamed"]) == (["en"], ["el", "hu"], ["tr"])
    assert "hu (new)" in said
