"""The losses against slow, obvious definitions; LoRAMoE's localized balance and self-distillation in training, too."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_dense
from one_step import build, rows, train
from peft import LoraConfig, get_peft_model

from hf_moe_expand import (
    BalanceLoss,
    ClassifierLoss,
    DistillationLoss,
    LanguagePriorLoss,
    Plan,
    ReviewConfig,
    expand_model,
)
from hf_moe_expand.trainers import (
    classifier_loss,
    expert_selections,
    language_prior_routing_loss,
    load_balance_loss,
    localized_balance_loss,
)
from hf_moe_expand.trainers.losses import distillation_loss
from hf_moe_expand.trainers.losses.balance import language_importance, tokens_of_experts
from hf_moe_expand.trainers.losses.distillation import base_logits


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


IDS, LANGUAGES = rows()
OLD = LANGUAGES == 0


def far_from_the_base():
    model = build()
    torch.manual_seed(1)
    for ffn in model.expanded_ffns().values():
        for parameter in ffn.experts[1:].parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return model


@contextmanager
def forward_passes(model):
    """Inside, the forward passes of the model are noted: rows, whether expert 0 is alone, whether gradients flow."""
    found = []

    def note(module, _, kwargs, output):
        found.append((len(output.logits), model.routing_control.request.expert, torch.is_grad_enabled()))

    hook = model.register_forward_hook(note, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


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


def test_one_step_moves_parameters_by_the_gradient_written_out(tmp_path):
    """One step of gradient descent with learning rate 1; then the same step cut into padded micro-batches."""
    model, logs = far_from_the_base(), {}
    logits = model.train()(IDS).logits
    with torch.no_grad(), model.use_expert(0):
        base = model(IDS).logits
    log_p, log_base = (value.flatten(0, 1)[OLD.flatten()].log_softmax(-1) for value in (logits, base))
    expected = (log_base.exp() * (log_base - log_p)).sum(-1).mean()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()) + 2.0 * expected
    before = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, before.values(), allow_unused=True)
    options = {"stage": "post", "everything": True, "losses": [DistillationLoss(2.0)]}
    after = train(tmp_path / "whole", model=far_from_the_base(), logs=logs, **options)
    assert expected > 0.01
    assert logs["distillation_loss"] == pytest.approx(expected.item(), rel=1e-4)
    for (name, value), gradient in zip(before.items(), gradients, strict=True):
        moved = value if gradient is None else value - gradient
        torch.testing.assert_close(after[name], moved, rtol=1e-4, atol=1e-5, msg=name)
    cut = {"batch": 2, "steps": 4, "padded": True}
    split = train(tmp_path / "split", model=far_from_the_base(), **options, **cut)
    checkpointed = train(tmp_path / "checkpointed", model=far_from_the_base(), checkpointing=True, **options)
    for name, value in after.items():
        torch.testing.assert_close(split[name], value, rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(checkpointed[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_the_base_runs_without_gradients_on_old_rows_alone(tmp_path):
    model = far_from_the_base()
    with forward_passes(model) as passes:
        train(tmp_path / "a", model=model, losses=[DistillationLoss(1.0)], batch=4, steps=2)
    old_rows = [part.any(-1).sum().item() for part in OLD.split(4)]
    assert passes == [one for old in old_rows for one in ((4, None, True), (old, 0, False))]
    only_new = far_from_the_base()
    with forward_passes(only_new) as passes:
        found = train(tmp_path / "b", model=only_new, losses=[DistillationLoss(1.0)], same=True, batch=8)
    assert len(passes) == 1 + bool(OLD[:2].any())
    assert all(value.isfinite().all() for value in found.values())


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


def test_review_distils_where_its_coefficient_says_so(tmp_path):
    plain = ReviewConfig(str(tmp_path)).router_losses()
    assert plain == [BalanceLoss(0.0), LanguagePriorLoss(0.1), ClassifierLoss(0.1)]
    alone = ReviewConfig(str(tmp_path), language_prior_coef=0.0, distillation_coef=0.5)
    assert alone.router_losses()[-1] == DistillationLoss(0.5)
