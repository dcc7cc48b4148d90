"""Held-out loss while a stage trains: the figures, and that training does not notice."""

import json
import math

import pytest
import torch
from conftest import byte_tokenizer, fork_ranks, invoke, save_dense, write_texts
from safetensors.torch import load_file
from transformers import Trainer

from hf_moe_expand import (
    LayerMoEForCausalLM,
    Masking,
    Plan,
    PostPretrainConfig,
    evaluate_model,
    expand_checkpoint,
    train_stage,
)
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.stages.config import ValidationSettings

WORDS = {"en": "the cat sat ", "el": "η γάτα κά", "tr": "kedi otur"}
TRAINING = {
    "max_steps": 5, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "disable_tqdm": True, "save_steps": 2
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """An expanded checkpoint whose backbone has dropout, and text."""
    root = tmp_path_factory.mktemp("validation")
    for code, words in WORDS.items():
        write_texts(root / f"{code}.jsonl", [f"{words} {i} {words}" for i in range(40)])
        write_texts(root / f"{code}.test.jsonl", [f"{words} {i + 100}" for i in range(5)])
    expand_checkpoint(
        save_dense(root / "dense", "gpt2"), root / "expanded", Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el", "tr"])
    )
    return root


def train(root, name, every=2, texts=("en", "el"), **changes):
    validation = ValidationSettings({code: str(root / f"{code}.test.jsonl") for code in texts}, every, max_tokens=60)
    config = PostPretrainConfig(
        block_size=16, validation=validation, masking=Masking(expert_output=0.2), **TRAINING, **changes
    )
    data = {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in ("el", "tr")}
    train_stage(root / "expanded", root / name, data, config)
    return root / name


@pytest.fixture(scope="module")
def validated(root):
    return train(root, "validated")


def curves(folder):
    return json.loads((folder / "validation.json").read_text())


def test_every_so_many_steps_and_at_the_end_it_scores_what_evaluate_scores(validated, root):
    found = curves(validated)
    assert found["steps"] == [0, 2, 4, 5]
    assert found["total_steps"] == 5
    assert found["trained"] == ["el", "tr"]
    for step, folder in ((0, root / "expanded"), (-1, validated)):
        model = LayerMoEForCausalLM.from_pretrained(folder)
        for code in ("en", "el"):
            texts = LanguageText(code, str(root / f"{code}.test.jsonl")).load()["text"]
            score = evaluate_model(model, byte_tokenizer(), {code: texts}, 16, max_tokens=60)[code]
            assert found["loss"][code][step] == pytest.approx(math.log(score.perplexity), rel=1e-5)
            assert found["bits_per_byte"][code][step] == pytest.approx(score.bits_per_byte, rel=1e-5)
            assert found["tokens"][code] == score.tokens
    assert found["loss"]["el"][-1] < found["loss"]["el"][0]


def test_training_with_and_without_it_is_the_same_to_the_bit(validated, root):
    without = train(root, "without", texts=())
    assert not (without / "validation.json").exists()
    assert (without / "model.safetensors").read_bytes() == (validated / "model.safetensors").read_bytes()
    assert (without / "config.json").read_bytes() == (validated / "config.json").read_bytes()
    assert compare_checkpoints(root / "expanded", validated).changed


def test_an_interrupted_run_ends_with_the_same_curves(root, monkeypatch):
    whole = train(root, "whole", every=1)
    step = Trainer.training_step

    def stops(trainer, *arguments):
        if trainer.state.global_step == 3:
            raise KeyboardInterrupt
        return step(trainer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", stops)
        with pytest.raises(KeyboardInterrupt):
            train(root, "broken", every=1)
    assert curves(root / "broken.training")["steps"] == [0, 1, 2, 3]
    assert (root / "broken.training" / "checkpoint-2").is_dir()  # so step 3 comes again
    broken = train(root, "broken", every=1)
    assert curves(broken)["steps"] == [0, 1, 2, 3, 4, 5]
    assert curves(broken) == curves(whole)


def test_two_ranks_score_what_one_does_and_one_writes(root):
    settings = {"block_size": 16, "temperature": 2, "max_steps": 3, "learning_rate": 1e-2}
    text = [part for code in ("el", "tr") for part in ("--data", f"{code}={root / code}.jsonl")]
    text += ["--validation", f"tr={root}/tr.test.jsonl"]
    for batch in (4, 2):  # in a step four blocks either way
        settings["per_device_train_batch_size"] = batch
        (root / f"{batch}.yaml").write_text(json.dumps(settings))
    expand_checkpoint(save_dense(root / "no-dropout"), root / "plain", Plan("moe-lpr", [2, 1, 1], new=["el", "tr"]))
    invoke("train", "post-pretrain", root / "plain", root / "one", *text, "--config", root / "4.yaml")
    fork_ranks(
        "hf_moe_expand", "train", "post-pretrain", *map(str, (root / "plain", root / "two")), *text,
        "--config", str(root / "2.yaml"),
    )  # fmt: skip
    one, two = curves(root / "one"), curves(root / "two")
    assert one["steps"] == two["steps"] == [0, 3]
    assert two["loss"]["tr"] == pytest.approx(one["loss"]["tr"], rel=1e-3)
    weights = [load_file(root / name / "model.safetensors") for name in ("one", "two")]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_held_out_text_without_a_text_to_score_is_refused(root, tmp_path):
    write_texts(tmp_path / "long.jsonl", ["\N{CJK UNIFIED IDEOGRAPH-4E00}" * 30])
    data = {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in ("el", "tr")}
    validation = ValidationSettings({"el": str(tmp_path / "long.jsonl")}, max_tokens=2)
    with pytest.raises(InputError, match=r"'el': no text to score .*tokens 2"):
        train_stage(root / "expanded", root / "refused", data, PostPretrainConfig(block_size=16, validation=validation))
