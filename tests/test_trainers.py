"""Freezing, the losses inside a Trainer (P3, P6), and what is logged."""

import json

import pytest
import torch
from conftest import checkpointed, enable_checkpointing, fork_ranks, refused, tiny_config
from datasets import Dataset
from one_step import rows, train
from transformers import Trainer, TrainingArguments

from hf_moe_expand import (
    BalanceLoss,
    LanguagePriorLoss,
    LayerMoEConfig,
    LayerMoEForCausalLM,
    ReviewConfig,
    ReviewTrainer,
    RouterLossMixin,
    freeze,
)
from hf_moe_expand.data.packing import collate_blocks
from hf_moe_expand.trainers import expert_selections, load_balance_loss


def model(backbone="qwen2", **changes):
    fields = {"num_experts_per_layer": [3, 1, 2], "classifier_layers": [2], **changes}
    return LayerMoEForCausalLM(LayerMoEConfig.from_dense(tiny_config(backbone), **fields))


def trainable(network):
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


def test_the_report_counts_what_trains():
    network = model()
    report = freeze(network, "review")
    assert report.trainable == (3 + 2) * 32 + 2 * 32
    assert report.parts == {"base": 0, "experts": 0, "routers": 160, "classifiers": 64}
    assert report.total == sum(parameter.numel() for parameter in network.parameters())
    assert "routers 160, classifiers 64" in str(report)
    assert freeze(network, "everything").parts["base"] > 0


def assert_same(a, b, **tolerances):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=name, **(tolerances or {"rtol": 1e-4, "atol": 1e-6}))


def largest_difference(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def whole_batch(tmp_path_factory):
    return train(str(tmp_path_factory.mktemp("whole")), prior=1.0, classifier=1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 4, "steps": 2},
        {"batch": 1, "steps": 8},
        {"padded": True},
        {"padded": True, "batch": 2, "steps": 4},
        {"checkpointing": True},
        {"checkpointing": True, "batch": 2, "steps": 4},
    ],
    ids=str,
)
def test_p6_review_losses_do_not_depend_on_how_a_step_is_cut(tmp_path, whole_batch, change):
    # One SGD step with learning rate 1: the parameters moved by the gradient.
    assert_same(train(str(tmp_path), prior=1.0, classifier=1.0, **change), whole_batch)


def test_the_check_above_can_fail(tmp_path, whole_batch):
    assert largest_difference(train(str(tmp_path), prior=1.1, classifier=1.0), whole_batch) > 1e-3


@pytest.mark.parametrize("change", [{"padded": True}, {"checkpointing": True}], ids=str)
def test_p6_balance_does_not_depend_on_padding_or_checkpointing(tmp_path, change):
    options = {"stage": "post", "balance": 1.0, "prior": 0.0, "classifier": 0.0}
    assert_same(train(str(tmp_path / "a"), **options), train(str(tmp_path / "b"), **options, **change))


BUDGET = {
    "stage": "post", "prior": 0.0, "classifier": 0.0, "budget": 1.0, "fields": {"conditional_routing": True},
}  # fmt: skip


@pytest.mark.parametrize(
    "change", [{"batch": 1, "steps": 8}, {"padded": True, "batch": 2, "steps": 4}, {"checkpointing": True}], ids=str
)
def test_p6_the_gates_budget_does_not_depend_on_how_a_step_is_cut(tmp_path, change):
    whole = train(str(tmp_path / "a"), **BUDGET)
    assert_same(train(str(tmp_path / "b"), **BUDGET, **change), whole)
    assert largest_difference(whole, train(str(tmp_path / "c"), **{**BUDGET, "budget": 1.1})) > 1e-3


def test_p6_accumulation_does_not_multiply_the_balance_weight(tmp_path):
    # Equal micro-batches: their mean is the loss of one of them.
    options = {"stage": "post", "balance": 1.0, "prior": 0.0, "classifier": 0.0, "same": True}
    one = train(str(tmp_path / "a"), batch=2, steps=1, **options)
    four = train(str(tmp_path / "b"), batch=2, steps=4, **options)
    assert_same(one, four)
    without = train(str(tmp_path / "c"), batch=2, steps=1, **{**options, "balance": 0.0})
    assert largest_difference(one, without) > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"stage": "post", "balance": 1.0, "prior": 0.0, "classifier": 0.0},
        {"stage": "review", "prior": 1.0, "classifier": 1.0},
        BUDGET,
        {"stage": "post", "prior": 0.0, "classifier": 0.0, "distillation": 5.0},
    ],
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
    with pytest.raises(ValueError, match=r"reentrant gradient checkpointing .*use_reentrant"):
        plain_trainer(tmp_path, model(), **checkpointed(reentrant=True))
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        plain_trainer(tmp_path, model(), label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="need language_classes"):
        ReviewTrainer(model(), args=ReviewConfig(str(tmp_path)))
    untagged = plain_trainer(tmp_path, model())
    untagged.train_dataset = untagged.train_dataset.remove_columns("language_ids")
    untagged.data_collator = lambda rows: {
        "input_ids": (ids := torch.tensor([r["input_ids"] for r in rows])),
        "labels": ids,
    }
    refused(untagged.train, says="and batches with language_ids", raises=ValueError)
    further = plain_trainer(tmp_path, model())
    further.train_dataset = further.train_dataset.map(lambda row: {"language_ids": [7] * len(row["input_ids"])})
    with pytest.raises(ValueError, match=r"A batch has the language id 7, but .* 2 classes, of the ids 0\.\.1\."):
        further.train()
    dense = model(num_experts_per_layer=[1, 1, 1], classifier_layers=[])
    with pytest.raises(ValueError, match="No layer of the model is expanded"):
        plain_trainer(tmp_path, dense).train()


def test_reentrant_checkpointing_behind_the_trainers_back_is_noticed(tmp_path):
    network = model()
    trainer = plain_trainer(tmp_path, network)
    enable_checkpointing(network, reentrant=True)
    refused(trainer.train, says="router logits carry no gradient", raises=ValueError)
