"""Checkpoints that the code of commit 1095de0 wrote (checkpoints/README.md) load, compute what they did, and grow."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import refused
from matrix.forms import lines
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_moe_expand import AdaptConfig, Plan, PostPretrainConfig, adapt_language, fit_gates, grow_checkpoint, train_stage
from hf_moe_expand.analysis.settings import GateSettings
from hf_moe_expand.checkpoint.records import History
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.report.inspection import inspect_checkpoint

STORED = Path(__file__).resolve().parent / "checkpoints"
TOLERANCE = 1e-3  # stored in halves, run in float32: a change of 1e-6 in the embeddings moves logits by up to 2e-4
TRAINING = {"block_size": 16, "per_device_train_batch_size": 2, "disable_tqdm": True}
# Of each kind that grows by a plan: the experts of its layers before and after, and the layers with classifiers.
GROWN = {
    "moe_lpr": ([2, 2], [3, 3], []),
    "layer_moe": ([4, 4], [5, 6], [0, 1]),
    "lora": ([3, 2], [4, 3], [1]),
    "added": ([3, 2], [4, 3], [1]),
    "expansion_only": ([3, 2], [4, 3], []),
    "encoder_decoder": ([2, 1, 2, 2], [3, 1, 3, 4], [0, 3]),
}
ALPHABETS = {"a": "bcdfghj", "b": "BCDFGHJ", "c": "0123456", "d": "klmpqrv"}


def copied(kind, place):
    """A checkpoint in a folder of the test's own, with a tokenizer and with the base that it needs."""
    folder = Path(shutil.copytree(STORED / kind, place / kind))
    for file in (STORED / "base").glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    if kind == "expansion_only":  # as if the base were on the hub: config.json says where it is
        config = json.loads((folder / "config.json").read_text("utf-8"))
        config["expansion_base"]["base_model"] = str(shutil.copytree(STORED / "base", place / "base"))
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def load(folder):
    config = json.loads((folder / "config.json").read_text("utf-8"))
    loads = AutoModelForSeq2SeqLM if config.get("is_encoder_decoder") else AutoModelForCausalLM
    model, info = loads.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def recorded(kind):
    return json.loads((STORED / f"{kind}.json").read_text("utf-8"))


@torch.no_grad()
def logits(model, **more):
    ids = torch.tensor([recorded("moe_lpr")["input_ids"]])
    if model.config.is_encoder_decoder:
        more["decoder_input_ids"] = ids
    return model(input_ids=ids, **more).logits[0, :, ::16]


def as_recorded(found, kind, name="logits_of_every_16th_token"):
    torch.testing.assert_close(found, torch.tensor(recorded(kind)[name]), rtol=0, atol=TOLERANCE)


def grown(folder, before, after, classifiers=(), **more):
    plan = Plan("own", after, list(classifiers), old=["en", "el"], new=["hi"], grows_from=before, **more)
    model = load(grow_checkpoint(folder, folder.with_name("grown"), plan))
    assert model.config.num_experts_per_layer == after
    return model


@pytest.mark.parametrize("kind", GROWN)
def test_it_computes_what_it_did_and_grown_its_old_part_does(tmp_path, kind):
    folder = copied(kind, tmp_path)
    as_recorded(logits(load(folder)), kind)
    model = grown(folder, *GROWN[kind], encoder_layers=2 if kind == "encoder_decoder" else 0)
    with model.use_expansion(len(History.of(model.config)) - 1):
        as_recorded(logits(model), kind)


def test_a_dmoe_takes_a_further_language(tmp_path):
    folder = copied("dmoe", tmp_path)
    text = LanguageText("hi", str(STORED / "el.jsonl"))
    done = adapt_language(folder, tmp_path / "grown", text, AdaptConfig(max_steps=1, sample_tokens=50, **TRAINING))
    before, after = load(folder), load(tmp_path / "grown")
    as_recorded(logits(before), "dmoe")
    assert after.config.num_experts_per_layer == [3, 3]
    assert done.expert == 2
    for expert in (0, 1):
        with before.use_expert(expert), after.use_expert(expert):
            assert torch.equal(logits(before), logits(after))


def test_joined_packs_grow(tmp_path):
    folder = copied("packs", tmp_path)
    before, after = load(folder), grown(folder, [3, 4], [4, 5], exclusive=True)
    as_recorded(logits(before, languages="hu"), "packs")  # text that nobody told took the newest pack's experts
    for language in ("en", "el", "hu"):
        assert torch.equal(logits(after, languages=[language]), logits(before, languages=[language]))
    as_recorded(logits(before, languages=["el"]), "packs", "pack_el_alone")


def test_joined_packs_with_routers_of_all_experts_are_refused(tmp_path):
    folder = copied("packs", tmp_path)
    config = json.loads((folder / "config.json").read_text("utf-8")) | {"exclusive_experts": False}
    (folder / "config.json").write_text(json.dumps(config))
    for read, error in ((load, ValueError), (inspect_checkpoint, InputError)):
        refused(read, folder, raises=error, says="joins packs whose routers choose among all experts, of an earlier")


@pytest.mark.usefixtures("given_anchors_alone")
def test_fitted_gates_in_all_layers_are_refused_and_give_way_to_one(tmp_path):
    """No code runs this format any more; `gates` makes a model of it with the same base and the same experts."""
    folder = copied("fitted_gates", tmp_path)
    refused(load, folder, says=r"gates in all layers, of an earlier version.*`hf-moe-expand gates", raises=ValueError)
    plan = Plan("own", [3, 3, 3], old=["en", "el"], new=["hi"], grows_from=[2, 2, 2])
    for call, *given in ((grow_checkpoint, folder, tmp_path / "no", plan), (inspect_checkpoint, folder)):
        refused(call, *given, says=r"hf-moe-expand gates MODEL OUT --data LANGUAGE=FILE")
    texts = {"en": lines("aeioustn", 20), "el": lines("αβγδεζηθ", 20)}
    anchors = {f"q{letter}{letter}": lines(text, 10) for letter, text in ALPHABETS.items()}
    settings = GateSettings(unseen_share=0.5, tokens=400, anchor_tokens=200)
    fit_gates(folder, tmp_path / "gated", texts, anchors, settings)
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "gated"))
    layer = json.loads((tmp_path / "gated" / "config.json").read_text("utf-8"))["parts"]["gate"]["layer"]
    named = {name for name in before if "classifier" not in name}
    assert after.keys() == named | {f"model.layers.{layer}.language_gate.{kind}" for kind in ("weight", "bias")}
    assert all(torch.equal(before[name], after[name]) for name in named)
    model, wanted = load(tmp_path / "gated"), recorded("fitted_gates")
    ids = torch.tensor([wanted["input_ids"]])
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, eos_token_id=None)
    assert written.shape == (1, ids.shape[1] + 12)
    again = grown(tmp_path / "gated", [2, 2, 2], [3, 3, 3])
    assert again.config.language_gate is None
    for language in ("en", "el"):
        torch.testing.assert_close(logits(again, languages=[language]), logits(model, languages=[language]))


def test_an_interrupted_training_is_refused_and_left_as_it_is(tmp_path, monkeypatch):
    copied("moe_lpr", tmp_path)
    shutil.copytree(STORED / "trained.training", tmp_path / "trained.training")
    shutil.copyfile(STORED / "el.jsonl", tmp_path / "el.jsonl")
    monkeypatch.chdir(tmp_path)
    config = PostPretrainConfig(max_steps=2, save_steps=1, learning_rate=1e-2, **TRAINING)
    before = sorted(file.name for file in (tmp_path / "trained.training").rglob("*"))
    refused(
        train_stage, "moe_lpr", "trained", {"el": LanguageText("el", "el.jsonl")}, config,
        says="holds an interrupted training of another version: finish it with that one",
    )  # fmt: skip
    assert sorted(file.name for file in (tmp_path / "trained.training").rglob("*")) == before
