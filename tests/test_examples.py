"""The examples run, on a tiny model, through their command lines; and say what they need."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_python, save_dense, write_texts
from safetensors.torch import load_file

from hf_moe_expand import Plan, expand_checkpoint, expand_from_peft
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
    expand_from_peft(folder / "tiny", {"el": folder / "adapter"}, folder / "adapted", ["en"])
    base, adapted = (load_file(folder / name / "model.safetensors") for name in ("tiny", "adapted"))
    assert len(adapted) == len(base) + 2 * 7 * 3


def test_generate_needs_nothing_but_transformers(folder):
    lines = run("generate.py", folder, "model", "The cat", "Η γάτα κάθισε", "--tokens", "3", forbid="hf_moe_expand")
    assert "The cat" in lines
    assert "Η γάτα κάθισε" in lines


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_tell_how_to_run_them(example):
    assert f"python examples/{example.name} " in (ast.get_docstring(ast.parse(example.read_text("utf-8"))) or "")
