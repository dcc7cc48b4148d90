"""The losses against slow, obvious definitions: functions, objects, in the mixin, a user's own; self-distillation."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import refused, tiny_dense
from one_step import build, rows, train
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Trainer

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
    Plan,
    ReviewConfig,
    RouterLossMixin,
    expand_model,
)
from hf_moe_expand.modeling import LayerRouting
from hf_moe_expand.modeling.routing import select_experts
from hf_moe_expand.trainers.losses import (
    TokenCounts,
    TokenMasks,
    classifier_loss,
    distillation_loss,
    expert_selections,
    language_prior_routing_loss,
    load_balance_loss,
    localized_balance_loss,
)
from hf_moe_expand.trainers.losses.balance import language_importance, tokens_of_experts
from hf_moe_expand.trainers.losses.distillation import base_logits
from hf_moe_expand.trainers.routing_capture import record_routing


def scores(rows):
    return [row.exp() / row.exp().sum() for row in rows]


def slow_balance(logits, top_k, counted):
    rows, N, loss = logits[counted], logits.shape[1], 0.0
    for expert in range(N):
        chosen = sum(expert in sorted(range(N), key=lambda e: -row[e].item())[:top_k] for row in rows)
        share = chosen * N / (min(top_k, N) * len(rows))
        loss = loss + share * sum(score[expert] for score in scores(rows)) / len(rows)
    return loss


def slow_classes(logits, classes, known):
    """The mean cross-entropy of the tokens whose class is known; of class 0, the language-prior loss."""
    chosen = [score[number] for score, number in zip(scores(logits[known]), classes[known], strict=True)]
    return -sum(score.log() for score in chosen) / len(chosen)


def slow_localized(logits, old, new, delta):
    N, values = logits.shape[1], []
    for kind, tokens in enumerate((old, new)):
        for expert in range(N):
            own = (expert >= N // 2) == bool(kind)
            importance = N * sum(score[expert] for score in scores(logits[tokens])) / tokens.sum()
            values.append((1 - delta if own else 1 + delta) * importance)
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 2, 2), (7, 3, 2), (13, 5, 2), (9, 4, 1), (5, 2, 3)])
def test_balance_losses_are_their_definitions(tokens, experts, top_k):
    torch.manual_seed(tokens)
    logits, counted = torch.randn(tokens, experts), torch.tensor([t % 4 != 3 for t in range(tokens)])
    torch.testing.assert_close(load_balance_loss(logits, top_k, counted), slow_balance(logits, top_k, counted))
    if tokens > 1:
        old, new = torch.arange(tokens) % 3 == 0, torch.arange(tokens) % 3 == 1
        for delta in (0.0, 0.1, 0.5):
            expected = slow_localized(logits, old, new, delta)
            torch.testing.assert_close(localized_balance_loss(logits, old, new, delta), expected)


# The experts of each class, and the classes of tokens; the last token is padding.
RANGES, OF_TOKENS = [(0, 1), (1, 4), (4, 5), (5, 7)], torch.tensor([1, 0, 1, 3, 3, 1, 2, 3, 3, 1, 1, 3])
OWN = torch.zeros(12, 7, dtype=torch.bool)
for token, number in enumerate(OF_TOKENS):
    OWN[token, slice(*RANGES[number])] = True
COUNTED = torch.arange(12) < 11


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_balance_of_exclusive_experts_is_the_mean_of_their_classes(top_k):
    torch.manual_seed(1)
    logits, expected, chosen = torch.randn(12, 7, requires_grad=True), 0.0, torch.zeros(7)
    own = logits.masked_fill(~OWN, float("-inf"))
    for number, (first, end) in enumerate(RANGES):
        rows = logits.detach()[(number == OF_TOKENS) & COUNTED, first:end]
        expected += len(rows) / 11 * slow_balance(rows, top_k, slice(None)).item()
        chosen[first:end] = expert_selections(rows, top_k)
    loss = load_balance_loss(own, top_k, COUNTED, own_TN=OWN)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert expert_selections(own, top_k, COUNTED).tolist() == chosen.tolist()
    assert (logits.grad[~OWN] == 0).all()
    has_choice = {number for number, (first, end) in enumerate(RANGES) if end - first > top_k}
    for token in range(11):
        assert (logits.grad[token].abs().max() > 1e-6) == (OF_TOKENS[token].item() in has_choice)


def test_the_balance_adds_up_over_ranks():
    logits = torch.randn(12, 7).masked_fill(~OWN, float("-inf"))
    whole = {"selections_N": expert_selections(logits, 2, COUNTED), "tokens_N": tokens_of_experts(OWN, COUNTED)}
    parts = [
        load_balance_loss(*part[:1], 2, part[1], tokens=11, own_TN=part[2], **whole)
        for part in zip(logits.split([5, 7]), COUNTED.split([5, 7]), OWN.split([5, 7]), strict=True)
    ]
    assert sum(parts).item() == pytest.approx(load_balance_loss(logits, 2, COUNTED, own_TN=OWN).item(), rel=1e-6)


def test_losses_of_no_token_and_of_a_constant():
    logits, nothing = torch.randn(4, 3, requires_grad=True), torch.zeros(4, dtype=torch.bool)
    losses = language_prior_routing_loss(logits, nothing), localized_balance_loss(logits, nothing, nothing)
    assert losses == (0, 0)
    sum(losses).backward()
    assert not logits.grad.any()
    always_old, classes = torch.tensor([[10.0, -10.0]]).repeat(4, 1), torch.tensor([0, 1, 1, 0])
    assert classifier_loss(always_old, classes, classes >= 0) > 5  # which so does not satisfy it


MASKS = torch.tensor([0, 1, 1, 0, -1, 1, 0, 1, 1])
OLD_TOKENS, NEW_TOKENS = MASKS == 0, MASKS == 1


def test_the_localized_balance_of_one_kind_of_language():
    logits = torch.randn(9, 4)
    one = localized_balance_loss(logits, torch.zeros(9, dtype=torch.bool), NEW_TOKENS, 0.1)
    values = 4 * logits[NEW_TOKENS].softmax(-1).mean(0) * torch.tensor([1.1, 1.1, 0.9, 0.9])
    torch.testing.assert_close(one, values.var(correction=0) / values.mean())


def test_the_localized_balance_adds_up_over_ranks():
    logits = torch.randn(9, 4, requires_grad=True, generator=torch.Generator().manual_seed(0))
    whole = localized_balance_loss(logits, OLD_TOKENS, NEW_TOKENS)
    tokens = torch.stack([OLD_TOKENS.sum(), NEW_TOKENS.sum()])
    importance = language_importance(logits.detach(), OLD_TOKENS, NEW_TOKENS)
    cut = zip(*(tensor.split([4, 5]) for tensor in (logits, OLD_TOKENS, NEW_TOKENS)), strict=True)
    parts = sum(localized_balance_loss(*part, importance_2N=importance, tokens_2=tokens) for part in cut)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (parts, whole)))


IDS, LANGUAGES = rows()
OLD = LANGUAGES == 0


def test_the_loss_is_the_mean_divergence_of_old_tokens():
    torch.manual_seed(0)
    logits, base = torch.randn(6, 9, requires_grad=True), torch.randn(6, 9)
    old = torch.tensor([True, False, True, True, False, False])
    expected = 0.0
    for t in (0, 2, 3):
        p, q = base[t].softmax(0), logits[t].softmax(0)
        expected = expected + sum(p[v] * (p[v].log() - q[v].log()) for v in range(9)) / 3
    torch.testing.assert_close(distillation_loss(logits, base, old), expected)
    torch.testing.assert_close(distillation_loss(logits, base, old, count=12), expected / 4)
    assert distillation_loss(logits, base, torch.zeros(6, dtype=torch.bool)) == 0
    assert distillation_loss(logits, logits) == 0
    (slope,) = torch.autograd.grad(distillation_loss(logits, logits.detach() + 3.0), logits)
    torch.testing.assert_close(slope, torch.zeros(6, 9))  # at its minimum: the loss knows no shift of the logits


def test_the_base_runs_without_gradients_on_old_rows_alone(tmp_path):
    model, passes = build(), []

    def note(module, inputs, output):
        passes.append((len(output.logits), model.routing_control.request.expert, torch.is_grad_enabled()))

    model.register_forward_hook(note)
    train(tmp_path, model=model, losses=[DistillationLoss(1.0), LanguagePriorLoss(0.1)], batch=4, steps=2)
    old_rows = [part.any(-1).sum().item() for part in OLD.split(4)]
    assert passes == [one for old in old_rows for one in ((4, None, True), (old, 0, False))]


def test_the_base_has_no_dropout_and_no_adapter():
    plan = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"])
    dense = tiny_dense("gpt2").eval()
    for module in dense.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    with torch.no_grad():
        expected = dense(IDS).logits
    model = expand_model(dense, plan).train()
    frozen_part = next(iter(model.expanded_ffns().values())).experts[0].eval()
    assert torch.equal(base_logits(model, {"input_ids": IDS}), expected)
    assert model.training
    assert not frozen_part.training
    adapted = get_peft_model(model, LoraConfig(target_modules=["c_attn"], init_lora_weights=False))
    with adapted.get_base_model().use_expert(0), torch.no_grad():
        assert not torch.allclose(adapted.eval()(IDS).logits, expected, atol=1e-3)
    assert torch.equal(base_logits(adapted.train(), {"input_ids": IDS}), expected)


CLASSES = torch.tensor([0, 1, 1, 0, -1, 1, 0, 2, 1, 0, 0])
PADDING = torch.tensor([False] * 9 + [True] * 2)
# Each loss, and its definition in a layer.
LOSSES = {
    BalanceLoss(0.3): lambda r, tokens: slow_balance(r.routed_logits, r.top_k, tokens.counted_T),
    BalanceLoss(0.3, "top-1"): lambda r, tokens: slow_balance(r.routed_logits, 1, tokens.counted_T),
    LanguagePriorLoss(0.3): lambda r, tokens: slow_classes(r.router_logits, 0 * tokens.class_T, tokens.old_T),
    ClassifierLoss(0.3): lambda r, tokens: slow_classes(r.classifier_logits, tokens.class_T, tokens.tagged_T),
    GroupLoss(0.3): lambda r, tokens: slow_classes(r.router_logits, tokens.class_T, tokens.tagged_T),
    GateBudgetLoss(0.3, 0.6): lambda r, tokens: sum(
        (1 - score[0] - 0.6).abs() / tokens.counted_T.sum() for score in scores(r.router_logits[tokens.counted_T])
    ),
    LocalizedBalanceLoss(0.3, 0.2): lambda r, tokens: slow_localized(r.router_logits, tokens.old_T, tokens.new_T, 0.2),
}
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=str)


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


@pytest.mark.parametrize("conditional", [False, True])
@each_loss
def test_a_loss_is_the_mean_of_its_definition_over_layers(loss, conditional):
    routing, tokens, sums = layers(conditional), masks(), defaultdict(lambda: torch.zeros(2))
    found = loss(batch_of(routing, tokens, sums=sums))
    if isinstance(loss, GateBudgetLoss) and not conditional:
        assert found == 0
        assert not sums
        return
    layers_of_it = [r for r in routing if r.classifier_logits is not None or not isinstance(loss, ClassifierLoss)]
    mean = sum(LOSSES[loss](r, tokens) for r in layers_of_it) / len(layers_of_it)
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
@each_loss
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


@each_loss
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


def test_the_published_coefficients_are_the_defaults():
    assert BalanceLoss() == BalanceLoss(0.01)
    assert (LanguagePriorLoss().coef, ClassifierLoss().coef, GroupLoss().coef) == (0.1, 0.1, 1.28)
    assert GateBudgetLoss() == GateBudgetLoss(0.1, 0.8)
    assert LocalizedBalanceLoss(0.1).delta == 0.1  # MoE-LPR, appendix B: blc-alpha
    assert ReviewConfig("out").router_losses() == [BalanceLoss(0.0), LanguagePriorLoss(0.1), ClassifierLoss(0.1)]
    assert all(type(loss).__name__ in hf_moe_expand.__all__ for loss in LOSSES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupLoss(math.nan), "GroupLoss: coef is nan: must be a number of at least 0"),
        (lambda: BalanceLoss(0.01, "top1"), r"balance_counts is .*: must be 'top-k' or 'top-1'"),
        (lambda: GateBudgetLoss(0.1, gate_budget=80), "budget is 80: must be at least 0 and at most 1"),
        (lambda: LocalizedBalanceLoss(0.1, delta=1), "delta is 1: must be at least 0 and less than 1"),
        (lambda: trainer_with(BalanceLoss(0.1)), "router_losses is BalanceLoss"),
        (lambda: trainer_with([BalanceLoss]), "which is not a RouterLoss"),
        (lambda: trainer_with([BalanceLoss(0.1), BalanceLoss(0.2)]), "two losses that log balance_loss: leave one"),
    ],
)
def test_refusals(make, message):
    refused(make, says=message)


def trainer_with(losses):
    return type("Mine", (RouterLossMixin, Trainer), {})(router_losses=losses)


def test_gshards_balance_counts_the_first_choices_on_all_ranks():
    """Lepikhin et al. 2020; of two ranks with the same tokens each has half of the loss."""
    (r, *_), tokens, calls = layers(), masks(), []
    batch = batch_of([r], tokens)
    of_two = TokenCounts(*(2 * n for n in batch.micro_batch))
    double = replace(batch, sum_over_ranks=lambda one: calls.append(one) or 2 * one, micro_batch=of_two, step=of_two)
    torch.testing.assert_close(2 * BalanceLoss(1.0, "top-1")(double), BalanceLoss(1.0, "top-1")(batch))
    first = r.router_logits[tokens.counted_T].argmax(-1)
    assert [call.tolist() for call in calls] == [[int((first == e).sum()) for e in range(4)]]


@dataclass(frozen=True)
class RouterZ(LayerLoss):
    name = "z"
    metrics = ("z_loss",)

    def layer_loss(self, batch, layer, count):
        return batch.routing[layer].router_logits.logsumexp(-1).square()[batch.tokens.counted_T].sum() / count


@pytest.mark.parametrize(("losses", "wanted"), [([RouterZ(0.1)], False), ([RouterZ(0.1), DistillationLoss(0.0)], True)])
def test_outputs_are_asked_for_only_if_a_loss_reads_them(tmp_path, monkeypatch, losses, wanted):
    asked, log, compute = [], {}, Trainer.compute_loss

    def watched(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        asked.append(return_outputs)
        return compute(self, model, inputs, return_outputs, num_items_in_batch)

    monkeypatch.setattr(Trainer, "compute_loss", watched)
    train(tmp_path, losses=losses, logs=log)
    assert asked == [wanted]
    assert {"z_loss", "expert_0_share", "expert_0_score_old"} <= log.keys()
    assert "balance_loss" not in log
    assert ("distillation_loss" in log) == wanted


def test_a_loss_that_is_only_logged_leaves_the_step_finite():
    class Infinite(LayerLoss):
        name, metrics = "infinite", ("infinite_loss",)

        def layer_loss(self, batch, layer, count):
            return batch.routing[layer].router_logits.sum() * math.inf

    assert Infinite(0.0).weighted(batch_of(layers(), masks())) == 0
