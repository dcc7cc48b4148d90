"""The losses against slow, obvious definitions; LoRAMoE's localized balance in the trainers, too."""

import math

import pytest
import torch

from hf_moe_expand.trainers import (
    classifier_loss,
    expert_selections,
    language_prior_routing_loss,
    load_balance_loss,
    localized_balance_loss,
)
from hf_moe_expand.trainers.losses.balance import language_importance, tokens_of_experts


def slow_balance(logits, top_k, counted):
    T, N = sum(counted), logits.shape[1]
    loss = 0.0
    for i in range(N):
        selections, scores = 0, 0.0
        for t in range(logits.shape[0]):
            if not counted[t]:
                continue
            exponentials = [math.exp(value) for value in logits[t].tolist()]
            ranked = sorted(range(N), key=lambda e: -exponentials[e])
            selections += i in ranked[:top_k]
            scores += exponentials[i] / sum(exponentials)
        loss += (N / (min(top_k, N) * T) * selections) * (scores / T)
    return loss


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 2, 2), (7, 3, 2), (13, 5, 2), (9, 4, 1), (5, 2, 3)])
def test_balance_loss_is_its_definition(tokens, experts, top_k):
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, experts)
    counted = [t % 4 != 3 for t in range(tokens)]
    found = load_balance_loss(logits, top_k, torch.tensor(counted))
    assert found.item() == pytest.approx(slow_balance(logits, top_k, counted), rel=1e-5)


# The experts of each class, and the classes of tokens; the last token is padding.
RANGES, CLASSES = [(0, 1), (1, 4), (4, 5), (5, 7)], torch.tensor([1, 0, 1, 3, 3, 1, 2, 3, 3, 1, 1, 3])
OWN = torch.zeros(12, 7, dtype=torch.bool)
for token, number in enumerate(CLASSES):
    OWN[token, slice(*RANGES[number])] = True
COUNTED = torch.arange(12) < 11


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_balance_of_exclusive_experts_is_the_mean_of_their_classes(top_k):
    torch.manual_seed(1)
    logits, expected, chosen = torch.randn(12, 7, requires_grad=True), 0.0, torch.zeros(7)
    own = logits.masked_fill(~OWN, float("-inf"))
    for number, (first, end) in enumerate(RANGES):
        rows = logits.detach()[(number == CLASSES) & COUNTED, first:end]
        expected += len(rows) / 11 * slow_balance(rows, top_k, [True] * len(rows))
        chosen[first:end] = expert_selections(rows, top_k)
    loss = load_balance_loss(own, top_k, COUNTED, own_TN=OWN)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert expert_selections(own, top_k, COUNTED).tolist() == chosen.tolist()
    assert (logits.grad[~OWN] == 0).all()
    has_choice = {number for number, (first, end) in enumerate(RANGES) if end - first > top_k}
    for token in range(11):
        assert (logits.grad[token].abs().max() > 1e-6) == (CLASSES[token].item() in has_choice)


def test_the_balance_adds_up_over_ranks():
    logits = torch.randn(12, 7).masked_fill(~OWN, float("-inf"))
    whole = {"selections_N": expert_selections(logits, 2, COUNTED), "tokens_N": tokens_of_experts(OWN, COUNTED)}
    parts = [
        load_balance_loss(*part[:1], 2, part[1], tokens=11, own_TN=part[2], **whole)
        for part in zip(logits.split([5, 7]), COUNTED.split([5, 7]), OWN.split([5, 7]), strict=True)
    ]
    assert sum(parts).item() == pytest.approx(load_balance_loss(logits, 2, COUNTED, own_TN=OWN).item(), rel=1e-6)
    logits = torch.randn(12, 4)
    selections, tokens = expert_selections(logits, 2), 12
    parts = [load_balance_loss(part, 2, None, selections, tokens) for part in logits.split([5, 7])]
    assert sum(parts).item() == pytest.approx(load_balance_loss(logits, 2).item(), rel=1e-6)


def test_language_prior_loss_is_mean_log_score_of_expert_0():
    logits = torch.randn(9, 3)
    old = torch.tensor([True, False, True, True, False, False, False, True, False])
    expected = [-math.log(math.exp(row[0]) / sum(map(math.exp, row))) for row in logits[old].tolist()]
    assert language_prior_routing_loss(logits, old).item() == pytest.approx(sum(expected) / 4, rel=1e-5)
    logits = torch.randn(4, 3, requires_grad=True)
    loss = language_prior_routing_loss(logits, torch.zeros(4, dtype=torch.bool))
    loss.backward()
    assert loss == 0
    assert logits.grad.abs().sum() == 0


def test_classifier_loss_is_cross_entropy_over_all_tokens_so_a_constant_does_not_satisfy_it():
    classes, mask = torch.tensor([0, 1, 1, 0]), torch.tensor([True, True, True, False])
    logits = torch.randn(4, 2)
    expected = 0.0
    for t in range(3):
        row = logits[t].tolist()
        expected -= math.log(math.exp(row[classes[t]]) / sum(map(math.exp, row))) / 3
    assert classifier_loss(logits, classes, mask).item() == pytest.approx(expected, rel=1e-5)
    always_old = torch.tensor([[10.0, -10.0]]).repeat(4, 1)
    assert classifier_loss(always_old, classes, mask) > 10


MASKS = torch.tensor([0, 1, 1, 0, -1, 1, 0, 1, 1])
OLD_TOKENS, NEW_TOKENS = MASKS == 0, MASKS == 1


def slow_localized(logits, delta):
    N, values = logits.shape[1], []
    scores = logits.softmax(-1).tolist()
    for kind in (0, 1):
        tokens = [t for t, number in enumerate(MASKS.tolist()) if number == kind]
        for n in range(N):
            own = (n >= N // 2) == bool(kind)
            importance = N * sum(scores[t][n] for t in tokens) / len(tokens)
            values.append((1 - delta if own else 1 + delta) * importance)
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean


@pytest.mark.parametrize("experts", [2, 3, 8])
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.5])
def test_the_localized_balance_is_its_definition(experts, delta):
    torch.manual_seed(experts)
    logits = torch.randn(9, experts)
    found = localized_balance_loss(logits, OLD_TOKENS, NEW_TOKENS, delta)
    assert found.item() == pytest.approx(slow_localized(logits, delta), rel=1e-5)


def test_the_localized_balance_of_one_kind_of_language_or_of_none():
    logits = torch.randn(9, 4, requires_grad=True)
    nothing = torch.zeros(9, dtype=torch.bool)
    localized_balance_loss(logits, nothing, nothing).backward()
    assert not logits.grad.any()
    one = localized_balance_loss(logits, nothing, NEW_TOKENS, 0.1)
    values = 4 * logits[NEW_TOKENS].softmax(-1).mean(0) * torch.tensor([1.1, 1.1, 0.9, 0.9])
    assert one.item() == pytest.approx((values.var(correction=0) / values.mean()).item(), rel=1e-5)


def test_the_localized_balance_adds_up_over_ranks():
    logits = torch.randn(9, 4, requires_grad=True, generator=torch.Generator().manual_seed(0))
    whole = localized_balance_loss(logits, OLD_TOKENS, NEW_TOKENS)
    tokens = torch.stack([OLD_TOKENS.sum(), NEW_TOKENS.sum()])
    importance = language_importance(logits.detach(), OLD_TOKENS, NEW_TOKENS)
    cut = zip(*(tensor.split([4, 5]) for tensor in (logits, OLD_TOKENS, NEW_TOKENS)), strict=True)
    parts = sum(localized_balance_loss(*part, importance_2N=importance, tokens_2=tokens) for part in cut)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (parts, whole)))
