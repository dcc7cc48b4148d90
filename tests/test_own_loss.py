"""A loss that a user writes, of the model's output instead of its routing, trains through a stage's trainer."""

import math
from dataclasses import dataclass

import pytest
import torch
from one_step import build, rows, train

from hf_moe_expand import LossBatch, RouterLoss


@dataclass(frozen=True)
class Flatness(RouterLoss):
    """The mean over tokens of KL(u || p): u is the uniform distribution over the vocabulary, p the model's."""

    name = "flatness"
    metrics = ("flatness_loss",)
    needs_outputs = True

    coef: float = 1.0

    def __call__(self, batch: LossBatch) -> torch.Tensor:
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


def flatness(model, ids):
    """The same, by torch's own function."""
    log_p = model(ids).logits.log_softmax(-1).flatten(0, 1)
    uniform = torch.full_like(log_p, 1 / log_p.shape[-1])
    return torch.nn.functional.kl_div(log_p, uniform, reduction="batchmean")


@pytest.fixture(scope="module")
def expected():
    """Routers and classifiers after one step of plain gradient descent with learning rate 1, and the loss before it."""
    model, (ids, _) = made().train(), rows()
    moving = {name: p for name, p in model.named_parameters() if "router" in name or "classifier" in name}
    kl = flatness(model, ids)
    loss = model(ids, labels=ids).loss + 0.5 * kl
    gradients = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
    after = {
        name: (p if gradient is None else p - gradient).detach()
        for (name, p), gradient in zip(moving.items(), gradients, strict=True)
    }
    return after, kl.item()


@pytest.mark.parametrize("change", [{}, {"batch": 2, "steps": 4}, {"padded": True}, {"checkpointing": True}], ids=str)
def test_a_step_follows_the_gradient_of_both_losses(tmp_path, expected, change):
    after, kl = expected
    logs = {}
    found = train(str(tmp_path), model=made(), losses=[Flatness(0.5)], logs=logs, **change)
    for name, value in after.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
    for name, value in made().named_parameters():
        assert name in after or torch.equal(found[name], value), name
    assert logs["flatness_loss"] == pytest.approx(kl, rel=1e-4)
