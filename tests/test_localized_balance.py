"""The localized balancing constraint of LoRAMoE: the loss against its definition, and in the trainers."""

import json

import one_step
import pytest
import torch
from conftest import fork_ranks
from one_step import rows

from hf_moe_expand.trainers import localized_balance_loss

MASKS = torch.tensor([0, 1, 1, 0, -1, 1, 0, 1, 1])
OLD, NEW = MASKS == 0, MASKS == 1


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
    found = localized_balance_loss(logits, OLD, NEW, delta)
    assert found.item() == pytest.approx(slow_localized(logits, delta), rel=1e-5)


def test_the_localized_balance_of_one_kind_of_language_or_of_none():
    logits = torch.randn(9, 4, requires_grad=True)
    nothing = torch.zeros(9, dtype=torch.bool)
    localized_balance_loss(logits, nothing, nothing).backward()
    assert not logits.grad.any()
    one = localized_balance_loss(logits, nothing, NEW, 0.1)
    values = 4 * logits[NEW].softmax(-1).mean(0) * torch.tensor([1.1, 1.1, 0.9, 0.9])
    assert one.item() == pytest.approx((values.var(correction=0) / values.mean()).item(), rel=1e-5)


def test_trainers_add_the_localized_balance(tmp_path):
    ids, languages = rows()
    model = one_step.build()
    with torch.no_grad(), model.capture_routing() as routing:
        model(ids)
    old, new = (languages.flatten() == number for number in (0, 1))
    expected = sum(localized_balance_loss(layer.router_logits, old, new) for layer in routing).item() / len(routing)
    logs, nothing = {}, {"prior": 0.0, "classifier": 0.0, "stage": "post-pretrain"}
    plain = one_step.train(tmp_path, **nothing)
    trained = one_step.train(tmp_path, **nothing, localized=3.0, logs=logs)
    assert logs["localized_balance_loss"] == pytest.approx(expected, abs=1e-5)
    assert logs["loss"] == pytest.approx(logs["next_token_loss"] + 3 * expected, rel=1e-3)
    assert {name for name in plain if not torch.allclose(plain[name], trained[name], atol=1e-4)} >= {
        "model.layers.2.mlp.router.weight"
    }
    padded = one_step.train(tmp_path, **nothing, localized=3.0, padded=True)
    settings = json.dumps({**nothing, "localized": 3.0, "batch": 4})
    fork_ranks("one_step.py", str(tmp_path / "ranks.pt"), settings)
    for found in (padded, torch.load(tmp_path / "ranks.pt")):
        for name, value in trained.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
