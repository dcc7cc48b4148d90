"""Self-distillation: against its definition, in one step of training, and in the review stage."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_dense
from one_step import build, rows, train
from peft import LoraConfig, get_peft_model

from hf_moe_expand import DistillationLoss, Plan, expand_model
from hf_moe_expand.trainers.losses import distillation_loss
from hf_moe_expand.trainers.losses.distillation import base_logits

IDS, LANGUAGES = rows()
OLD = LANGUAGES == 0


def far_from_the_base():
    model = build()
    torch.manual_seed(1)
    with torch.no_grad():
        for ffn in model.expanded_ffns().values():
            for expert in ffn.experts[1:]:
                for parameter in expert.parameters():
                    parameter.normal_(std=0.4)
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
