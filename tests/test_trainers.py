"""The losses inside a Trainer (P6) and what is logged; a loss of a user's own; the loss in pieces."""

import json
import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import COMMON_BACKBONES, enable_checkpointing, fork_ranks, refused, shaken, tiny_config, tiny_dense
from datasets import Dataset
from one_step import assert_same, build, largest_difference, rows, train
from transformers import Trainer, TrainingArguments

import hf_moe_expand as moe
from hf_moe_expand.trainers import expert_selections, load_balance_loss
from hf_moe_expand.trainers import pieces as module
from hf_moe_expand.trainers.pieces import LogitsInPieces


def model(backbone="qwen2", **changes):
    fields = {"num_experts_per_layer": [3, 1, 2], "classifier_layers": [2], **changes}
    return moe.LayerMoEForCausalLM(moe.LayerMoEConfig.from_dense(tiny_config(backbone), **fields))


BALANCE = {"stage": "post", "balance": 1.0, "prior": 0.0, "classifier": 0.0}
BUDGET = {
    "stage": "post", "prior": 0.0, "classifier": 0.0, "budget": 1.0, "fields": {"conditional_routing": True},
}  # fmt: skip
REVIEW = {"prior": 1.0, "classifier": 1.0}
IN_PARTS = {"padded": True, "checkpointing": True, "batch": 2, "steps": 4}


@pytest.mark.parametrize(
    ("losses", "change", "weight"),
    [
        (REVIEW, IN_PARTS, "classifier"),
        (BALANCE, {"padded": True, "checkpointing": True}, "balance"),
        (BUDGET, IN_PARTS, "budget"),
    ],
    ids=["review", "balance", "budget"],
)
def test_p6_a_step_does_not_depend_on_how_it_is_cut(tmp_path, losses, change, weight):
    # One SGD step with learning rate 1: the parameters moved by the gradient.
    whole = train(str(tmp_path / "whole"), **losses)
    assert_same(train(str(tmp_path / "cut"), **losses, **change), whole)
    assert largest_difference(whole, train(str(tmp_path / "other"), **{**losses, weight: 2.0})) > 1e-3


def test_p6_accumulation_does_not_multiply_the_balance_weight(tmp_path):
    # Equal micro-batches: their mean is the loss of one of them.
    one, four = (train(str(tmp_path / str(n)), batch=2, steps=n, **BALANCE, same=True) for n in (1, 4))
    assert_same(one, four)


def test_p6_two_ranks_make_the_step_of_one(tmp_path):
    """With all losses at once. Of five rows scored two at a time, the second rank's last batch holds repeated ones."""
    options = {**BUDGET, **REVIEW, "stage": "post", "balance": 1.0, "distillation": 5.0, "scored": 5}
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
    shares = ("expert_0_score_old", "expert_0_score_new", "expert_3_share")
    assert all(0 < logs[name] < 1 for name in shares)
    losses = ("next_token_loss", "language_prior_loss", "classifier_loss", "old_tokens_right", "new_tokens_right")
    for name in (*losses, *shares):
        assert logs[name] == pytest.approx(split[name], abs=1e-5), name
    assert logs["expert_0_share"] + logs["expert_1_share"] + logs["expert_2_share"] <= 1.001


def plain_trainer(tmp_path, network, **changes):
    class MyTrainer(moe.RouterLossMixin, Trainer):
        pass

    ids, languages = rows()
    dataset = Dataset.from_dict({"input_ids": ids.tolist(), "language_ids": languages.tolist()})
    options = {"use_cpu": True, "report_to": "none", "max_steps": 1, "disable_tqdm": True, **changes}
    arguments = TrainingArguments(output_dir=str(tmp_path), **options)
    return MyTrainer(
        network, arguments, train_dataset=dataset, eval_dataset=dataset, data_collator=moe.collate_blocks,
        router_losses=[moe.BalanceLoss(0.1), moe.LanguagePriorLoss(0.1)], language_classes=[0, 1],
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
    smooth = {"label_smoothing_factor": 0.1}
    refused(plain_trainer, tmp_path, model(), **smooth, says="label_smoothing_factor", raises=ValueError)
    dense = model(num_experts_per_layer=[1, 1, 1], classifier_layers=[])
    refused(plain_trainer, tmp_path, dense, says="No layer of the model is expanded")
    network = model()
    trainer = plain_trainer(tmp_path, network)
    enable_checkpointing(network, reentrant=True)  # behind its back
    refused(trainer.train, says="router logits carry no gradient", raises=ValueError)


@dataclass(frozen=True)
class Flatness(moe.RouterLoss):
    """The mean over tokens of KL(u || p): u is the uniform distribution over the vocabulary, p the model's."""

    name = "flatness"
    metrics = ("flatness_loss",)
    needs_outputs = True

    coef: float = 1.0

    def __call__(self, batch: moe.LossBatch) -> torch.Tensor:
        log_p = batch.outputs.logits.float().flatten(0, 1).log_softmax(-1)[batch.tokens.counted_T]
        total = (-math.log(log_p.shape[-1]) - log_p.mean(-1)).sum()
        batch.record("flatness_loss", total, batch.local.counted)
        return total / batch.step.counted


def made():
    """A model whose experts differ enough for the routers to matter."""
    model = build()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def expected():
    """Routers and classifiers after one step of plain gradient descent with learning rate 1, and the loss before it."""
    model, (ids, _) = made().train(), rows()
    moving = {name: p for name, p in model.named_parameters() if "router" in name or "classifier" in name}
    log_p = model(ids).logits.log_softmax(-1).flatten(0, 1)
    kl = F.kl_div(log_p, torch.full_like(log_p, 1 / log_p.shape[-1]), reduction="batchmean")
    loss = model(ids, labels=ids).loss + 0.5 * kl
    loss.backward()
    return {name: (p if p.grad is None else p - p.grad).detach() for name, p in moving.items()}, kl.item()


@pytest.mark.parametrize("change", [{}, IN_PARTS], ids=["whole", "in parts"])
def test_a_step_follows_the_gradient_of_both_losses(tmp_path, expected, change):
    after, kl = expected
    logs = {}
    found = train(str(tmp_path), model=made(), losses=[Flatness(0.5)], logs=logs, **change)
    for name, value in after.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
    for name, value in made().named_parameters():
        assert name in after or torch.equal(found[name], value), name
    assert logs["flatness_loss"] == pytest.approx(kl, rel=1e-4)


IDS, _ = rows()
TOKENS = 5  # of a piece; no divisor of anything here


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE", TOKENS * 257 + 200)
    monkeypatch.setattr(module, "LARGE", 90 * 257)


@pytest.fixture
def widest(monkeypatch):
    """The most tokens of which logits were computed at once, since the batch became large."""
    found = []
    own = LogitsInPieces.logits

    def logits(self, hidden, *others):
        found.append(hidden.shape[:-1].numel())
        return own(self, hidden, *others)

    monkeypatch.setattr(LogitsInPieces, "logits", logits)
    return found


def different(backbone, **sizes):
    """An expanded model whose experts differ."""
    model = moe.expand_model(tiny_dense(backbone, **sizes), moe.Plan("moe-lpr", [3, 1, 2], old=["en"], new=["el"]))
    torch.manual_seed(1)
    for ffn in model.expanded_ffns().values():
        shaken(ffn)
    return model


def compare(folder, make, monkeypatch, widest, **options):
    logs, in_pieces = {}, {}
    whole = train(folder / "whole", model=make(), logs=logs, **options)
    assert not widest
    monkeypatch.setattr(module, "PIECE", TOKENS * 257 + 200)
    monkeypatch.setattr(module, "LARGE", 40 * 257)
    cut = train(folder / "cut", model=make(), logs=in_pieces, **options)
    assert 1 <= max(widest[1:]) <= TOKENS < widest[0] == 8  # the first are those by which the head was found
    for name in ("loss", "next_token_loss", "grad_norm"):
        assert in_pieces[name] == pytest.approx(logs[name], rel=2e-5), name
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=2e-4, atol=2e-5, msg=name)
    return logs


CUT = {"batch": 4, "steps": 2, "padded": True}
WHOLE = {"stage": "post", "everything": True}


@pytest.mark.parametrize("options", [CUT, WHOLE], ids=str)
def test_self_distillation_in_pieces(options, tmp_path, monkeypatch, widest):
    losses = [moe.DistillationLoss(2.0)]
    logs = compare(tmp_path, lambda: different("qwen2"), monkeypatch, widest, losses=losses, **options)
    assert logs["distillation_loss"] > 0.01


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *((partial(different, backbone), WHOLE) for backbone in COMMON_BACKBONES),
        (build, {"stage": "post"}),
        (build, CUT),
        (build, {"checkpointing": True, **WHOLE}),
        (partial(different, "gemma3_text", final_logit_softcapping=0.7), WHOLE),
        (partial(different, "granite", logits_scaling=3.0), WHOLE),
    ],
    ids=[*COMMON_BACKBONES, "stage", "cut", "checkpointing", "capped", "scaled"],
)
def test_a_step_is_that_of_the_whole_logits(make, options, tmp_path, monkeypatch, widest):
    compare(tmp_path, make, monkeypatch, widest, **options)


def test_a_batch_without_labels_has_no_loss(small_pieces):
    model = build().train()
    found = LogitsInPieces.of(model)
    assert (found.size(), model.training) == (TOKENS, True)
    with found.head_inputs() as kept:
        assert model(input_ids=IDS, use_cache=False).logits.shape == (8, 1, 257)
    assert found.next_token_loss(kept[0], torch.full_like(IDS, -100), 5) == 0


def test_other_logits_and_other_losses_are_left_alone(small_pieces, tmp_path, widest):
    def shifted():
        model = different("qwen2")
        bend = torch.linspace(-1, 1, 257)

        def bent(module, args, output):
            output.logits = output.logits + bend

        model.register_forward_hook(bent)
        return model

    assert LogitsInPieces.of(shifted()) is None
    train(tmp_path, model=shifted(), stage="post")
    assert set(widest) == {8}  # nothing but what found it
    other = build()
    other.loss_function = lambda **_: torch.tensor(0.0)
    assert LogitsInPieces.of(other) is None


def test_a_loss_that_reads_logits_finds_them_all(small_pieces, tmp_path):
    logs, whole = {}, {}
    train(tmp_path / "a", model=made(), logs=logs, losses=[Flatness(0.5)])
    assert logs["flatness_loss"] > 0
    module.LARGE = build().get_output_embeddings().weight.shape[0] * IDS.numel()
    train(tmp_path / "b", model=made(), logs=whole, losses=[Flatness(0.5)])
    assert logs["flatness_loss"] == whole["flatness_loss"]
