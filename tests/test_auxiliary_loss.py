"""A mixture's own auxiliary loss is off in an expanded model, whichever trainer trains it."""

import copy
import json
import pickle

import datasets
import pytest
import torch
from added import COUNTS, EXPERTS, IDS, fields
from conftest import ADDED, byte_tokenizer, tiny_config
from datasets import Dataset
from one_sft_step import ROWS, settings
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from hf_moe_expand import LayerMoEConfig, LayerMoEForCausalLM, MoESFTTrainer, RouterLossMixin

BASES = ("mixtral", "qwen3_moe")
OFF = (False, 0.0)
TEXT = [{"prompt": row["prompt"], "completion": row["completion"]} for row in ROWS]
PAIRS = [{"prompt": "Good day. ", "chosen": "Hello!", "rejected": "No."}] * 2
JUDGED = [{"prompt": "a", "completion": "b", "label": bool(label)} for label in (0, 1)]
ASKED = [{"prompt": "Good day. "}] * 2

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's own


class WithRouterLosses(RouterLossMixin, Trainer):
    pass


class DPOWithRouterLosses(RouterLossMixin, DPOTrainer):
    pass


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("CI", "true")  # TRL sends no telemetry
    datasets.disable_progress_bars()


def build(base, **changes):
    torch.manual_seed(0)
    dense = tiny_config(base, **EXPERTS | fields(base) | {"moe_intermediate_size": 16} | changes)
    return LayerMoEForCausalLM(LayerMoEConfig.from_dense(dense, num_experts_per_layer=COUNTS, **ADDED))


def read_of(config):
    return config.output_router_logits, config.router_aux_loss_coef


def written(folder):
    """config.json but for `use_cache`, which the library's Trainer turns off in any model."""
    return {**json.loads((folder / "config.json").read_text()), "use_cache": True}


@pytest.fixture(scope="module", params=BASES)
def saved(request, tmp_path_factory):
    """A checkpoint with a large coefficient, as an earlier version's after training with TRL."""
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param, router_aux_loss_coef=10.0).save_pretrained(folder)
    assert written(folder)["router_aux_loss_coef"] == 10.0
    assert written(folder)["output_router_logits"] is False
    (folder / "config.json").write_text(json.dumps({**written(folder), "output_router_logits": True}))
    byte_tokenizer().save_pretrained(folder)
    return folder


def trainer_of(kind, folder, model):
    if issubclass(kind, SFTTrainer):
        arguments, rows = settings(folder), TEXT
    elif issubclass(kind, DPOTrainer):
        arguments, rows = settings(folder, DPOConfig, per_device_train_batch_size=2), PAIRS
    elif issubclass(kind, KTOTrainer):
        arguments, rows = settings(folder, KTOConfig, per_device_train_batch_size=2), JUDGED
    elif issubclass(kind, GRPOTrainer):
        arguments = settings(
            folder, lambda max_length, **other: GRPOConfig(**other), per_device_train_batch_size=2, num_generations=2,
            max_completion_length=3,
        )  # fmt: skip
        rows = ASKED
    else:
        arguments = settings(
            folder, lambda max_length, **other: TrainingArguments(**other), per_device_train_batch_size=2
        )
        rows = [{"input_ids": row, "labels": row} for row in IDS]
        return kind(model, arguments, train_dataset=rows)
    more = {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]}
    return kind(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=byte_tokenizer(),
        **(more if issubclass(kind, GRPOTrainer) else {}),
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [Trainer, WithRouterLosses, SFTTrainer, MoESFTTrainer, DPOTrainer, DPOWithRouterLosses, KTOTrainer, GRPOTrainer],
)
def test_no_trainer_adds_it_or_saves_that_it_is_on(tmp_path, saved, kind):
    model = AutoModelForCausalLM.from_pretrained(saved)
    one = trainer_of(kind, tmp_path / "run", model)
    one.train()
    logged = one.state.log_history[0]
    assert not [name for name in logged if "aux" in name]
    assert logged["loss"] < 7  # log 257 and a balance loss of 1; the auxiliary loss would be 10 and more
    if "next_token_loss" in logged:
        assert logged["loss"] == pytest.approx(logged["next_token_loss"], rel=1e-4)
    one.save_model(str(tmp_path / "out"))
    assert written(tmp_path / "out") == written(saved)


def test_the_fields_read_as_off_and_keep_what_they_were(saved, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved)
    config = model.config
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    for same in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config)), type(config)(**config.to_dict())):
        assert read_of(same) == OFF
        assert read_of(type("", (), same.to_dict())) == (True, 10.0)
    with torch.no_grad():
        on, off = model(IDS, labels=IDS, output_router_logits=True), model(IDS, labels=IDS)
    assert torch.equal(on.loss, off.loss)
    assert len(on.router_logits) == len(COUNTS)
    model.save_pretrained(tmp_path)
    assert written(tmp_path) == written(saved)


@pytest.mark.parametrize("base", ["qwen2", "deepseek_v3"])
def test_configurations_without_the_fields_get_none(base):
    config = LayerMoEConfig.from_dense(tiny_config(base, **fields(base)), num_experts_per_layer=[1, 1, 1])
    assert not hasattr(config, "router_aux_loss_coef")
    assert "router_aux_loss_coef" not in config.to_dict()


def test_a_coefficient_that_is_asked_for_is_refused_beside_router_losses(tmp_path, saved):
    arguments = settings(tmp_path, SFTConfig, router_aux_loss_coef=0.01)
    with pytest.raises(ValueError, match=r"router_aux_loss_coef is 0\.01: it weighs .* Leave it out"):
        MoESFTTrainer(str(saved), arguments, train_dataset=Dataset.from_list(TEXT))
