"""Dense baselines: what trains, what is written, and resuming."""

import json
import re
import shutil

import pytest
import torch
from conftest import interrupted, invoke, refused, save_dense, tensors, write_texts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_moe_expand import DenseConfig, Plan, expand_checkpoint, train_stage
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.data.packing import pack_texts
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.stages.kinds.dense import DenseTrainer, LoraSettings, check_old_blocks

TRAINING = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "disable_tqdm": True, "max_steps": 3}
TEXTS = [f"{number} times {number} is {number * number}, as everybody knows." for number in range(60)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    save_dense(root / "base")
    save_dense(root / "bf16", dtype=torch.bfloat16)
    expand_depth(root / "bf16", root / "deep", 2)
    write_texts(root / "en.jsonl", TEXTS)
    return root


@pytest.fixture
def data(root):
    return {"en": LanguageText("en", str(root / "en.jsonl"))}


def config(**changes):
    return DenseConfig(**{"block_size": 32, **TRAINING, **changes})


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_full_training_follows_a_loop_written_by_hand(root, data, tmp_path):
    # One step of plain SGD on everything, against the gradient of the mean cross-entropy.
    step = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    train_stage(root / "base", tmp_path / "out", data, config(**step, per_device_train_batch_size=1000))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root / "base")
    blocks = pack_texts({"en": data["en"].load()}, tokenizer, 32, 0).dataset["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(root / "base").train()
    ids = torch.tensor(list(blocks))
    logits = model(ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    found = tensors(tmp_path / "out")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], (parameter - 0.1 * parameter.grad).detach(), rtol=0, atol=1e-5)
        assert not torch.equal(found[name], parameter), name


def test_the_result_is_an_ordinary_checkpoint_of_the_same_type(root, data, tmp_path):
    record = train_stage(root / "bf16", tmp_path / "out", data, config(), seed=3)
    found = tensors(tmp_path / "out")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert sorted(found) == sorted(tensors(root / "bf16"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "Qwen2ForCausalLM"
    (stored,) = json.loads((tmp_path / "out" / "config.json").read_text())["history"]
    assert stored == record.to_dict()
    assert (record.stage, record.steps, record.seed) == ("dense full", 3, 3)
    assert record.documents == {"en": 60}
    for file in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (root / "bf16" / file).read_bytes()
    assert not (tmp_path / "out.training").exists()


def test_lora_is_merged_and_touches_linear_layers_alone(root, data, tmp_path):
    lora = LoraSettings(r=2, alpha=4, target_modules=["q_proj", "down_proj"])
    train_stage(root / "bf16", tmp_path / "out", data, config(method="lora", lora=lora))
    before, after = tensors(root / "bf16"), tensors(tmp_path / "out")
    assert sorted(before) == sorted(after)
    for name, value in before.items():
        targeted = ("q_proj" in name or "down_proj" in name) and name.endswith("weight")
        assert torch.equal(value, after[name]) != targeted, name
    # Two factors of rank 2 were added; rounding to bfloat16 hides the rank, so ask the float32 twin.
    train_stage(root / "base", tmp_path / "float", data, config(method="lora", lora=lora))
    name = "model.layers.1.self_attn.q_proj.weight"
    delta = (tensors(tmp_path / "float")[name] - tensors(root / "base")[name]).double()
    singular = torch.linalg.svdvals(delta)
    assert singular[1] > 100 * singular[2] > 0
    nothing = config(method="lora", lora=LoraSettings(target_modules=["nothing"]))
    said = r"lora: Target modules .*nothing.* not found"
    refused(train_stage, root / "base", tmp_path / "no", data, nothing, says=said)


def test_only_new_blocks_move(root, data, tmp_path):
    train_stage(root / "deep", tmp_path / "out", data, config(method="new-blocks"))
    found = compare_checkpoints(root / "deep", tmp_path / "out")
    assert {name.split(".")[2] for name in found.changed} == {"1", "4"}
    assert len(found.changed) == 2 * 12  # every tensor of two blocks
    assert check_old_blocks(root / "deep", tmp_path / "out") == len(found.identical)
    train_stage(root / "deep", tmp_path / "full", data, config())
    with pytest.raises(RuntimeError, match="training new blocks changed other tensors"):
        check_old_blocks(root / "deep", tmp_path / "full")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_interrupted_run_goes_on_and_ends_the_same(root, data, tmp_path, monkeypatch, method):
    chosen = config(method=method, max_steps=5, save_steps=2)
    train_stage(root / "base", tmp_path / "whole", data, chosen)

    resumed = []

    class Watched(DenseTrainer):
        def train(self, resume_from_checkpoint=None):
            resumed.append(resume_from_checkpoint)
            return super().train(resume_from_checkpoint=resume_from_checkpoint)

    torch.manual_seed(123)  # the seed is the run's own
    with interrupted(3, DenseConfig), pytest.raises(KeyboardInterrupt):
        train_stage(root / "base", tmp_path / "out", data, chosen)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(DenseConfig, "trainer_class", Watched)
    refused(train_stage, root / "base", tmp_path / "out", data, chosen, says="interrupted run with other seed", seed=1)
    other = save_dense(tmp_path / "other", seed=1)
    refused(train_stage, other, tmp_path / "out", data, chosen, says="interrupted run with other model")
    write_texts(tmp_path / "en.jsonl", [text.replace("30 times 30", "30 TIMES 30") for text in TEXTS])
    edited = {"en": LanguageText("en", str(tmp_path / "en.jsonl"))}
    refused(train_stage, root / "base", tmp_path / "out", edited, chosen, says="interrupted run with other data")
    # Killed before it removed an earlier one.
    shutil.copytree(tmp_path / "out.training" / "checkpoint-2", tmp_path / "out.training" / "checkpoint-1")
    # Killed while it saved: the folder is there, but not whole.
    shutil.copytree(tmp_path / "out.training" / "checkpoint-2", tmp_path / "out.training" / "checkpoint-4")
    (tmp_path / "out.training" / "checkpoint-4" / "trainer_state.json").write_text('{"epoch"')
    train_stage(root / "base", tmp_path / "out", data, chosen)
    assert resumed[0].endswith("checkpoint-2")
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert not (tmp_path / "out.training").exists()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_every_tensor_keeps_the_type_in_which_it_is_stored(root, data, tmp_path, method):
    shutil.copytree(root / "bf16", tmp_path / "mixed")
    mixed = load_file(tmp_path / "mixed" / "model.safetensors")
    mixed = {name: value.float() if "norm" in name else value for name, value in mixed.items()}
    save_file(mixed, tmp_path / "mixed" / "model.safetensors", {"format": "pt"})
    train_stage(tmp_path / "mixed", tmp_path / "out", data, config(method=method))
    after = tensors(tmp_path / "out")
    assert {name: value.dtype for name, value in after.items()} == {n: v.dtype for n, v in mixed.items()}
    assert any(not torch.equal(after[name], mixed[name]) for name in mixed if "proj" in name)


def test_a_checkpoint_that_stores_a_tied_tensor_under_its_other_name(data, tmp_path):
    save_dense(tmp_path / "tied", tie_word_embeddings=True, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "tied" / "model.safetensors")
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, tmp_path / "tied" / "model.safetensors", {"format": "pt"})
    written = json.loads((tmp_path / "tied" / "config.json").read_text())
    (tmp_path / "tied" / "config.json").write_text(json.dumps({**written, "dtype": "float32"}))
    train_stage(tmp_path / "tied", tmp_path / "out", data, config())
    assert {value.dtype for value in tensors(tmp_path / "out").values()} == {torch.bfloat16}


def test_refusals_name_what_is_wrong(root, data, tmp_path):
    expand_checkpoint(root / "base", tmp_path / "moe", Plan("moe-lpr", [2, 2, 2]))
    said = "is an expanded checkpoint already"
    refused(train_stage, tmp_path / "moe", tmp_path / "out", data, config(), says=said)
    refused(train_stage, root / "base", tmp_path / "out", {}, config(), says="No text was given")
    assert not (tmp_path / "out").exists()


def test_from_the_command_line(root, tmp_path):
    (tmp_path / "dense.yaml").write_text("block_size: 32\nmax_steps: 1\ndisable_tqdm: true\n")
    text = ("--data", f"en={root / 'en.jsonl'}", "--config", tmp_path / "dense.yaml")
    assert re.search(r"layers +3", invoke("expand", root / "base", tmp_path / "pro", "--blocks", 1))
    said = invoke("train", "dense", tmp_path / "pro", tmp_path / "pro-1", *text, "--only-new-blocks")
    assert "1 steps; 39 frozen tensors are byte-identical" in said
    assert "pro-2: 1 steps" in invoke("train", "dense", tmp_path / "pro", tmp_path / "pro-2", *text)
    both = (tmp_path / "pro-1", tmp_path / "pro-2")
    assert "wrote" in invoke("merge", "average", *both, "--weight", 0.25, "--out", tmp_path / "average")
    history = json.loads((tmp_path / "average" / "config.json").read_text())["history"]
    assert history[-1]["settings"] == {"models": ["pro-1", "pro-2"], "weights": [0.25, 0.75]}
    expand_checkpoint(root / "base", tmp_path / "moe", Plan("moe-lpr", [2, 2, 2]))
    delta = ("--base", root / "base", "--instruct", root / "base")
    assert "a cosine of 1.0000" in invoke("graft", tmp_path / "moe", tmp_path / "chat", *delta)
    assert "a cosine of 1.0000" in invoke("merge", "delta", tmp_path / "pro", tmp_path / "pro-chat", *delta)
    assert "Qwen2ForCausalLM" in invoke("export", tmp_path / "chat", tmp_path / "one", "--expert", 1)
    assert weights(tmp_path / "one") == weights(root / "base")
    Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]).save(tmp_path / "plan.json")
    branches = (root / "base", tmp_path / "mix", "--branches", tmp_path / "one", "--plan", tmp_path / "plan.json")
    assert "wrote" in invoke("expand", *branches)
