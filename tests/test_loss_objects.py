"""The losses as objects: against their functions, in the mixin, and those that a user writes."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import refused
from datasets import Dataset
from one_step import build, rows, train
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Trainer, TrainingArguments

import hf_moe_expand
from hf_moe_expand import (
    BalanceLoss,
    ClassifierLoss,
    DistillationLoss,
    GateBudgetLoss,
    GroupLoss,
    LanguagePriorLoss,
    LayerLoss,
    LocalizedBalanceLoss,
    LossBatch,
    RouterLossMixin,
)
from hf_moe_expand.data.packing import collate_blocks
from hf_moe_expand.modeling import LayerRouting
from hf_moe_expand.modeling.routing import select_experts
from hf_moe_expand.trainers.losses import (
    TokenCounts,
    TokenMasks,
    classifier_loss,
    expert_selections,
    gate_budget_loss,
    language_prior_routing_loss,
    load_balance_loss,
    localized_balance_loss,
)
from hf_moe_expand.trainers.routing_capture import record_routing

CLASSES = torch.tensor([0, 1, 1, 0, -1, 1, 0, 2, 1, 0, 0])
PADDING = torch.tensor([False] * 9 + [True] * 2)
LOSSES = [
    BalanceLoss(0.3), LanguagePriorLoss(0.3), ClassifierLoss(0.3), GroupLoss(0.3), GateBudgetLoss(0.3, 0.6),
    LocalizedBalanceLoss(0.3, 0.2),
]  # fmt: skip
BY_NAME = [pytest.param(loss, id=loss.name) for loss in LOSSES]
BY_NAME += [pytest.param(BalanceLoss(0.3, "top-1"), id="balance-top-1")]


def masks(classes=CLASSES, padding=PADDING):
    tagged = (classes >= 0) & ~padding
    return TokenMasks(~padding, tagged & (classes == 0), tagged, classes.clamp(min=0))


def layers(conditional=False, seed=0):
    """Routing of three layers, two with a classifier, of 11 tokens."""
    torch.manual_seed(seed)
    found = []
    for classes in (torch.randn(11, 3, requires_grad=True), None, torch.randn(11, 3, requires_grad=True)):
        logits = torch.randn(11, 4, requires_grad=True)
        chosen = select_experts(logits[:, 1:] if conditional else logits, 2)
        found.append(LayerRouting(logits, classes, 2, *chosen, shared=conditional))
    return found


def batch_of(routing, tokens, step=None, sums=None):
    """The value that a loss gets on one rank: a micro-batch of a step with `step` tokens."""
    counts = tokens.counts().float()
    sums = defaultdict(lambda: torch.zeros(2)) if sums is None else sums

    def record(name, numerator, denominator):
        sums[name] = sums[name] + torch.stack([numerator.detach(), denominator])

    own = TokenCounts(*counts.clamp(min=1))
    return LossBatch(
        routing, tokens, TokenCounts(*counts), own, own if step is None else TokenCounts(*step),
        [expert_selections(r.routed_logits, r.top_k, tokens.counted_T) for r in routing], lambda tensor: tensor, record,
    )  # fmt: skip


def functions(loss, routing, tokens):
    """The loss of each layer that it applies to, by its function."""
    for r in routing:
        if isinstance(loss, BalanceLoss):
            yield load_balance_loss(r.routed_logits, 1 if loss.balance_counts == "top-1" else r.top_k, tokens.counted_T)
        elif isinstance(loss, LanguagePriorLoss):
            yield language_prior_routing_loss(r.router_logits, tokens.old_T)
        elif isinstance(loss, GroupLoss):
            yield classifier_loss(r.router_logits, tokens.class_T, tokens.tagged_T)
        elif isinstance(loss, LocalizedBalanceLoss):
            yield localized_balance_loss(r.router_logits, tokens.old_T, tokens.new_T, 0.2)
        elif isinstance(loss, GateBudgetLoss) and r.shared:
            yield gate_budget_loss(r.router_logits, 0.6, tokens.counted_T)
        elif isinstance(loss, ClassifierLoss) and r.classifier_logits is not None:
            yield classifier_loss(r.classifier_logits, tokens.class_T, tokens.tagged_T)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("loss", BY_NAME)
def test_a_loss_is_the_mean_of_its_function_over_layers(loss, conditional):
    routing, tokens, sums = layers(conditional), masks(), defaultdict(lambda: torch.zeros(2))
    expected = list(functions(loss, routing, tokens))
    found = loss(batch_of(routing, tokens, sums=sums))
    if not expected:
        assert isinstance(loss, GateBudgetLoss)
        assert found == 0
        assert not sums
        return
    mean = sum(expected) / len(expected)
    torch.testing.assert_close(found, mean)
    parameters = [logits for r in routing for logits in (r.router_logits, r.classifier_logits) if logits is not None]
    gradients = [
        torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        for value in (loss.weighted(batch_of(routing, tokens)), 0.3 * mean)
    ]
    torch.testing.assert_close(*gradients)
    assert tuple(sorted(sums)) == tuple(sorted(loss.metrics))
    numerator, denominator = sums[f"{loss.name}_loss"].tolist()
    assert numerator / denominator == pytest.approx(mean.item(), rel=1e-5)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("loss", BY_NAME)
def test_no_loss_and_no_metric_reads_a_value_on_the_host(loss, conditional):
    """On a GPU the host would wait for it, in every layer of every step."""
    real, tokens = layers(conditional), masks()
    with FakeTensorMode() as fake:

        def made_fake(record):
            tensors = {name: value for name, value in vars(record).items() if isinstance(value, torch.Tensor)}
            return replace(record, **{name: fake.from_tensor(value) for name, value in tensors.items()})

        batch = batch_of([made_fake(layer) for layer in real], made_fake(tokens))
        record_routing(batch, expert_0_is_old=True)
        if conditional or not isinstance(loss, GateBudgetLoss):
            loss.weighted(batch).backward()


@pytest.mark.parametrize("loss", BY_NAME)
def test_the_shares_of_micro_batches_add_up_to_the_step(loss):
    """Means over tokens add up to the whole step's; balance losses are means over micro-batches, weighted by tokens."""
    routing, tokens = layers(conditional=isinstance(loss, GateBudgetLoss)), masks()
    parts = []
    for cut in (slice(0, 4), slice(4, 11)):
        cut_routing = [
            replace(r, router_logits=r.router_logits[cut],
                    classifier_logits=None if r.classifier_logits is None else r.classifier_logits[cut])
            for r in routing
        ]  # fmt: skip
        parts.append((cut_routing, masks(CLASSES[cut], PADDING[cut])))
    step = tokens.counts().float()
    found = sum(loss(batch_of(*part, step)) for part in parts)
    expected = loss(batch_of(routing, tokens))
    if loss.per_micro_batch:
        expected = sum(loss(batch_of(*part)) * part[1].counted_T.sum() for part in parts) / tokens.counted_T.sum()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("coef", [0.01, 0.1, 0.3])
def test_the_order_of_the_factors_is_kept_to_the_bit(coef):
    """It decides how gradients are rounded, and so every bit of a trained checkpoint."""
    routing, again, tokens, total = layers(), layers(), masks(), 0.0
    step = 1.7 * tokens.counts().float()
    batch = batch_of(routing, tokens, step)
    (BalanceLoss(coef).weighted(batch) * 2.0).backward()
    count = batch.micro_batch.counted
    for r in again:
        selections = expert_selections(r.router_logits, 2, tokens.counted_T)
        loss = load_balance_loss(r.router_logits, 2, tokens.counted_T, selections, count)
        total = total + coef * loss * (count / step[0]) / 3
    (total * 2.0).backward()
    for one, other in zip(routing, again, strict=True):
        assert torch.equal(one.router_logits.grad, other.router_logits.grad)


def test_accuracies_are_shares_of_the_tokens_of_known_language():
    routing, tokens, sums = layers(), masks(), defaultdict(lambda: torch.zeros(2))
    for loss in (ClassifierLoss(), GroupLoss()):
        loss(batch_of(routing, tokens, sums=sums))
    of_classifiers = [r.classifier_logits for r in routing if r.classifier_logits is not None]
    for name, logits, wanted in (
        ("group_accuracy", [r.router_logits for r in routing], {0, 1, 2}),
        ("old_tokens_right", of_classifiers, {0}),
        ("new_tokens_right", of_classifiers, {1, 2}),
    ):
        known = [t for t in range(9) if CLASSES[t].item() in wanted]
        right = sum(one[t].argmax().item() == CLASSES[t].item() for one in logits for t in known)
        assert sums[name].tolist() == [right, len(known) * len(logits)]


OTHERS = [BalanceLoss(0.0), GateBudgetLoss(0.0), LocalizedBalanceLoss(0.0), GroupLoss(0.0), ClassifierLoss(0.0)]


@pytest.mark.parametrize("conditional", [False, True])
def test_a_coefficient_of_0_changes_no_bit_and_is_logged(tmp_path, conditional):
    options = {"stage": "post", "everything": True, "batch": 2, "steps": 4}
    options["fields"] = {"conditional_routing": conditional}
    alone, logs = {}, {}
    plain = train(tmp_path / "a", losses=[LanguagePriorLoss(0.7)], logs=alone, **options)
    beside = train(tmp_path / "b", losses=[LanguagePriorLoss(0.7), *OTHERS], logs=logs, **options)
    assert plain.keys() == beside.keys()
    assert all(torch.equal(value, beside[name]) for name, value in plain.items())
    new = {metric for loss in OTHERS for metric in loss.metrics} - (set() if conditional else {"budget_loss"})
    assert logs.keys() - alone.keys() == new
    assert all(logs[name] == alone[name] for name in ("loss", "grad_norm"))
    assert all(math.isfinite(logs[name]) for name in new)


@pytest.mark.parametrize("losses", [[], [BalanceLoss(0.1)], [ClassifierLoss(0.0)]], ids=str)
def test_routers_and_classifiers_stay_in_the_graph(losses):
    """Ranks of a distributed run must agree on which parameters have a gradient."""

    class Mine(RouterLossMixin):
        def __init__(self):
            self.router_losses = tuple(losses)

    model = build()
    with model.capture_routing() as captured:
        output = model.train()(rows()[0])
    routing = list(captured)
    batch = batch_of(routing, masks(torch.zeros(96, dtype=torch.long), torch.zeros(96, dtype=torch.bool)))
    (output.logits.sum() + Mine()._router_loss(batch)).backward()
    for ffn in model.expanded_ffns().values():
        assert ffn.router.weight.grad is not None
        assert ffn.classifier is None or not ffn.classifier.weight.grad.any()


def test_the_published_coefficients_are_the_defaults():
    assert BalanceLoss() == BalanceLoss(0.01)
    assert (LanguagePriorLoss().coef, ClassifierLoss().coef, GroupLoss().coef) == (0.1, 0.1, 1.28)
    assert GateBudgetLoss() == GateBudgetLoss(0.1, 0.8)
    assert LocalizedBalanceLoss(0.1).delta == 0.1
    assert all(type(loss).__name__ in hf_moe_expand.__all__ for loss in LOSSES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BalanceLoss(-0.1), "BalanceLoss: coef is -0.1: must be a number of at least 0"),
        (lambda: GroupLoss(math.nan), "GroupLoss: coef is nan"),
        (lambda: BalanceLoss(0.01, "top1"), r"balance_counts is .*: must be 'top-k' or 'top-1'"),
        (lambda: GateBudgetLoss(0.1, gate_budget=80), "budget is 80: must be at least 0 and at most 1"),
        (lambda: LocalizedBalanceLoss(0.1, delta=1), "delta is 1: must be at least 0 and less than 1"),
        (lambda: trainer_with(BalanceLoss(0.1)), r"router_losses is BalanceLoss\(coef=0.1, .*\): must be a list"),
        (lambda: trainer_with([BalanceLoss]), "which is not a RouterLoss: pass objects"),
        (lambda: trainer_with([BalanceLoss(0.1), BalanceLoss(0.2)]), "two losses that log balance_loss: leave one"),
    ],
)
def test_refusals(make, message):
    refused(make, says=message)


def trainer_with(losses):
    class Mine(RouterLossMixin, Trainer):
        pass

    return Mine(router_losses=losses)


def test_gshards_balance_counts_the_first_choice_of_each_token_on_all_ranks():
    """Lepikhin et al. 2020: `sum_e c_e / S * m_e`, scaled to 1 under even routing; two ranks with the same tokens."""
    (r, *_), tokens, calls = layers(), masks(), []

    def of_two_ranks(tensor):
        calls.append(tensor)
        return 2 * tensor

    batch = replace(batch_of([r], tokens), sum_over_ranks=of_two_ranks)
    batch = replace(batch, micro_batch=TokenCounts(*(2 * n for n in batch.micro_batch)))
    batch = replace(batch, step=batch.micro_batch)
    counted = r.router_logits[tokens.counted_T]
    scores = counted.softmax(-1)
    first = [int((counted.argmax(-1) == e).sum()) for e in range(4)]
    expected = sum(4 * first[e] / len(counted) * scores[:, e].mean() for e in range(4))
    torch.testing.assert_close(BalanceLoss(1.0, "top-1")(batch), expected / 2)  # this rank's share
    assert [call.tolist() for call in calls] == [first]


@dataclass(frozen=True)
class RouterZ(LayerLoss):
    name = "z"
    metrics = ("z_loss",)

    def layer_loss(self, batch, layer, count):
        return batch.routing[layer].router_logits.logsumexp(-1).square()[batch.tokens.counted_T].sum() / count


@pytest.mark.parametrize(("losses", "wanted"), [([RouterZ(0.1)], False), ([RouterZ(0.1), DistillationLoss(0.0)], True)])
def test_outputs_are_asked_for_only_if_a_loss_reads_them(tmp_path, losses, wanted):
    asked = []

    class Watched(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            asked.append(return_outputs)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    class Mine(RouterLossMixin, Watched):
        pass

    ids, languages = rows()
    data = Dataset.from_dict({"input_ids": ids.tolist(), "language_ids": languages.tolist()})
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1, disable_tqdm=True)
    options = {"train_dataset": data, "data_collator": collate_blocks, "language_classes": [0, 1]}
    trainer = Mine(build(), arguments, router_losses=losses, **options)
    trainer.train()
    assert asked == [wanted]
    log = trainer.state.log_history[-1]
    assert {"z_loss", "expert_0_share", "expert_0_score_old"} <= log.keys()
    assert "balance_loss" not in log
    assert ("distillation_loss" in log) == wanted


def test_a_loss_that_is_only_logged_leaves_the_step_finite():
    class Infinite(LayerLoss):
        name, metrics = "infinite", ("infinite_loss",)

        def layer_loss(self, batch, layer, count):
            return batch.routing[layer].router_logits.sum() * math.inf

    assert Infinite(0.0).weighted(batch_of(layers(), masks())) == 0
