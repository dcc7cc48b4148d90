"""Baselines: inserted blocks and the ensemble of dense models against slow definitions; dense training, resumed."""

import json
import math
import re
import shutil
from unittest.mock import patch

import pytest
import torch
from conftest import (
    byte_tokenizer,
    interrupted,
    invoke,
    load,
    refused,
    save_dense,
    shaken,
    tensors,
    tiny_dense,
    write_texts,
)
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_moe_expand import DenseConfig, Plan, evaluate_ensemble, expand_checkpoint, train_stage
from hf_moe_expand.baselines.depth import expand_depth
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.checkpoint.merge import average_checkpoints, graft_delta
from hf_moe_expand.checkpoint.promises import tiny_twin
from hf_moe_expand.core.scratch import work_folder
from hf_moe_expand.data.packing import pack_texts
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.stages.kinds.dense import DenseTrainer, LoraSettings
from hf_moe_expand.stages.run import check_frozen

IDS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
# Backbones with an output projection of each FFN and attention block, and what is special about each.
LAYERS = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
SUPPORTED = {
    "qwen2": {**LAYERS, "sliding_window": 4, "use_sliding_window": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 4},  # a norm behind each output projection
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "cohere": {},
    "olmo2": {},
    "phi3": {},
}


@pytest.mark.parametrize("backbone", SUPPORTED)
def test_the_deeper_model_computes_what_the_base_does(tmp_path, backbone):
    save_dense(tmp_path / "base", backbone, **SUPPORTED[backbone])
    assert expand_depth(tmp_path / "base", tmp_path / "out", 2) == [1, 4]
    base, deep = load(tmp_path / "base"), load(tmp_path / "out")
    assert type(deep) is type(base)
    assert deep.config.num_hidden_layers == len(deep.model.layers) == 5
    with torch.no_grad():
        assert torch.equal(deep(IDS).logits, base(IDS).logits)
        generated = [model.generate(IDS, max_new_tokens=5, do_sample=False) for model in (base, deep)]
    assert torch.equal(*generated)
    for name in ("layer_types", "no_rope_layers"):
        if (values := getattr(base.config, name, None)) is not None:
            assert getattr(deep.config, name) == [values[source] for source in (0, 0, 1, 2, 2)]


def test_new_blocks_are_copies_but_for_their_output_projections(tmp_path):
    tiny_dense("llama", attention_bias=True, mlp_bias=True).save_pretrained(tmp_path / "base")
    expand_depth(tmp_path / "base", tmp_path / "out", 2)
    before, after = tensors(tmp_path / "base"), tensors(tmp_path / "out")
    expected = {name: value for name, value in before.items() if not name.startswith("model.layers.")}
    for layer, source in enumerate([0, 0, 1, 2, 2]):
        for name in (name for name in before if name.startswith(f"model.layers.{source}.")):
            rest, is_new = name.split(".", 3)[3], layer in (1, 4)
            is_silent = is_new and ("o_proj" in rest or "down_proj" in rest)  # weight and bias
            expected[f"model.layers.{layer}.{rest}"] = torch.zeros_like(before[name]) if is_silent else before[name]
    assert after.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in after.items())


def test_blocks_stand_at_even_intervals_and_the_record_of_them_is_kept(tmp_path):
    save_dense(tmp_path / "base", num_hidden_layers=6)
    for blocks, expected in ((1, [6]), (2, [3, 7]), (3, [2, 5, 8]), (4, [1, 4, 6, 9])):
        assert expand_depth(tmp_path / "base", tmp_path / str(blocks), blocks) == expected
        load(tmp_path / str(blocks)).save_pretrained(tmp_path / "again")
        config = AutoConfig.from_pretrained(tmp_path / "again")
        assert config.new_layers == expected
        assert config.history == [{"stage": "expand-depth", "settings": {"base": "base", "blocks": blocks}}]
        assert str(tmp_path) not in (tmp_path / str(blocks) / "config.json").read_text()
    assert (tmp_path / "1" / "tokenizer.json").read_bytes() == (tmp_path / "base" / "tokenizer.json").read_bytes()


def test_a_delta_goes_to_the_old_blocks_alone(tmp_path):
    save_dense(tmp_path / "base")
    shaken(load(tmp_path / "base"), 0.02).save_pretrained(tmp_path / "instruct")
    byte_tokenizer().save_pretrained(tmp_path / "instruct")
    expand_depth(tmp_path / "base", tmp_path / "deep", 2)
    graft_delta(tmp_path / "deep", tmp_path / "out", tmp_path / "base", tmp_path / "instruct")
    deep, found, instruct = (tensors(tmp_path / name) for name in ("deep", "out", "instruct"))
    homes = {"0": "0", "2": "1", "3": "2"}
    for name, value in found.items():
        head, number, rest = re.fullmatch(r"(model\.layers\.)?(\d*)(.*)", name).groups(default="")
        expected = deep[name] if number and number not in homes else instruct[head + homes.get(number, "") + rest]
        assert torch.equal(value, expected), name
    # A deeper model is expanded like any other; it is then what the expansion was made from, with all of its blocks.
    expand_checkpoint(tmp_path / "out", tmp_path / "moe", Plan("moe-lpr", [2] * 5))
    average_checkpoints([tmp_path / "moe", tmp_path / "out"], tmp_path / "average")
    assert compare_checkpoints(tmp_path / "moe", tmp_path / "average").same
    graft_delta(tmp_path / "moe", tmp_path / "grafted", tmp_path / "out", tmp_path / "deep")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "grafted")(IDS).logits, load(tmp_path / "deep")(IDS).logits)


def test_refusals_name_what_is_wrong(base, tmp_path):
    tiny_dense("gpt2").save_pretrained(tmp_path / "gpt2")
    for name in ("gemma3n_text", "glm4_moe"):
        tiny_twin(CONFIG_MAPPING[name]()).save_pretrained(tmp_path / name)
    expand_depth(base, tmp_path / "deep", 1)
    expand_checkpoint(base, tmp_path / "expanded", Plan("moe-lpr", [2, 2, 2]))
    for said, folder, blocks in (
        ("0 blocks were asked for; with 3 layers 1 to 3 can be inserted", base, 0),
        ("4 blocks were asked for", base, 4),
        ("an inserted block of architecture 'gpt2' would change the output", tmp_path / "gpt2", 1),
        # Their layers do more than attention and an FFN.
        ("an inserted block of architecture 'gemma3n_text'", tmp_path / "gemma3n_text", 2),
        ("an inserted block of architecture 'glm4_moe'", tmp_path / "glm4_moe", 2),
        ("has inserted blocks already", tmp_path / "deep", 1),
        ("is an expanded checkpoint already", tmp_path / "expanded", 1),
    ):
        refused(expand_depth, folder, tmp_path / "out", blocks, says=said)
        assert not (tmp_path / "out").exists()


TEXTS = {"en": ["One short text.", "And a second one, longer than a window of eight."], "el": ["Ένα", "δύο τρία"]}


def slow_nats(models, tokenizer, texts, block_size, top_m):
    """Negative log-likelihood of the texts: at each position every model's distribution over the vocabulary."""
    stream, of_text = [], []
    for text in texts:
        ids = tokenizer(text).input_ids
        stream += [tokenizer.eos_token_id, *ids]
        of_text += [False] + [True] * len(ids)
    nats = 0.0
    for position in range(1, len(stream)):
        start, token = (position - 1) // block_size * block_size, stream[position]
        if position == start + 1:
            likelihoods = [1.0] * len(models)  # of what the window holds so far
        ids = torch.tensor([stream[start:position]])
        distributions = [model(ids).logits[0, -1].double().softmax(-1) for model in models]
        best = sorted(range(len(models)), key=lambda j: -likelihoods[j])[:top_m]
        mixture = sum(likelihoods[j] * distributions[j] for j in best) / sum(likelihoods[j] for j in best)
        if of_text[position]:
            nats -= mixture[token].log().item()
            likelihoods = [one * of[token].item() for one, of in zip(likelihoods, distributions, strict=True)]
    return nats


@pytest.mark.parametrize(("top_m", "block_size"), [(1, 8), (2, 8), (3, 8), (2, 40)])
def test_it_mixes_probabilities_by_the_posterior_of_the_prefix(models, top_m, block_size):
    tokenizer = byte_tokenizer()
    found = evaluate_ensemble(models, tokenizer, TEXTS, top_m, block_size, batch_size=3)
    for code, texts in TEXTS.items():
        with torch.no_grad():
            nats = slow_nats(models, tokenizer, texts, block_size, top_m)
        size = sum(len(text.encode()) for text in texts)
        assert (found[code].tokens, found[code].bytes) == (size, size)  # a token is a byte
        assert found[code].bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)
        assert found[code].perplexity == pytest.approx(math.exp(nats / size), rel=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("ensemble")
    save_dense(root / "a")
    save_dense(root / "b", "bloom", seed=1)
    save_dense(root / "c", seed=2)
    for code, texts in TEXTS.items():
        write_texts(root / f"{code}.jsonl", texts)
    return root


@pytest.fixture(scope="module")
def models(folders):
    return [load(folders / name) for name in "abc"]


def test_bad_input_is_refused(models, folders, tmp_path):
    tokenizer = byte_tokenizer()
    for top_m in (0, 4):
        refused(evaluate_ensemble, models, tokenizer, TEXTS, top_m, says=f"top_m is {top_m}; an ensemble of 3 models")
        refused(evaluate, folders, "--ensemble", top_m, "--overwrite", says=f"--ensemble is {top_m}: must be from 1 to")
    refused(evaluate_ensemble, models, tokenizer, {**TEXTS, "el": []}, says="Language 'el': no text to score")
    save_dense(tmp_path / "other", vocab_size=258)
    other = byte_tokenizer()
    other.add_tokens([AddedToken("short")])
    other.save_pretrained(tmp_path / "other")
    said = "other: its tokenizer gives other tokens for the text in 'en'"
    refused(evaluate_ensemble, [folders / "a", tmp_path / "other"], tokenizer, TEXTS, says=said)


def evaluate(folders, *arguments):
    data = [word for code in TEXTS for word in ("--data", f"{code}={folders / f'{code}.jsonl'}")]
    models = [folders / name for name in "abc"]
    return invoke("evaluate", *models, *data, "--out", folders / "evaluation.json", "--block-size", 16, *arguments)


def test_the_command_line_adds_a_column(folders):
    evaluate(folders, "--ensemble", 2)
    result = Evaluation.from_json(folders / "evaluation.json")
    assert list(result.models) == ["a", "b", "c", "ensemble of 3, top 2"]
    members = [folders / name for name in "abc"]
    assert result.models["ensemble of 3, top 2"] == evaluate_ensemble(members, byte_tokenizer(), TEXTS, 2, 16)


TRAINING = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "disable_tqdm": True, "max_steps": 3}
SQUARES = [f"{number} times {number} is {number * number}, as everybody knows." for number in range(60)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    save_dense(root / "base")
    save_dense(root / "bf16", dtype=torch.bfloat16)
    expand_depth(root / "bf16", root / "deep", 2)
    write_texts(root / "en.jsonl", SQUARES)
    return root


@pytest.fixture
def data(root):
    return {"en": LanguageText("en", str(root / "en.jsonl"))}


def config(**changes):
    return DenseConfig(**{"block_size": 32, **TRAINING, **changes})


def test_full_training_follows_a_loop_written_by_hand(root, data, tmp_path):
    # One step of plain SGD on everything, against the gradient of the mean cross-entropy.
    step = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    train_stage(root / "base", tmp_path / "out", data, config(**step, per_device_train_batch_size=1000))
    blocks = pack_texts({"en": data["en"].load()}, byte_tokenizer(), 32, 0).dataset["input_ids"]
    model, ids = load(root / "base").train(), torch.tensor(list(blocks))
    logits = model(ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    found = tensors(tmp_path / "out")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], (parameter - 0.1 * parameter.grad).detach(), rtol=0, atol=1e-5)
        assert not torch.equal(found[name], parameter), name


def test_the_result_is_an_ordinary_checkpoint_of_the_same_type(root, data, tmp_path):
    record = train_stage(root / "bf16", tmp_path / "out", data, config(), seed=3)
    assert sorted(tensors(tmp_path / "out")) == sorted(tensors(root / "bf16"))
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__ == "Qwen2ForCausalLM"
    (stored,) = json.loads((tmp_path / "out" / "config.json").read_text())["history"]
    assert stored == record.to_dict()
    assert (record.stage, record.steps, record.seed, record.documents) == ("dense full", 3, 3, {"en": 60})
    for file in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (root / "bf16" / file).read_bytes()
    assert not (tmp_path / "out.training").exists()


def test_lora_is_merged_and_touches_linear_layers_alone(root, data, tmp_path):
    lora = LoraSettings(r=2, alpha=4, target_modules=["q_proj", "down_proj"])
    train_stage(root / "base", tmp_path / "out", data, config(method="lora", lora=lora))
    before, after = tensors(root / "base"), tensors(tmp_path / "out")
    assert sorted(before) == sorted(after)
    for name, value in before.items():
        targeted = ("q_proj" in name or "down_proj" in name) and name.endswith("weight")
        assert torch.equal(value, after[name]) != targeted, name
    name = "model.layers.1.self_attn.q_proj.weight"  # to which two factors of rank 2 were added
    singular = torch.linalg.svdvals((after[name] - before[name]).double())
    assert singular[1] > 100 * singular[2] > 0
    nothing = config(method="lora", lora=LoraSettings(target_modules=["nothing"]))
    refused(train_stage, root / "base", tmp_path / "no", data, nothing, says=r"lora: Target modules .*nothing.* not")


def test_only_new_blocks_move(root, data, tmp_path):
    (tmp_path / "dense.yaml").write_text(
        "block_size: 32\nmax_steps: 3\nlearning_rate: 0.01\nper_device_train_batch_size: 4\nmethod: new-blocks\n"
    )
    text = ("--data", f"en={root / 'en.jsonl'}", "--config", tmp_path / "dense.yaml")
    said = invoke("train", "dense", root / "deep", tmp_path / "out", *text)
    found = compare_checkpoints(root / "deep", tmp_path / "out")
    assert f"3 steps; {len(found.identical)} frozen tensors are byte-identical" in said
    assert {name.split(".")[2] for name in found.changed} == {"1", "4"}
    assert len(found.changed) == 2 * 12  # every tensor of two blocks
    train_stage(root / "deep", tmp_path / "full", data, config())
    with pytest.raises(RuntimeError, match="stage dense new-blocks changed tensors that it had to leave alone"):
        check_frozen(root / "deep", tmp_path / "full", config(method="new-blocks"))
    both = (tmp_path / "out", root / "deep")
    assert "wrote" in invoke("merge", "average", *both, "--weight", 0.25, "--out", tmp_path / "average")
    history = json.loads((tmp_path / "average" / "config.json").read_text())["history"]
    assert history[-1]["settings"] == {"models": ["out", "deep"], "weights": [0.25, 0.75]}


def test_what_dense_training_refuses(root, data, tmp_path):
    expand_checkpoint(root / "base", tmp_path / "moe", Plan("moe-lpr", [2, 2, 2]))
    given = (tmp_path / "out", data, config())
    refused(train_stage, tmp_path / "moe", *given, says="is an expanded checkpoint already")
    refused(train_stage, root / "base", tmp_path / "out", {}, config(), says="No text was given")
    without, new_blocks = load(root / "base"), config(method="new-blocks")
    refused(DenseTrainer, without, new_blocks, says="The checkpoint has no new blocks: insert some")
    # What failed before its first checkpoint can be corrected.
    work_folder(tmp_path / "out.training")
    (tmp_path / "out.training" / "started_with.json").write_text('{"seed": 7}')
    assert train_stage(root / "base", *given).steps == 3


@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_interrupted_run_goes_on_and_ends_the_same(root, data, tmp_path, method):
    chosen, out, work = config(method=method, max_steps=5, save_steps=2), tmp_path / "out", tmp_path / "out.training"
    train_stage(root / "base", tmp_path / "whole", data, chosen)
    torch.manual_seed(123)  # the seed is the run's own
    with interrupted(3, DenseConfig), pytest.raises(KeyboardInterrupt):
        train_stage(root / "base", out, data, chosen)
    assert not out.exists()
    other = save_dense(tmp_path / "other", seed=1)
    write_texts(tmp_path / "en.jsonl", [text.replace("30 times 30", "30 TIMES 30") for text in SQUARES])
    edited = {"en": LanguageText("en", str(tmp_path / "en.jsonl"))}
    refused(train_stage, root / "base", out, data, chosen, says="interrupted run with other seed", seed=1)
    refused(train_stage, other, out, data, chosen, says="interrupted run with other model")
    refused(train_stage, root / "base", out, edited, chosen, says="interrupted run with other data")
    # Killed before it removed an earlier one.
    shutil.copytree(work / "checkpoint-2", work / "checkpoint-1")
    # Killed while it saved: the folder is there, but not whole.
    shutil.copytree(work / "checkpoint-2", work / "checkpoint-4")
    (work / "checkpoint-4" / "trainer_state.json").write_text('{"epoch"')
    with patch.object(DenseTrainer, "train", autospec=True, side_effect=DenseTrainer.train) as resumed:
        train_stage(root / "base", out, data, chosen)
    assert "checkpoint-2" in str(resumed.call_args)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert not work.exists()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_every_tensor_keeps_the_type_in_which_it_is_stored(root, data, tmp_path, method):
    shutil.copytree(root / "bf16", tmp_path / "mixed")
    mixed = {name: value.float() if "norm" in name else value for name, value in tensors(root / "bf16").items()}
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


def test_steps_too_small_for_bfloat16_add_up(root, data, tmp_path):
    before, moved = tensors(root / "bf16"), []
    for steps in (1, 12):
        train_stage(root / "bf16", tmp_path / str(steps), data, config(learning_rate=2e-5, max_steps=steps))
        after = tensors(tmp_path / str(steps))
        moved.append(sum((before[key] != after[key]).sum().item() for key in before))
    assert moved[1] > 3 * moved[0]
