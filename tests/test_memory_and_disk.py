"""What `validate` says of a training: memory, bfloat16 by device, files, tokens, room on a disk."""

import errno
import gzip
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers.trainer
from conftest import byte_tokenizer, invoke, refused, save_dense, tiny_config, write_texts
from datasets import Dataset
from safetensors.torch import load_file
from transformers import Trainer

from hf_moe_expand import (
    DenseConfig,
    LayerMoEForCausalLM,
    Plan,
    PostPretrainConfig,
    ReviewConfig,
    expand_checkpoint,
    freeze,
    run_recipe,
    train_stage,
    validate_recipe,
)
from hf_moe_expand.checkpoint.stored import network_of
from hf_moe_expand.core.disk import peak, readable_size
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.data.tokens import tokens_at_hand
from hf_moe_expand.inference.memory import least_memory, training_disk
from hf_moe_expand.inference.models import load_config
from hf_moe_expand.report.inspection import inspect_checkpoint
from hf_moe_expand.runs import pipeline, recommended
from hf_moe_expand.runs.recipe import Recipe
from hf_moe_expand.runs.steps import stage as stage_steps
from hf_moe_expand.stages import keywords as of_stages
from hf_moe_expand.stages import prepare
from hf_moe_expand.trainers.bfloat16 import has_bfloat16

QUICK = {"block_size": 16, "per_device_train_batch_size": 2, "disable_tqdm": True}
PLAN = Plan("layer-moe", [2, 1, 3], [2], old=["en"], new=["el"])
RECIPE = """{{base: {root}/base, output: {out}/run, old: {{en: {root}/en.jsonl}}, new: {{el: {root}/el.jsonl}},
plan: {{method: moe-lpr, experts: 3}},
post_pretrain: {{block_size: 16, max_steps: 3, save_steps: 1, per_device_train_batch_size: 2}},
review: {{block_size: 16, max_steps: 1, save_strategy: "no", per_device_train_batch_size: 2}}}}"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("costs")
    save_dense(root / "base", dtype=torch.bfloat16, tie_word_embeddings=False)
    write_texts(root / "en.jsonl", [f"the cat {i} sits" for i in range(30)])
    write_texts(root / "el.jsonl", [f"η γάτα {i} κάθεται" for i in range(60)])
    expand_checkpoint(root / "base", root / "expanded", PLAN)
    return root


def disk_with(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def tensor_bytes(folder):
    """Bytes of the weights, and of the two moments of each weight that an optimizer keeps."""
    found = sum(tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values())
    if (folder / "optimizer.pt").is_file():
        state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
        found += sum(t.nbytes for moments in state.values() for name, t in moments.items() if name != "step")
    return found


def of_the_stage(checkpoint, config):
    """Bytes of a trained checkpoint and of the training checkpoints beside it."""
    return tensor_bytes(checkpoint) + training_disk(network_of(load_config(checkpoint)), config)


EVERY, ALL = {"max_steps": 3, "save_steps": 1}, {"save_total_limit": None}


# `least` is less than 1 where no interrupt saves the checkpoint that there is room for.
@pytest.mark.parametrize(
    ("model", "stage", "options", "least"),
    [
        ("expanded", PostPretrainConfig, EVERY, 0.8),  # experts that no token met have no moments
        ("expanded", PostPretrainConfig, EVERY | ALL | {"optim": "sgd"}, 1),
        ("base", DenseConfig, {"max_steps": 4, "save_steps": 0.5} | ALL, 2 / 3),
        ("base", DenseConfig, {"max_steps": 3, "save_steps": 500}, 1 / 2),
        ("base", DenseConfig, {"max_steps": 3, "save_strategy": "no"}, 1),
        ("base", DenseConfig, {"num_train_epochs": 2, "save_strategy": "epoch"} | ALL, 2 / 3),
    ],
)
def test_training_checkpoints_have_the_counted_bytes(root, tmp_path, monkeypatch, model, stage, options, least):
    found, real = [0], transformers.trainer.rotate_checkpoints

    def counted(output_dir, *args, **kwargs):  # before the oldest is removed
        found.append(sum(map(tensor_bytes, Path(output_dir).glob("checkpoint-*"))))
        real(output_dir, *args, **kwargs)

    monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", counted)
    config = stage(**QUICK, **options)
    most = training_disk(network_of(load_config(root / model)), config)
    train_stage(root / model, tmp_path / "out", {"el": LanguageText("el", str(root / "el.jsonl"))}, config)
    assert least * most <= max(found) <= most


def test_training_is_refused_where_the_disk_has_too_little_room(root, tmp_path, monkeypatch):
    config, text = PostPretrainConfig(**EVERY, **QUICK), {"el": LanguageText("el", str(root / "el.jsonl"))}
    needed = of_the_stage(root / "expanded", config)
    disk_with(monkeypatch, needed - 1)
    with monkeypatch.context() as patch:
        patch.setattr(LanguageText, "load", lambda *_: pytest.fail("read text in vain"))
        said = rf"out: needs {readable_size(needed)} for .*, 1 byte more than the disk has free"
        refused(train_stage, root / "expanded", tmp_path / "out", text, config, says=said)
        patch.setenv("ACCELERATE_USE_FSDP", "true")  # a split model is gathered
        said = f"out: needs {readable_size(needed + tensor_bytes(root / 'expanded'))} for "
        refused(train_stage, root / "expanded", tmp_path / "out", text, config, says=said)
    disk_with(monkeypatch, needed)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Trainer, "save_model", full)
    refused(train_stage, root / "expanded", tmp_path / "out", text, config, says=r"out\.training: the disk is full")


def test_a_run_writes_what_validate_says(root, tmp_path, monkeypatch):
    recipe = Recipe.of_text(RECIPE.format(root=root, out=tmp_path), "recipe.yaml")

    def most():
        said = "\n".join(validate_recipe(recipe))
        assert re.search(r"post_pretrain: about 3 steps of 32 tokens; passes over the text: .*about: el ", said)
        needed = peak(pipeline._checked(recipe)[1])
        assert f"disk: up to {readable_size(needed)} for checkpoints" in said
        return needed

    needed = most()
    disk_with(monkeypatch, needed - 1)
    too_little = rf"run: needs {readable_size(needed)} for checkpoints.*, 1 byte more than"
    for do in (validate_recipe, run_recipe):
        refused(do, recipe, says=too_little)
    assert validate_recipe(recipe, here=False)  # for another machine
    assert not (tmp_path / "run").exists()
    disk_with(monkeypatch, needed)
    said = []
    run_recipe(recipe, said.append)
    assert [line for line in said if line.startswith("warning: post_pretrain: fewer than 50 steps")] == said[:1]
    kept = {name: tensor_bytes(tmp_path / "run" / name) for name in ("expanded", "post_pretrain", "review")}
    of_stage = of_the_stage(tmp_path / "run" / "expanded", recipe.post_pretrain)
    assert needed == max(kept["expanded"] + of_stage, sum(kept.values()))
    shutil.rmtree(tmp_path / "run" / "review")
    assert most() == kept["review"]


def test_an_emulated_bfloat16_is_said(root, tmp_path, monkeypatch):
    text = RECIPE.format(root=root, out=tmp_path)
    asking = text.replace("post_pretrain: {", "post_pretrain: {bf16: true, ")
    assert asking != text
    for able, given, said in ((False, asking, 1), (True, asking, 0), (False, text, 0)):
        monkeypatch.setattr("hf_moe_expand.runs.steps.stage.has_bfloat16", lambda able=able: able)
        lines = validate_recipe(Recipe.of_text(given, "recipe.yaml"))
        assert sum(line.startswith("warning: post_pretrain: bf16: this machine has no") for line in lines) == said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_keeps_more_than_the_least(tmp_path, dtype):
    """Beside float32 weights, gradients and AdamW: the tensors that torch keeps for the backward pass."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
    save_dense(tmp_path / "base", "llama", num_hidden_layers=6, **sizes)
    expand_checkpoint(tmp_path / "base", tmp_path / "out", Plan("moe-lpr", [2] * 6, old=["en"], new=["el"]))
    model, kept = LayerMoEForCausalLM.from_pretrained(tmp_path / "out").train(), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    fixed = 4 * model.num_parameters() + 12 * freeze(model, "post-pretrain").trainable

    def pack(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no other takes its place
        return tensor

    ids = torch.randint(0, model.config.vocab_size, (4, 256))
    half = torch.autocast("cpu", torch.bfloat16, dtype == torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), half:
        model(input_ids=ids, labels=ids, use_cache=False)
    config = PostPretrainConfig(block_size=256, per_device_train_batch_size=4)
    hidden, logits = 4 * 1024 * 6 * 128, 4 * 1024 * model.config.vocab_size
    assert least_memory(model, config) == fixed + hidden + logits
    assert hidden + logits < sum(size for size, _ in kept.values())
    assert least_memory(model, config, kept=3) == fixed + 3 * hidden + logits


@pytest.mark.parametrize(
    ("stage", "settings", "said", "warned"),
    [
        (DenseConfig, {"num_train_epochs": 2, "gradient_accumulation_steps": 3}, "about 33 .* 96 .*text: 2;", "f"),
        (DenseConfig, {"max_steps": 7}, "about 7 steps of 32 tokens; passes over the text: 0.14;", "f"),
        (DenseConfig, {"max_steps": 49}, "about 49 steps", "f"),
        (DenseConfig, {"max_steps": 50}, "about 50 steps", ""),
        (DenseConfig, {"tokens": 6400}, "about 200 steps .*text: 4;", ""),
        (DenseConfig, {"tokens": 6432}, "about 201 steps .*text: 4.02;", "m"),
        (DenseConfig, {"tokens": 6432, "gradient_accumulation_steps": 5}, "about 40 steps .*text: 4.02;", "fm"),
        (DenseConfig, {"tokens_per_language": 400, "num_train_epochs": 1}, "about 25 steps of 32 .*text: 1;", "f"),
        (ReviewConfig, {"num_train_epochs": 1}, "about 37 steps of 32 .*text: 1;", "f"),  # as much old text as new
        (ReviewConfig, {"old_documents": 5}, "^x: tokens at hand", ""),
    ],
)
def test_steps_and_passes(root, monkeypatch, stage, settings, said, warned):
    counts = {"en": 600, "el": 1000}
    monkeypatch.setattr(prepare, "tokens_at_hand", lambda text, tokenizer: counts[text.language])
    texts = {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in ("en", "el")}
    model = load_config(root / ("base" if stage is DenseConfig else "expanded"))
    found, *warnings = prepare.length(stage(**settings, **QUICK), model, texts, "x", byte_tokenizer())
    assert re.search(said, found), found
    assert found.endswith("tokens at hand, about: en 600, el 1,000")
    of = {"f": "warning: x: fewer than 50 steps", "m": "warning: x: after more than 4 passes"}
    assert [line[: len(of[kind])] for line, kind in zip(warnings, warned, strict=True)] == [of[kind] for kind in warned]


def test_tokens_are_estimated_from_the_beginning_of_each_file(tmp_path):
    def tokens(path):
        return tokens_at_hand(LanguageText("el", str(path)), byte_tokenizer())

    texts = [f"number {number} of many texts, {'long ' * (number % 7)}" for number in range(30_000)]
    assert tokens(write_texts(tmp_path / "el.jsonl", texts)) == pytest.approx(sum(map(len, texts)) + 30_000, rel=0.02)
    assert tokens(write_texts(tmp_path / "few.jsonl", ["abc", "defg"])) == 9  # each document with its end
    Dataset.from_dict({"text": ["abc", "defg"] * 3000}).to_parquet(tmp_path / "x.parquet")
    assert tokens(tmp_path / "x.parquet") == 27_000
    packed = gzip.compress((tmp_path / "el.jsonl").read_bytes())
    (tmp_path / "el.jsonl.gz").write_bytes(packed)
    assert tokens(tmp_path / "el.jsonl.gz") == pytest.approx(sum(map(len, texts)) + 30_000, rel=0.2)
    (tmp_path / "wrong.jsonl").write_text('{"text": "one"}\n{"words": "two"}\n')
    refused(tokens, tmp_path / "wrong.jsonl", says=r"wrong\.jsonl:2: has no string under `text`")


def test_more_memory_than_there_is(root, tmp_path, monkeypatch):
    def check(text=RECIPE, **options):
        return validate_recipe(Recipe.of_text(text.format(root=root, out=tmp_path), "recipe.yaml"), **options)

    monkeypatch.setattr(stage_steps, "memory_of_all", lambda: 1000)
    refused(check, says=r"post_pretrain: takes at least .* but 1.0 kB are here: lower .*--offline")
    # Another machine may be the one that trains, or split the model.
    split = RECIPE.replace("save_steps: 1", "distributed_config: {{fsdp_size: 2}}")
    split = split[: split.index("review:")] + "review: null}}"
    for text, options in ((RECIPE, {"here": False}), (RECIPE, {"offline": True}), (split, {})):
        assert check(text, **options)
    monkeypatch.setattr(stage_steps, "memory_of_all", lambda: None)  # a device of which it is not known
    assert check()


def test_a_cpu_has_it_by_its_instructions(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    if torch.backends.mkldnn.is_available():
        assert has_bfloat16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not has_bfloat16()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert has_bfloat16()


def test_a_gpu_has_it_where_it_does_not_emulate_it(monkeypatch):
    for major, has in ((7, False), (8, True)):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)  # by emulation
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, major=major: Mock(major=major))
        assert has_bfloat16() == has
        monkeypatch.undo()


def test_a_stage_on_a_machine_without_it_warns(monkeypatch, tmp_path):
    monkeypatch.setattr(of_stages, "has_bfloat16", lambda: False)
    with pytest.warns(UserWarning, match="no instructions for bfloat16.*leave `bf16: true` out"):
        PostPretrainConfig(str(tmp_path), bf16=True, use_cpu=True).begun()
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)  # by emulation
    with pytest.warns(UserWarning, match="or give `fp16: true` on a GPU"):
        PostPretrainConfig(str(tmp_path), bf16=True, use_cpu=False).begun()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PostPretrainConfig(str(tmp_path), use_cpu=True).begun()
        monkeypatch.setattr(of_stages, "has_bfloat16", lambda: True)
        PostPretrainConfig(str(tmp_path), bf16=True, use_cpu=True).begun()


def test_a_new_recipe_leaves_it_out_on_a_gpu_that_emulates_it(monkeypatch):
    dense = tiny_config("qwen2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(recommended, "device_memory", lambda: 10**12)
    for able in (True, False):
        monkeypatch.setattr(recommended, "has_bfloat16", lambda able=able: able)
        assert recommended._on_the_device(dense, {"en": "en.jsonl"}, {"el": "el.jsonl"}, 1, None)["half"] == able


def test_inspect_shows_what_a_plan_makes_without_weights(root, tmp_path):
    (tmp_path / "bare").mkdir()
    shutil.copy(root / "base" / "config.json", tmp_path / "bare")
    plan, said = tmp_path / "plan.json", inspect_checkpoint(root / "expanded").lines()
    PLAN.save(plan)
    assert invoke("inspect", tmp_path / "bare", "--plan", plan).splitlines() == [
        line for line in said if not line.startswith(("expansion", "base inside"))
    ]
    refused(invoke, "inspect", root / "expanded", "--plan", plan, says="is an expanded checkpoint already")
    for counts, before, why in (([2, 2], [], "is for 2 layers"), ([3] * 3, [2] * 3, "dense base and its first plan")):
        Plan("moe-lpr", counts, old=["en"], new=["el"], grows_from=before).save(plan)
        refused(invoke, "inspect", root / "base", "--plan", plan, says=why)
