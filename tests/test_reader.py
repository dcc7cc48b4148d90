"""Tensors in the files of a checkpoint, and checkpoints as tables, which rules rewrite; bases whose configuration and
files say different things; the history in config.json, damaged or with unknown keys."""

import copy
import json
import re
import resource
import struct
from pathlib import Path

import pytest
import torch
from conftest import ADDED, TABLES, byte_tokenizer, load, refused, save_dense, tiny_dense
from encoder_decoders import PLAN as PAIR_PLAN
from encoder_decoders import batch, tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_moe_expand import Plan, PostPretrainConfig, expand_checkpoint, expand_model, graft_delta, grow_checkpoint
from hf_moe_expand.baselines.branches import expand_branches
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint import reader, table
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.export import export_dense
from hf_moe_expand.checkpoint.merge import average_checkpoints
from hf_moe_expand.checkpoint.reader import CheckpointReader, StoredTensor
from hf_moe_expand.checkpoint.records import CHANGES_EVERYTHING, ExpansionRecord, History, StageRecord
from hf_moe_expand.checkpoint.stored import StoredModel
from hf_moe_expand.checkpoint.table import Copy, Given, Mix, New, Rows, mean_of, opened, rewrite
from hf_moe_expand.core.jsonfile import read_json
from hf_moe_expand.core.schema import read
from hf_moe_expand.stages import training_stages
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


def saved_by_a_stage(start: Path, out: Path) -> None:
    save_whole(AutoModelForCausalLM.from_pretrained(start).state_dict(), StoredModel(start).config, out, start)
    assert compare_checkpoints(start, out).same


@pytest.mark.parametrize(("backbone", "same"), [("qwen2", True), ("qwen2", False), ("gpt2", False), ("opt", False)])
def test_a_head_beside_a_tie_is_what_transformers_makes_of_it(tmp_path, backbone, same):
    base, expanded = with_head(tmp_path / "base", backbone, same), tmp_path / "expanded"
    assert expand_checkpoint(base, expanded, PLAN).left_out == []
    assert StoredModel(expanded).config.tie_word_embeddings == same
    more = Plan("moe-lpr", [3, 1, 3], old=["en", "el"], new=["tr"], grows_from=[2, 1, 2])
    made = {
        "in memory": lambda out: expand_model(AutoModelForCausalLM.from_pretrained(base), PLAN).save_pretrained(out),
        "dense stage": lambda out: saved_by_a_stage(base, out),
        "stage": lambda out: saved_by_a_stage(expanded, out),
        "average": lambda out: average_checkpoints([expanded, base], out),
        "graft": lambda out: graft_delta(expanded, out, base, base),
        "grown": lambda out: grow_checkpoint(expanded, out, more),
        "depth": lambda out: expand_depth(base, out, 1),
        "expert": lambda out: export_dense(expanded, out, expert=0),
        "branches": lambda out: expand_branches([base, base], out, BRANCHES),
    }
    for name in made if backbone == "qwen2" else ("in memory", "dense stage", "stage"):
        made[name](tmp_path / name)
        torch.testing.assert_close(logits_of(tmp_path / name), logits_of(base), rtol=0, atol=1e-5, msg=name)
    torch.testing.assert_close(logits_of(expanded), logits_of(base), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", ["mt5", "m2m_100", "marian"])
def test_an_encoder_decoders_own_head_is_kept_too(tmp_path, shape):
    changes = {"share_encoder_decoder_embeddings": True, "decoder_vocab_size": 300} if shape == "marian" else {}
    model = tiny(shape, **changes)
    model.save_pretrained(tmp_path / "base")
    head = model.get_input_embeddings().weight.detach().flip(0).contiguous()
    edit(tmp_path / "base", lambda state: {**state, "lm_head.weight": head})
    expand_checkpoint(tmp_path / "base", tmp_path / "out", PAIR_PLAN)
    dense, trained = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name) for name in ("base", "out"))
    save_whole(trained.state_dict(), StoredModel(tmp_path / "out").config, tmp_path / "trained", tmp_path / "out")
    assert compare_checkpoints(tmp_path / "out", tmp_path / "trained").same
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "trained")
    with torch.no_grad():
        wanted = dense(**batch()).logits
        for made in (trained, loaded, expand_model(dense, PAIR_PLAN)):
            torch.testing.assert_close(made(**batch()).logits, wanted, rtol=0, atol=1e-4)


def test_tensors_that_the_model_does_not_have_are_said(tmp_path):
    base = save_dense(tmp_path / "base", "llama")
    more = {"mtp.fc.weight": torch.zeros(4, 4), "model.layers.3.mlp.up_proj.weight": torch.zeros(4, 4)}
    edit(base, lambda state: {**state, **more})
    assert expand_checkpoint(base, tmp_path / "out", PLAN).left_out == sorted(more)


def test_an_index_may_name_the_wrong_file_and_what_no_file_holds_unless_the_model_has_it(tmp_path):
    tiny_dense("llama").save_pretrained(tmp_path / "base", max_shard_size="20KB")
    index = tmp_path / "base" / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    files, file = fields["weight_map"], tmp_path / "base" / fields["weight_map"]["lm_head.weight"]
    files["mtp.fc.weight"] = files["model.embed_tokens.weight"]
    files["lm_head.weight"], files["model.embed_tokens.weight"] = files["mtp.fc.weight"], file.name
    index.write_text(json.dumps(fields))
    assert CheckpointReader(tmp_path / "base").absent == ["mtp.fc.weight"]
    assert expand_checkpoint(tmp_path / "base", tmp_path / "out", PLAN).left_out == ["mtp.fc.weight"]
    state = {name: value for name, value in load_file(file).items() if name != "lm_head.weight"}
    save_file(state, file, metadata={"format": "pt"})
    refused(expand_checkpoint, tmp_path / "base", tmp_path / "no", PLAN, says=r"tensors are missing from the")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 300}, r"embed_tokens.weight' has shape \[257, 32\], .* asks for \[300, 32\]"),
        ({"num_hidden_layers": 4, "layer_types": None}, r"tensors are missing .*model\.layers\.3\."),
        ({"tie_word_embeddings": False}, r"tensors are missing .*lm_head\.weight"),
    ],
)
def test_what_the_files_lack_is_refused_before_anything_is_written(tmp_path, fields, message):
    base = edit(save_dense(tmp_path / "base", "qwen2", tie_word_embeddings=True), **fields)
    plan = Plan("moe-lpr", [2] * fields.get("num_hidden_layers", 3), old=["en"], new=["el"])
    refused(expand_checkpoint, base, tmp_path / "out", plan, says=message)
    assert not (tmp_path / "out").exists()


def test_json_files_with_a_byte_order_mark_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"a":\r\n1}\r\n', encoding="utf-8-sig")
    assert read_json(tmp_path / "config.json", "x") == {"a": 1}


@pytest.mark.parametrize("said", ["bfloat16", None])
def test_weights_stay_in_their_own_type_whatever_the_configuration_says(tmp_path, said):
    base = edit(save_dense(tmp_path / "base", "llama"), dtype=said, torch_dtype=said)
    expand_checkpoint(base, tmp_path / "out", PLAN)
    assert {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("dtype") == said


EXPANSION = {"method": "moe-lpr", "old_languages": ["en"], "new_languages": ["el"]}
# As `to_dict` orders its keys; the last two of each are none that this release knows.
FULL = {
    "method": "dmoe-adapt", "old_languages": ["en", "el"], "new_languages": ["tr"], "base_model": "me/base",
    "experts_per_layer": [3, 1, 3], "classifier_layers": [2], "seed": 0,
    "expert_init": "branches", "branches": ["a", "b"], "copied_expert": 1, "copied_experts": {"0": 2, "2": 0},
    "base_parameters": 10, "parameters": 20, "versions": {"torch": "2.13"},
    "stages": [
        {
            "stage": "review", "steps": 3, "documents": {"en": 5}, "tokens": {"en": 70}, "seed": 1,
            "settings": {"block_size": 16, "training": {}}, "later": [1, None], "and": {"more": "text"},
        },
        {"stage": "graft", "settings": {"instruct": "b"}},
    ],
    "later": {"key": [1.5, None]}, "and": None,
}  # fmt: skip


def test_unknown_keys_are_kept():
    for entry in (EXPANSION, FULL):
        record = read(ExpansionRecord, entry)
        written = record.to_dict()
        assert {name: written[name] for name in entry} == entry
        assert read(ExpansionRecord, written) == record
    assert json.dumps(written) == json.dumps(FULL)
    assert set(record.model_extra) == set(record.stages[0].model_extra) == {"later", "and"}


@pytest.mark.parametrize(("expansions", "message"), TABLES["damaged histories"])
def test_damaged_histories_name_the_entry(expansions, message):
    refused(History.of, {"expansions": expansions}, says=re.escape(f"config.json: {message}"))


def test_every_stage_that_trains_everything_is_known_to_change_everything():
    everything = {stage.name for stage in training_stages() if stage.trains.everything}
    assert {"group", "joint"} <= everything <= {*CHANGES_EVERYTHING}
    for stage in training_stages():
        assert StageRecord(stage=stage.name).changes_everything == (stage.name in everything)
    name, trained = PostPretrainConfig(everything=True).trained()
    assert trained.everything
    assert name in CHANGES_EVERYTHING


def drop_last_experts(model, out=None):
    """The model without the new experts of its last layer, of which expert 0 is left."""
    (source,) = opened([model], out, overwrite=False)
    config = copy.deepcopy(source.config)
    config.num_experts_per_layer = [*config.num_experts_per_layer[:-1], 1]
    home = {place.dense: key for key, place in source.places.items() if place.expert in (None, 0)}

    def rule(place):
        return Copy(place.key if place.key in source.shapes else home[place.key])

    return rewrite([source], config, rule, out, record=StageRecord(stage="drop"), title="drop")


@torch.no_grad()
def test_an_operation_of_ones_own(place, tmp_path):
    expanded = place / "expanded"
    out = drop_last_experts(expanded, tmp_path / "out")
    before, after = load_file(expanded / "model.safetensors"), load_file(out / "model.safetensors")
    last = "model.layers.2.mlp."
    assert all(torch.equal(value, before[name]) for name, value in after.items() if not name.startswith(last))
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(after[f"{last}{name}.weight"], before[f"{last}experts.0.{name}.weight"])
    assert sum(name.startswith(last) for name in after) == 3
    model, loaded = load(out), load(expanded)
    assert model.config.expansions[0]["stages"] == [{"stage": "drop"}]
    in_memory = drop_last_experts(loaded)
    assert torch.equal(in_memory(TOKENS).logits, model(TOKENS).logits)
    assert in_memory.model.norm.weight.data_ptr() == loaded.model.norm.weight.data_ptr()
    assert loaded.config.num_experts_per_layer == [2, 2, 2]


def test_each_entry_against_the_obvious_arithmetic(place, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "_PIECE", 100)  # tensors come in several pieces, the last one shorter
    one, two = "model.layers.0.mlp.router.weight", "model.layers.1.mlp.router.weight"
    rules = {
        "model.norm.weight": Given(torch.full((32,), 0.5)),
        one: Mix([Copy(one), Copy(two)], [0.25, 0.75]),
        two: Rows(Copy(one), [1], more=lambda: torch.ones(1, 32)),
        "lm_head.weight": New(lambda: torch.full((257, 32), 1 / 3, dtype=torch.float64), "F32"),
    }
    (source,) = opened([place / "expanded"], tmp_path / "out", overwrite=False)
    out = rewrite([source], source.config, lambda place: rules.get(place.key, Copy(place.key)), tmp_path / "out")
    before, after = load_file(place / "expanded" / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert {name for name in after if not torch.equal(before[name], after[name])} == rules.keys()
    assert torch.equal(after["model.norm.weight"], torch.full((32,), 0.5))
    torch.testing.assert_close(after[one], 0.25 * before[one] + 0.75 * before[two], rtol=0, atol=1e-7)
    assert torch.equal(after[two], torch.cat([before[one][1:2], torch.ones(1, 32)]))
    assert torch.equal(after["lm_head.weight"], torch.full((257, 32), 1 / 3))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (Copy("model.nothing"), "expanded: has no tensor 'model.nothing', of which 'model.norm.weight' is made"),
        (Copy("lm_head.weight"), r"'lm_head.weight' has shape \[257, 32\], but 'model.norm.weight' .* needs \[32\]"),
        (Rows(Copy("model.norm.weight"), [0, 1]), r"'model.norm.weight' of the new model needs \[32\]"),
        (New(lambda: torch.full((32,), torch.inf), "F32"), "the result is not finite in F32"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(place, tmp_path, entry, says):
    (source,) = opened([place / "expanded"], tmp_path / "out", overwrite=False)

    def rule(place):
        return entry if place.key == "model.norm.weight" else Copy(place.key)

    refused(rewrite, [source], source.config, rule, tmp_path / "out", says=says)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("weights", [[0.0, 1.0], [1.0, 0.0]])
def test_a_mean_with_all_weight_on_one_tensor_has_its_bits(weights):
    pieces = torch.randn(2, 999, generator=torch.Generator().manual_seed(0)) * 10 ** torch.arange(-4.0, 5.0).repeat(111)
    assert torch.equal(mean_of(weights)(*pieces), pieces[weights.index(1.0)])
