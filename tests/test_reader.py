"""Tensors in the files of a checkpoint; bases whose configuration and files say different things."""

import json
import resource
import shutil
import struct
from pathlib import Path

import pytest
import torch
from conftest import ADDED, byte_tokenizer, refused, save_dense, tiny_dense
from encoder_decoders import PLAN as PAIR_PLAN
from encoder_decoders import batch, tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_moe_expand import Plan, expand_checkpoint, expand_model, graft_delta, grow_checkpoint
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint import reader
from hf_moe_expand.checkpoint.average import average_checkpoints
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.reader import CheckpointReader, StoredTensor
from hf_moe_expand.checkpoint.source import load_config
from hf_moe_expand.checkpoint.stored import StoredModel
from hf_moe_expand.core.jsonfile import read_json
from hf_moe_expand.stages.distributed import save_whole


def test_checking_a_large_file_takes_no_memory(tmp_path):
    size = 40 << 30  # a sparse file
    header = json.dumps({"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert CheckpointReader(tmp_path).tensors["a"].nbytes == size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def sharded(folder: Path, where: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, folder / "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_an_index_may_name_tensors_that_no_file_holds_and_the_wrong_file(tmp_path):
    swapped = {"a": "model-2.safetensors", "b": "model-1.safetensors", "mtp.c": "model-1.safetensors"}
    reader = CheckpointReader(sharded(tmp_path / "checkpoint", swapped))
    assert (sorted(reader.tensors), reader.absent) == (["a", "b"], ["mtp.c"])


def test_the_same_bytes_in_another_shape_or_type_are_another_tensor(tmp_path):
    ones = torch.ones(2, 2, dtype=torch.int32)
    others = {"b": ones, "flat": ones.flatten(), "floats": ones.view(torch.float32)}
    save_file({"a": ones} | {name: tensor.clone() for name, tensor in others.items()}, tmp_path / "model.safetensors")
    stored = CheckpointReader(tmp_path).tensors
    assert [name for name in sorted(stored) if stored["a"].same_bytes(stored[name])] == ["a", "b"]


@pytest.mark.parametrize("dtype", reader.TORCH_DTYPES.values(), ids=str)
def test_values_are_finite_by_their_bits(dtype):
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    values = torch.tensor([0, -0.0, 1, least, -least, largest, -largest, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    assert [reader.is_finite(one) for one in values] == values.isfinite().tolist()
    assert reader.is_finite(values[:7])
    assert reader.is_finite(values[:0])
    assert not reader.is_finite((-values)[9:])


def test_of_two_sets_of_weights_it_reads_the_one_that_transformers_reads(tmp_path):
    folder = save_dense(tmp_path / "base")
    one = load_file(folder / "model.safetensors")
    other = {name: torch.zeros_like(value) for name, value in one.items()}
    save_file(other, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    reader = CheckpointReader(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(reader.tensor(name), theirs[name]) for name in reader.tensors)
    (folder / "model.safetensors").unlink()
    save_file({"stale": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")  # the index does not name it
    reader = CheckpointReader(folder)
    assert "stale" not in reader.tensors
    assert not any(reader.tensor(name).any() for name in reader.tensors)


def test_a_tensor_put_together_has_the_bytes_of_one_stored_whole(tmp_path, monkeypatch):
    """However large the pieces are in which both are read; and two of one file are not taken for the same."""
    monkeypatch.setattr(reader, "_CHUNK", 8)
    parts = {f"{name}{row}": torch.full((3,), float(row + 10 * (name == "b"))) for name in "ab" for row in range(2)}
    whole = torch.stack([parts["a0"], parts["a1"]])
    save_file({**parts, "whole": whole}, tmp_path / "model.safetensors")
    stored = CheckpointReader(tmp_path).tensors

    def together(name):
        rows = [stored[f"{name}{row}"] for row in range(2)]
        whole = lambda: torch.stack([row.load() for row in rows])  # noqa: E731
        return StoredTensor(name, "F32", (2, 3), rows[0].file, compute=whole)

    assert together("a").same_bytes(stored["whole"])
    assert stored["whole"].same_bytes(together("a"))
    assert not together("a").same_bytes(together("b"))


UNIFORM = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"])
GROUPS = Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]])
LARGEST = 4096  # bytes; the embedding has 32,896


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, a fine-tune of it in another type, and an expanded model."""
    root = tmp_path_factory.mktemp("surgery")
    save_dense(root / "base")
    save_dense(root / "instruct", dtype=torch.bfloat16)
    expand_checkpoint(root / "base", root / "expanded", UNIFORM)
    expand_checkpoint(save_dense(root / "olmoe", "olmoe", num_experts=4), root / "mixture", UNIFORM, **ADDED)
    return root


WORK = {
    "expand": lambda at, out: expand_checkpoint(at / "base", out, UNIFORM),
    "expand a mixture": lambda at, out: expand_checkpoint(at / "olmoe", out, UNIFORM, **ADDED),
    "export --expert of a mixture": lambda at, out: export_dense(at / "mixture", out, expert=0),
    "grow": lambda at, out: grow_checkpoint(
        at / "expanded", out, Plan("moe-lpr", [3, 3, 3], old=["en", "el"], new=["tr"], grows_from=[2, 2, 2])
    ),
    "graft": lambda at, out: graft_delta(at / "expanded", out, at / "base", at / "instruct"),
    "merge delta": lambda at, out: graft_delta(at / "base", out, at / "base", at / "instruct"),
    "merge average": lambda at, out: average_checkpoints([at / "expanded", at / "instruct"], out),
    "expand-branches": lambda at, out: expand_branches([at / "base", at / "instruct"], out, GROUPS),
    "expand-depth": lambda at, out: expand_depth(at / "base", out, 1),
    "export --expert": lambda at, out: export_dense(at / "expanded", out, expert=1),
    "diff": lambda at, out: compare_checkpoints(at / "base", at / "instruct"),
}


@pytest.mark.parametrize("name", WORK)
def test_no_step_reads_a_whole_tensor(place, tmp_path, monkeypatch, name):
    load = reader.StoredTensor.load

    # A mixture's own experts are put together.
    small = ("router", "classifier", *([".experts."] if "mixture" in name else []))

    def routing_only(self):
        assert any(word in self.name for word in small), f"{self.name} is read as a whole"
        return load(self)

    sizes = []

    def watched(method):
        def pieces(self, *arguments, **options):
            for piece in method(self, *arguments, **options):
                sizes.append(piece.nbytes if isinstance(piece, torch.Tensor) else len(piece))
                yield piece

        return pieces

    monkeypatch.setattr(reader, "_PIECE", LARGEST // 4)
    monkeypatch.setattr(reader, "_CHUNK", LARGEST)
    monkeypatch.setattr(reader.StoredTensor, "load", routing_only)
    for method in ("chunks", "pieces"):
        monkeypatch.setattr(reader.StoredTensor, method, watched(getattr(reader.StoredTensor, method)))
    WORK[name](place, tmp_path / "out")
    assert len(sizes) > 20
    assert max(sizes) <= LARGEST


@pytest.mark.parametrize(("backbone", "prefix"), [("bloom", "transformer."), ("llama", "model.")])
def test_expert_0_is_a_base_whose_names_lack_the_prefix(tmp_path, backbone, prefix):
    base = save_dense(tmp_path / "base", backbone)
    edit(base, lambda state: {name.removeprefix(prefix): value for name, value in state.items()})
    assert not any(name.startswith(prefix) for name in CheckpointReader(base).tensors)
    expand_checkpoint(base, tmp_path / "expanded", UNIFORM)
    export_dense(tmp_path / "expanded", tmp_path / "out", expert=0)
    found = compare_checkpoints(base, tmp_path / "out")
    assert found.same
    assert len(found.identical) == len(CheckpointReader(base).tensors)
    export_dense(tmp_path / "expanded", tmp_path / "same", expert=1)
    (name, *_) = CheckpointReader(tmp_path / "same").tensors
    edit(tmp_path / "same", lambda state: {**state, name: state[name] + 1})
    assert compare_checkpoints(base, tmp_path / "same").changed == [name]


PLAN = Plan("moe-lpr", [2, 1, 2], old=["en"], new=["el"])
BRANCHES = Plan("dmoe", [2, 2, 2], groups=[["en"], ["el"]])
TOKENS = torch.arange(40).view(2, 20)
TIED = ("qwen2", "gpt2", "opt")


def edit(folder: Path, tensors=None, **fields) -> Path:
    """Changes fields of config.json (None takes one out) and tensors of a checkpoint in one file."""
    config = json.loads((folder / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        state = load_file(folder / "model.safetensors")
        save_file(tensors(state) or state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_head(folder: Path, backbone: str, same: bool) -> Path:
    """A checkpoint whose configuration ties the head, which the file holds nevertheless."""
    model = tiny_dense(backbone, tie_word_embeddings=True)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (name,) = [key for key in model.all_tied_weights_keys if key.endswith("weight")]
    value = model.get_input_embeddings().weight.detach().clone()
    return edit(folder, lambda state: {**state, name: value if same else value.flip(0).contiguous()})


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits


@pytest.mark.parametrize("same", [True, False], ids=["the same head", "another head"])
@pytest.mark.parametrize("backbone", TIED)
def test_a_head_beside_a_tie_is_what_transformers_makes_of_it(tmp_path, backbone, same):
    base = with_head(tmp_path / "base", backbone, same)
    wanted = logits_of(base)
    report = expand_checkpoint(base, tmp_path / "out", PLAN)
    assert report.left_out == []
    torch.testing.assert_close(logits_of(tmp_path / "out"), wanted, rtol=0, atol=1e-5)
    stored = StoredModel(tmp_path / "out")
    assert stored.config.tie_word_embeddings == same
    dense = AutoModelForCausalLM.from_pretrained(base)
    in_memory = expand_model(dense, PLAN)
    with torch.no_grad():
        torch.testing.assert_close(in_memory(TOKENS).logits, wanted, rtol=0, atol=1e-5)
    in_memory.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits_of(tmp_path / "saved"), wanted, rtol=0, atol=1e-5)
    # What a stage writes, from the base and from an expanded checkpoint.
    for start in (base, tmp_path / "out"):
        model = AutoModelForCausalLM.from_pretrained(start)
        save_whole(model.state_dict(), StoredModel(start).config, tmp_path / "trained", start)
        assert compare_checkpoints(start, tmp_path / "trained").same
        torch.testing.assert_close(logits_of(tmp_path / "trained"), wanted, rtol=0, atol=1e-5)
        shutil.rmtree(tmp_path / "trained")


def test_every_verb_keeps_a_head_beside_a_tie(tmp_path):
    base = with_head(tmp_path / "base", "qwen2", same=False)
    wanted = logits_of(base)
    expand_checkpoint(base, tmp_path / "out", PLAN)
    more = Plan("moe-lpr", [3, 1, 3], old=["en", "el"], new=["tr"], grows_from=[2, 1, 2])
    made = {
        "average": lambda out: average_checkpoints([tmp_path / "out", base], out),
        "graft": lambda out: graft_delta(tmp_path / "out", out, base, base),
        "grown": lambda out: grow_checkpoint(tmp_path / "out", out, more),
        "depth": lambda out: expand_depth(base, out, 1),
        "expert": lambda out: export_dense(tmp_path / "out", out, expert=0),
        "branches": lambda out: expand_branches([base, base], out, BRANCHES),
    }
    for name, make in made.items():
        make(tmp_path / name)
        torch.testing.assert_close(logits_of(tmp_path / name), wanted, rtol=0, atol=1e-5, msg=name)
    assert not load_config(tmp_path / "expert").tie_word_embeddings


@pytest.mark.parametrize("shape", ["mt5", "m2m_100", "marian"])
def test_an_encoder_decoders_own_head_is_kept_too(tmp_path, shape):
    changes = {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": 300} if shape == "marian" else {}
    model = tiny(shape, **changes)
    model.save_pretrained(tmp_path / "base")
    head = model.get_input_embeddings().weight.detach().flip(0).contiguous()
    edit(tmp_path / "base", lambda state: {**state, "lm_head.weight": head})

    def outputs(folder: Path) -> torch.Tensor:
        with torch.no_grad():
            return AutoModelForSeq2SeqLM.from_pretrained(folder)(**batch()).logits

    wanted = outputs(tmp_path / "base")
    expand_checkpoint(tmp_path / "base", tmp_path / "out", PAIR_PLAN)
    torch.testing.assert_close(outputs(tmp_path / "out"), wanted, rtol=0, atol=1e-4)
    with torch.no_grad():
        in_memory = expand_model(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base"), PAIR_PLAN)
        torch.testing.assert_close(in_memory(**batch()).logits, wanted, rtol=0, atol=1e-4)
    trained = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    save_whole(trained.state_dict(), StoredModel(tmp_path / "out").config, tmp_path / "trained", tmp_path / "out")
    assert compare_checkpoints(tmp_path / "out", tmp_path / "trained").same
    torch.testing.assert_close(outputs(tmp_path / "trained"), wanted, rtol=0, atol=1e-4)


def test_tensors_that_the_model_does_not_have_are_said(tmp_path):
    base = save_dense(tmp_path / "base", "llama")
    more = {"mtp.fc.weight": torch.zeros(4, 4), "model.layers.3.mlp.up_proj.weight": torch.zeros(4, 4)}
    edit(base, lambda state: {**state, **more})
    assert expand_checkpoint(base, tmp_path / "out", PLAN).left_out == sorted(more)


def test_an_index_may_name_what_no_file_holds_unless_the_model_has_it(tmp_path):
    tiny_dense("llama").save_pretrained(tmp_path / "base", max_shard_size="20KB")
    index = tmp_path / "base" / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["mtp.fc.weight"] = fields["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(fields))
    assert expand_checkpoint(tmp_path / "base", tmp_path / "out", PLAN).left_out == ["mtp.fc.weight"]
    file = tmp_path / "base" / fields["weight_map"]["lm_head.weight"]
    state = {name: value for name, value in load_file(file).items() if name != "lm_head.weight"}
    save_file(state, file, metadata={"format": "pt"})
    refused(expand_checkpoint, tmp_path / "base", tmp_path / "no", PLAN, says=r"tensors are missing from the")


@pytest.mark.parametrize(
    ("fields", "message"),
    {
        "rows": ({"vocab_size": 300}, r"embed_tokens.weight' has shape \[257, 32\], .* asks for \[300, 32\]"),
        "a layer too many": (
            {"num_hidden_layers": 4, "layer_types": None}, r"tensors are missing .*model\.layers\.3\.",
        ),
        "an untied head that is not there": (
            {"tie_word_embeddings": False}, "lm_head.weight. If its head is the embedding, set tie_word_embeddings",
        ),
        "a width": ({"intermediate_size": 40}, r"has shape \[48, 32\], but the configuration asks for \[40, 32\]"),
    }.values(),
)  # fmt: skip
def test_what_the_files_lack_is_refused_before_anything_is_written(tmp_path, fields, message):
    base = edit(save_dense(tmp_path / "base", "qwen2", tie_word_embeddings=True), **fields)
    plan = Plan("moe-lpr", [2] * fields.get("num_hidden_layers", 3), old=["en"], new=["el"])
    refused(expand_checkpoint, base, tmp_path / "out", plan, says=message)
    assert not (tmp_path / "out").exists()


def test_json_files_with_a_byte_order_mark_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"a":\r\n1}\r\n', encoding="utf-8-sig")
    assert read_json(tmp_path / "config.json", "x") == {"a": 1}


@pytest.mark.parametrize("said", ["bfloat16", "float16", None])
def test_weights_stay_in_their_own_type_whatever_the_configuration_says(tmp_path, said):
    base = edit(save_dense(tmp_path / "base", "llama"), dtype=said, torch_dtype=said)
    expand_checkpoint(base, tmp_path / "out", PLAN)
    assert {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("dtype") == said
