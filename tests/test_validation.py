"""Held-out loss while a stage trains: the figures, and that training does not notice."""

import json
import math

import pytest
import torch
from conftest import byte_tokenizer, save_dense, write_texts
from transformers import TrainerCallback

from hf_moe_expand import LayerMoEForCausalLM, Plan, evaluate_model, expand_checkpoint, training
from hf_moe_expand.checkpoint.compare import compare_checkpoints
from hf_moe_expand.data.sources import LanguageText
from hf_moe_expand.settings import MaskingSettings, PostPretrainSettings, ValidationSettings
from hf_moe_expand.training import train_stage

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
        save_dense(root / "dense", "gpt2"), root / "expanded", Plan("uniform", [2, 2, 2], old=["en"], new=["el", "tr"])
    )
    return root


def train(root, name, every=2, texts=("en", "el"), **changes):
    validation = ValidationSettings({code: str(root / f"{code}.test.jsonl") for code in texts}, every, max_tokens=60)
    settings = PostPretrainSettings(
        block_size=16, validation=validation, masking=MaskingSettings(expert_output=0.2), training=TRAINING, **changes
    )
    data = {code: LanguageText(code, str(root / f"{code}.jsonl")) for code in ("el", "tr")}
    train_stage(root / "expanded", root / name, data, settings)
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


def test_modes_random_numbers_and_captured_routing_are_left_as_they_were(root):
    from hf_moe_expand.evaluation.validation import _untouched

    model = LayerMoEForCausalLM.from_pretrained(root / "expanded").train()
    frozen = next(module for module in model.modules() if isinstance(module, torch.nn.Dropout)).eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with model.capture_routing() as outer:
        with pytest.raises(RuntimeError, match="broken"), _untouched(model):
            assert not any(module.training for module in model.modules())
            torch.rand(7)
            raise RuntimeError("broken")
        model(torch.arange(5)[None])
    assert len(outer) == 3
    assert [module.training for module in model.modules()] == modes
    assert not frozen.training
    torch.manual_seed(3)
    with _untouched(model):
        torch.rand(7)
    assert torch.equal(torch.rand(4), expected)


class StopAt(TrainerCallback):
    """As a time limit would. Comes after the validation of its step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_an_interrupted_run_ends_with_the_same_curves(validated, root, monkeypatch):
    made = training._trainer

    def interrupted(*args):
        trainer = made(*args)
        step_end = trainer.training_step
        trainer.training_step = lambda *a, **k: stop() if trainer.state.global_step == 4 else step_end(*a, **k)
        return trainer

    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_trainer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(root, "broken", every=1)
    monkeypatch.undo()
    work = root / "broken.training"
    assert curves(work)["steps"] == [0, 1, 2, 3, 4]
    # Steps after the checkpoint that training goes on from come again: as if that of step 4 had not been written.
    (work / "checkpoint-4").rename(work / "gone")
    (work / "checkpoint-2").exists() or pytest.skip("only the last checkpoint is kept")
    done = train(root, "broken", every=1)
    assert curves(done)["steps"] == [0, 1, 2, 3, 4, 5]
