"""What a forecast says, against what torch keeps, a training writes, a tokenizer counts, and a disk with less room."""

import errno
import gzip
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers.trainer
from conftest import byte_tokenizer, invoke, save_dense, write_texts
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
)  # fmt: skip
from hf_moe_expand.checkpoint.stored import network_of
from hf_moe_expand.core.disk import StepOutput, peak, readable_size
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.inference.forecast import forecast, size_of, tokens_at_hand, training_disk
from hf_moe_expand.inference.models import load_config
from hf_moe_expand.runs import pipeline
from hf_moe_expand.runs.recipe import Recipe

QUICK = {"block_size": 16, "per_device_train_batch_size": 2, "disable_tqdm": True}
PLAN = Plan("layer-moe", [2, 1, 3], [2], old=["en"], new=["el"])
RECIPE = """{{base: {root}/base, output: {out}/run, old: {{en: {root}/en.jsonl}}, new: {{el: {root}/el.jsonl}},
plan: {{method: moe-lpr, experts: 3}},
post_pretrain: {{block_size: 16, max_steps: 3, save_steps: 1, per_device_train_batch_size: 2}},
review: {{block_size: 16, max_steps: 1, save_strategy: "no", per_device_train_batch_size: 2}}}}"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("forecast")
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


EVERY, ALL = {"max_steps": 3, "save_steps": 1}, {"save_total_limit": None}


# `least` is less than 1 where no interrupt saves the checkpoint that the forecast has room for.
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
def test_training_checkpoints_have_the_forecast_bytes(root, tmp_path, monkeypatch, model, stage, options, least):
    found, real = [0], transformers.trainer.rotate_checkpoints

    def counted(output_dir, *args, **kwargs):  # before the oldest is removed
        found.append(sum(map(tensor_bytes, Path(output_dir).glob("checkpoint-*"))))
        real(output_dir, *args, **kwargs)

    monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", counted)
    config = stage(**QUICK, **options)
    most = training_disk(config, network_of(load_config(root / model)))
    train_stage(root / model, tmp_path / "out", {"el": LanguageText("el", str(root / "el.jsonl"))}, config)
    assert least * most <= max(found) <= most


def test_training_is_refused_where_the_disk_has_too_little_room(root, tmp_path, monkeypatch):
    config, text = PostPretrainConfig(**EVERY, **QUICK), {"el": LanguageText("el", str(root / "el.jsonl"))}
    needed = forecast(network_of(load_config(root / "expanded")), config, {}).disk
    disk_with(monkeypatch, needed - 1)
    with monkeypatch.context() as patch:
        patch.setattr(LanguageText, "load", lambda *_: pytest.fail("read text in vain"))
        with pytest.raises(
            InputError, match=rf"out: needs {readable_size(needed)} for .*, 1 byte more than the disk has free"
        ):
            train_stage(root / "expanded", tmp_path / "out", text, config)
    disk_with(monkeypatch, needed)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Trainer, "save_model", full)
    with pytest.raises(InputError, match=rf"out\.training: the disk is full; up to {readable_size(needed)} are needed"):
        train_stage(root / "expanded", tmp_path / "out", text, config)


def test_a_split_model_needs_room_for_its_gathered_weights(root, tmp_path, monkeypatch):
    config, text = PostPretrainConfig(**EVERY, **QUICK), {"el": LanguageText("el", str(root / "el.jsonl"))}
    once = tensor_bytes(root / "expanded")
    needed = forecast(network_of(load_config(root / "expanded")), config, {}).disk + once
    disk_with(monkeypatch, needed - 1)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match=rf"out: needs {readable_size(needed)} for .*, 1 byte more than"):
        train_stage(root / "expanded", tmp_path / "out", text, config)


def test_a_run_writes_what_validate_says(root, tmp_path, monkeypatch):
    recipe = Recipe.of_text(RECIPE.format(root=root, out=tmp_path), "recipe.yaml")

    def most():
        said = "\n".join(validate_recipe(recipe))
        assert "post_pretrain: about 3 steps of 32 tokens; tokens at hand, about: el " in said
        needed = peak(pipeline._checked(recipe)[1])
        assert f"disk: up to {readable_size(needed)} for checkpoints" in said
        return needed

    needed = most()
    disk_with(monkeypatch, needed - 1)
    with pytest.raises(InputError, match=rf"run: needs {readable_size(needed)} for checkpoints.*, 1 byte more than"):
        run_recipe(recipe)
    assert not (tmp_path / "run").exists()
    disk_with(monkeypatch, needed)
    run_recipe(recipe)
    kept = {name: tensor_bytes(tmp_path / "run" / name) for name in ("expanded", "post_pretrain", "review")}
    config, network = recipe.post_pretrain.built(tmp_path, 0), network_of(load_config(tmp_path / "run" / "expanded"))
    assert needed == max(kept["expanded"] + forecast(network, config, {}).disk, sum(kept.values()))
    shutil.rmtree(tmp_path / "run" / "review")
    assert most() == kept["review"]


def test_training_checkpoints_that_are_there_need_no_more_room(tmp_path):
    steps = [StepOutput(tmp_path / "a", 5), StepOutput(tmp_path / "b", 5, 100), StepOutput(tmp_path / "c", 5, 20)]
    assert peak(steps) == 110
    (tmp_path / "b.training").mkdir()
    (tmp_path / "b.training" / "x").write_bytes(bytes(90))
    assert peak(steps) == 35


@pytest.mark.parametrize(("experts", "dtype"), [(2, torch.float32), (4, torch.float32), (2, torch.bfloat16)])
def test_memory_is_what_torch_keeps(tmp_path, experts, dtype):
    """Beside float32 weights, gradients and AdamW: the tensors that torch keeps for the backward pass."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
    save_dense(tmp_path / "base", "llama", num_hidden_layers=6, **sizes)
    expand_checkpoint(tmp_path / "base", tmp_path / "out", Plan("moe-lpr", [experts] * 6, old=["en"], new=["el"]))
    model, kept = LayerMoEForCausalLM.from_pretrained(tmp_path / "out").train(), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    fixed = 4 * size_of(model) + 12 * freeze(model, "post-pretrain").trainable

    def pack(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no other takes its place
        return tensor

    ids = torch.randint(0, model.config.vocab_size, (4, 256))
    half = torch.autocast("cpu", torch.bfloat16, dtype == torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), half:
        model(input_ids=ids, labels=ids, use_cache=False)
    config = PostPretrainConfig(block_size=256, per_device_train_batch_size=4)
    found = [forecast(model, config, {}, dtype, checkpointing).memory - fixed for checkpointing in (False, True)]
    assert 0.7 < found[0] / sum(size for size, _ in kept.values()) < 1.4
    assert found[1] < 0.7 * found[0]


def test_steps_and_hours(root):
    dense, tokens = network_of(load_config(root / "base")), {"en": 600, "el": 1000}
    found = forecast(dense, DenseConfig(num_train_epochs=2, gradient_accumulation_steps=3, **QUICK), tokens, speed=1e6)
    met = size_of(dense) - dense.get_input_embeddings().weight.numel()
    assert (found.steps, found.of_step) == (3200 // 96, 96)
    assert found.hours == pytest.approx(3200 * 6 * met / 1e6 / 3600)
    assert forecast(dense, DenseConfig(**QUICK), {"en": 600, "el": None}).steps is None
    assert forecast(dense, DenseConfig(max_steps=7, **QUICK), {}).steps == 7
    expanded = network_of(load_config(root / "expanded"))
    assert forecast(expanded, ReviewConfig(old_documents=5, **QUICK), tokens).steps is None
    assert "(warning: too much: lower per_device_train_batch_size" in found.words(room=1)


def test_tokens_are_estimated_from_the_beginning_of_each_file(tmp_path):
    def tokens(path):
        return tokens_at_hand(LanguageText("el", str(path)), byte_tokenizer())

    texts = [f"number {number} of many texts, {'long ' * (number % 7)}" for number in range(30_000)]
    assert tokens(write_texts(tmp_path / "el.jsonl", texts)) == pytest.approx(sum(map(len, texts)), rel=0.02)
    assert tokens(write_texts(tmp_path / "few.jsonl", ["abc", "defg"])) == 7
    Dataset.from_dict({"text": ["abc", "defg"] * 3000}).to_parquet(tmp_path / "x.parquet")
    assert tokens(tmp_path / "x.parquet") == 21_000
    packed = gzip.compress((tmp_path / "el.jsonl").read_bytes())
    (tmp_path / "el.jsonl.gz").write_bytes(packed)
    assert tokens(tmp_path / "el.jsonl.gz") == pytest.approx(sum(map(len, texts)), rel=0.2)
    (tmp_path / "wrong.jsonl").write_text('{"text": "one"}\n{"words": "two"}\n')
    with pytest.raises(InputError, match=r"wrong\.jsonl:2: needs an object"):
        tokens(tmp_path / "wrong.jsonl")


def test_inspect_says_the_forecast_of_a_plan_without_weights(root, tmp_path):
    def inspect(model, *options):
        return invoke("inspect", model, "--plan", tmp_path / "plan.json", *options)

    (tmp_path / "bare").mkdir()
    shutil.copy(root / "base" / "config.json", tmp_path / "bare")
    PLAN.save(tmp_path / "plan.json")
    text, network = (
        inspect(tmp_path / "bare", "--tokens", 6e9, "--tflops", 1e-3),
        network_of(load_config(root / "expanded")),
    )
    assert f"parameters          {size_of(network):,} (" in text
    for stage in (PostPretrainConfig(), ReviewConfig()):
        assert f"{stage.name:<20}{forecast(network, stage, {'all': 6 * 10**9}, speed=1e9).words()}\n" in text
    assert "hours" not in inspect(tmp_path / "bare")
    for given in (("--tokens", 0), ("--tokens", "nan"), ("--tokens", "inf"), ("--tokens", 9, "--tflops", 0)):
        with pytest.raises(InputError, match="must be above 0"):
            inspect(root / "base", *given)
    with pytest.raises(InputError, match="--tokens belongs to --plan"):
        invoke("inspect", root / "expanded", "--tokens", 5)
    with pytest.raises(InputError, match="--tflops belongs to --tokens"):
        invoke("inspect", root / "expanded", "--tflops", 5)
    with pytest.raises(InputError, match="is an expanded checkpoint already"):
        inspect(root / "expanded")
    for counts, before, why in (([2, 2], [], "is for 2 layers"), ([3] * 3, [2] * 3, "dense base and its first plan")):
        Plan("moe-lpr", counts, old=["en"], new=["el"], grows_from=before).save(tmp_path / "plan.json")
        with pytest.raises(InputError, match=why):
            inspect(root / "base")
