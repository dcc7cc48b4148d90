"""Freezing, the losses inside a Trainer (P3, P6), and what is logged."""

import json

import pytest
import torch
from conftest import enable_checkpointing, fork_ranks, refused, tiny_config
from datasets import Dataset
from one_step import assert_same, largest_difference, rows, train
from transformers import Trainer, TrainingArguments

from hf_moe_expand import (
    BalanceLoss,
    LanguagePriorLoss,
    LayerMoEConfig,
    LayerMoEForCausalLM,
    RouterLossMixin,
)
from hf_moe_expand.data.packing import collate_blocks
from hf_moe_expand.trainers import expert_selections, load_balance_loss


def model(backbone="qwen2", **changes):
    fields = {"num_experts_per_layer": [3, 1, 2], "classifier_layers": [2], **changes}
    return LayerMoEForCausalLM(LayerMoEConfig.from_dense(tiny_config(backbone), **fields))


BALANCE = {"stage": "post", "balance": 1.0, "prior": 0.0, "classifier": 0.0}
BUDGET = {
    "stage": "post", "prior": 0.0, "classifier": 0.0, "budget": 1.0, "fields": {"conditional_routing": True},
}  # fmt: skip
REVIEW = {"prior": 1.0, "classifier": 1.0}


@pytest.mark.parametrize(
    ("losses", "changes"),
    [
        (
            REVIEW,
            [
                {"batch": 4, "steps": 2},
                {"padded": True},
                {"padded": True, "batch": 2, "steps": 4},
                {"checkpointing": True},
                {"checkpointing": True, "batch": 1, "steps": 8},
            ],
        ),
        (BALANCE, [{"padded": True}, {"checkpointing": True}]),
        (BUDGET, [{"batch": 1, "steps": 8}, {"padded": True, "batch": 2, "steps": 4}, {"checkpointing": True}]),
    ],
    ids=["review", "balance", "budget"],
)
def test_p6_a_step_does_not_depend_on_how_it_is_cut(tmp_path, losses, changes):
    # One SGD step with learning rate 1: the parameters moved by the gradient.
    whole = train(str(tmp_path / "whole"), **losses)
    for change in changes:
        assert_same(train(str(tmp_path / str(change)), **losses, **change), whole)
    weight = next(name for name in ("budget", "balance", "prior") if losses.get(name))
    assert largest_difference(whole, train(str(tmp_path / "other"), **{**losses, weight: 1.1})) > 1e-3


def test_p6_accumulation_does_not_multiply_the_balance_weight(tmp_path):
    # Equal micro-batches: their mean is the loss of one of them.
    one, four = (train(str(tmp_path / str(n)), batch=2, steps=n, **BALANCE, same=True) for n in (1, 4))
    assert_same(one, four)


@pytest.mark.parametrize(
    "options",
    [BALANCE, REVIEW, BUDGET, {"stage": "post", "prior": 0.0, "classifier": 0.0, "distillation": 5.0}],
    ids=["post-pretrain", "review", "budget", "distillation"],
)
def test_p6_two_ranks_make_the_step_of_one(tmp_path, options):
    # Of five rows scored two at a time, the second rank's last batch holds repeated rows alone.
    options = {**options, "scored": 5}
    fork_ranks("one_step.py", str(tmp_path / "two.pt"), json.dumps({**options, "batch": 4}))
    one = train(str(tmp_path / "one"), **options, batch=8)
    assert {"eval_loss", "eval_next_token_loss"} <= one.keys()
    assert "eval_expert_1_share" in one
    assert_same(torch.load(tmp_path / "two.pt"), one)


def test_logged_parts_are_the_losses_of_the_batch(tmp_path):
    logs, split = {}, {}
    train(str(tmp_path / "a"), prior=0.3, classifier=0.2, balance=0.5, logs=logs)
    train(str(tmp_path / "b"), prior=0.3, classifier=0.2, balance=0.5, batch=2, steps=4, logs=split)
    total = logs["next_token_loss"] + 0.5 * logs["balance_loss"]
    total += 0.3 * logs["language_prior_loss"] + 0.2 * logs["classifier_loss"]
    assert float(logs["loss"]) == pytest.approx(total, abs=2e-3)
    for name in ("next_token_loss", "language_prior_loss", "classifier_loss", "old_tokens_right", "new_tokens_right"):
        assert logs[name] == pytest.approx(split[name], abs=1e-5), name
    for name in ("expert_0_score_old", "expert_0_score_new", "expert_3_share"):
        assert 0 < logs[name] < 1
        assert logs[name] == pytest.approx(split[name], abs=1e-5), name
    assert logs["expert_0_share"] + logs["expert_1_share"] + logs["expert_2_share"] <= 1.001


def plain_trainer(tmp_path, network, **changes):
    class MyTrainer(RouterLossMixin, Trainer):
        pass

    ids, languages = rows()
    dataset = Dataset.from_dict({"input_ids": ids.tolist(), "language_ids": languages.tolist()})
    options = {"use_cpu": True, "report_to": "none", "max_steps": 1, "disable_tqdm": True, **changes}
    arguments = TrainingArguments(output_dir=str(tmp_path), **options)
    return MyTrainer(
        network, arguments, train_dataset=dataset, eval_dataset=dataset, data_collator=collate_blocks,
        router_losses=[BalanceLoss(0.1), LanguagePriorLoss(0.1)], language_classes=[0, 1],
    )  # fmt: skip


def test_the_mixin_on_a_plain_trainer_and_its_evaluation(tmp_path):
    network = model()
    metrics = plain_trainer(tmp_path, network, per_device_eval_batch_size=8).evaluate()
    ids, languages = rows()
    with torch.no_grad(), network.capture_routing() as routing:
        loss = network(ids, labels=ids).loss.item()
    balance = sum(load_balance_loss(r.router_logits, r.top_k) for r in routing) / 2
    old = (languages == 0).flatten()
    prior = sum(-r.router_logits.log_softmax(-1)[old, 0].mean() for r in routing) / 2
    assert metrics["eval_loss"] == pytest.approx(loss + 0.1 * balance.item() + 0.1 * prior.item(), rel=1e-4)
    logged = plain_trainer(tmp_path, network, per_device_eval_batch_size=3)
    logged.evaluate()
    found = logged.state.log_history[-1]
    assert found["eval_language_prior_loss"] == pytest.approx(prior.item(), rel=1e-4)
    share = sum(expert_selections(r.router_logits, 2)[0] for r in routing) / (2 * 2 * old.numel())
    assert found["eval_expert_0_share"] == pytest.approx(share.item(), abs=1e-5)


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        plain_trainer(tmp_path, model(), label_smoothing_factor=0.1)
    dense = model(num_experts_per_layer=[1, 1, 1], classifier_layers=[])
    with pytest.raises(ValueError, match="No layer of the model is expanded"):
        plain_trainer(tmp_path, dense).train()


def test_reentrant_checkpointing_behind_the_trainers_back_is_noticed(tmp_path):
    network = model()
    trainer = plain_trainer(tmp_path, network)
    enable_checkpointing(network, reentrant=True)
    refused(trainer.train, says="router logits carry no gradient", raises=ValueError)
