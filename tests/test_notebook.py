"""The notebook's cells run in order, on a tiny base in place of SmolLM2."""

import json
from pathlib import Path

import matplotlib
import pytest
from conftest import byte_tokenizer, save_dense

from hf_moe_expand.demo import real

NOTEBOOK = json.loads((Path(__file__).parents[1] / "examples" / "quickstart.ipynb").read_text("utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
# A tiny model with random weights tells no languages apart.
CONSTANTS = {
    "BASE": "tiny", "OUT": Path("out"), "STEPS": 2, "BLOCK": 32, "RATE": 1e-2, "SCORED": 200, "ANSWER": 4,
    "GATE": {"tokens": 300, "anchor_tokens": 100, "unseen_share": 0.99},
}  # fmt: skip


@pytest.mark.usefixtures("quick_gates")
def test_its_cells_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    save_dense(tmp_path / "tiny", "llama", max_position_embeddings=512)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tiny")
    whole = real.write_text_files
    monkeypatch.setattr(real, "write_text_files", lambda folder: shortened(whole(folder)))
    names: dict = {"__name__": "__main__"}
    exec(CODE[0], names)
    assert set(CONSTANTS) <= set(names)  # the first cell holds all that depends on the machine
    names.update(CONSTANTS)
    for cell in CODE[1:]:
        exec(cell, names)
    said = capsys.readouterr().out
    assert "after: base inside: " in said
    assert names["change"]["en"] == pytest.approx(0, abs=5)
    assert (tmp_path / "out" / "gained_and_lost.png").stat().st_size > 1000
    assert "model.safetensors" in names["pushed"].files
    assert "license: apache-2.0" in names["pushed"].card
    assert "es" in names["pushed"].card


def shortened(files):
    for file in files.values():
        file.write_text("".join(f"{chapter[:400]}\n" for chapter in file.read_text("utf-8").splitlines()[:20]), "utf-8")
    return files


def test_it_is_stored_without_results():
    """Small, and the same whoever ran it last."""
    for cell in NOTEBOOK["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert NOTEBOOK["nbformat"] == 4
