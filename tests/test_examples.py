"""The examples and the notebook run, on a tiny model; and the examples say what they need."""

import ast
import json
import shutil
from pathlib import Path

import matplotlib
import pytest
import torch
from conftest import byte_tokenizer, run_python, save_dense, write_texts
from safetensors.torch import load_file

from hf_moe_expand import Plan, expand_checkpoint, expand_tuned
from hf_moe_expand.demo import real
from hf_moe_expand.hub.published import published_files

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXTS = {"en": "The cat sat on the mat and looked. ", "el": "Η γάτα κάθισε στο χαλί και κοίταξε. "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    save_dense(folder / "tiny")
    expand_checkpoint(folder / "tiny", folder / "model", Plan("layer-moe", [3, 1, 2], [0], old=["en"], new=["el"]))
    for code, text in TEXTS.items():
        write_texts(folder / f"{code}.jsonl", [text * 3] * 8)
    rows = [{"language": code, "prompt": text[:8], "completion": text[8:20]} for code, text in TEXTS.items()] * 4
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(name, folder, *arguments, forbid=""):
    """Runs an example in `folder`, where importing `forbid` fails; returns what it prints."""
    program = "import runpy\n"
    program += f"sys.modules[{forbid!r}] = None\n" if forbid else ""
    program += "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    return run_python(program, str(EXAMPLES / name), *arguments, cwd=folder)


def changed(folder, out):
    before, after = load_file(folder / "model" / "model.safetensors"), load_file(folder / out / "model.safetensors")
    assert before.keys() == after.keys()
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


def test_train_reviews_and_its_result_can_be_published(folder):
    shutil.rmtree(folder / "out", ignore_errors=True)
    data = ["--old", "en=en.jsonl", "--new", "el=el.jsonl"]
    said = run("train.py", folder, "model", "out", *data, "--steps", "2", "--block-size", "16")
    assert "review: " in said
    assert "language_prior_loss" in said
    assert "classifier_loss" in said
    moved = changed(folder, "out")
    assert moved
    assert all(name.endswith(("router.weight", "classifier.weight")) for name in moved)
    assert {"model.safetensors", "modeling_layer_moe.py", "tokenizer.json"} <= set(published_files(folder / "out"))


def test_train_trl(folder):
    said = run("train_trl.py", folder, "model", "chat", "--data", "chat.jsonl", "--steps", "2", "--max-length", "32")
    assert "mean loss" in said
    assert any(".experts." in name for name in changed(folder, "chat"))


def test_train_adapter(folder):
    options = ["--data", "el.jsonl", "--steps", "2", "--max-length", "32", "--batch-size", "2", "--rank", "2"]
    run("train_adapter.py", folder, "tiny", "adapter", *options, forbid="hf_moe_expand")
    expand_tuned(folder / "tiny", {"el": folder / "adapter"}, folder / "adapted", ["en"])
    base, adapted = (load_file(folder / name / "model.safetensors") for name in ("tiny", "adapted"))
    assert len(adapted) == len(base) + 2 * 7 * 3


def test_generate_needs_nothing_but_transformers(folder):
    lines = run("generate.py", folder, "model", "The cat", "Η γάτα κάθισε", "--tokens", "3", forbid="hf_moe_expand")
    assert "The cat" in lines
    assert "Η γάτα κάθισε" in lines


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_tell_how_to_run_them(example):
    assert f"python examples/{example.name} " in (ast.get_docstring(ast.parse(example.read_text("utf-8"))) or "")


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
