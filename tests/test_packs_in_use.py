"""Packs that are evaluated together."""

import json

from conftest import invoke, write_texts
from test_join import EL, HU, make_pack

WORDS = {
    "en": "the cat {} sits", "de": "die Katze {} sitzt", "el": "η γάτα {} κάθεται", "hu": "a macska {} ül",
    "tr": "kedi {}",
}  # fmt: skip


def test_two_packs_new_languages_are_both_new(base, tmp_path):
    out, data = tmp_path / "e.json", []
    packs = [make_pack(tmp_path / f"pack-{seed}", base, plan, seed) for seed, plan in enumerate((EL, HU), start=1)]
    for code in ("en", "el", "hu", "tr"):
        texts = [WORDS[code].format(number) for number in range(20)]
        data += ["--data", f"{code}={write_texts(tmp_path / f'{code}.jsonl', texts)}"]
    said = invoke("evaluate", base, *packs, *data, "--block-size", 32, "--out", out)
    found = json.loads(out.read_text())
    assert (found["old"], found["new"], found["unnamed"]) == (["en"], ["el", "hu"], ["tr"])
    assert "hu (new)" in said
