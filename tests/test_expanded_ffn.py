"""One expanded layer against a slow, obvious definition: forward, gradients, top-k, classifier, residual."""

import copy

import layers
import pytest
import torch
from layers import Plain, ask
from torch import nn

from hf_moe_expand.modeling.routing import init_router, select_experts
from hf_moe_expand.modeling.routing_control import Routing

HIDDEN = 6


class WithResidual(Plain):
    def forward(self, x, residual):
        return super().forward(x) + residual


def build(num_experts, top_k, classifier=False, ffn=Plain, dtype=torch.float32):
    return layers.build(ffn, num_experts, top_k, HIDDEN, 10, dtype, classifier)


def slow(layer, x):
    """Token by token, straight from the equations."""
    out = []
    for token in x.reshape(-1, HIDDEN):
        scores = (layer.router.weight.float() @ token.float()).softmax(-1)
        if layer.classifier is not None and not layer.training:
            old, new = layer.classifier.weight.float() @ token.float()
            if old > new:
                out.append(layer.experts[0](token))
                continue
        chosen = sorted(range(len(layer.experts)), key=lambda e: -scores[e].item())[: layer.top_k]
        norm = sum(scores[e] for e in chosen)
        out.append(sum(scores[e] / norm * layer.experts[e](token).float() for e in chosen).to(token.dtype))
    return torch.stack(out).view_as(x)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (2, 1), (1, 64)])
@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 1), (2, 2), (3, 2), (5, 2), (4, 3), (2, 5)])
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("classifier", [False, True])
def test_forward_is_the_definition(shape, num_experts, top_k, classifier, mode):
    layer = getattr(build(num_experts, top_k, classifier), mode)()
    x = torch.randn(*shape, HIDDEN)
    torch.testing.assert_close(layer(x), slow(layer, x), rtol=1e-5, atol=1e-6)


def test_a_single_token_runs_its_own_experts_only():
    layer = build(5, 2).eval()
    ran = []
    for number, expert in enumerate(layer.experts):
        expert.register_forward_pre_hook(lambda _, args, n=number: ran.append(n))
    x = torch.randn(1, 1, HIDDEN)
    layer(x)
    assert sorted(ran) == sorted((layer.router.weight @ x[0, 0]).topk(2).indices.tolist())


def test_top_1_has_weight_one_and_the_gradient_of_log_g():
    logits = torch.randn(4, 3, requires_grad=True)
    weights, index = select_experts(logits, 1)
    assert torch.equal(weights.detach(), torch.ones(4, 1))
    assert torch.equal(index[:, 0], logits.argmax(-1))
    (found,) = torch.autograd.grad(weights.sum(), logits)
    (expected,) = torch.autograd.grad(logits.log_softmax(-1).amax(-1).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_tokens_that_all_go_to_expert_0_have_the_dense_output_bit_for_bit():
    layer = build(4, 2, classifier=True).eval()
    with torch.no_grad():
        layer.classifier.weight.copy_(torch.stack([torch.ones(HIDDEN), torch.zeros(HIDDEN)]))
    x = torch.rand(3, 17, HIDDEN)  # positive: all classed old
    ran = []
    for number, expert in enumerate(layer.experts):
        expert.register_forward_pre_hook(lambda _, args, n=number: ran.append((n, args[0][..., 0].numel())))
    y = layer(x)
    assert ran == [(0, 3 * 17)]  # once, and no other
    assert torch.equal(y, layer.experts[0](x))
    ask(layer, expert=0)
    x = torch.randn(3, 17, HIDDEN)
    assert torch.equal(layer(x), layer.experts[0](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ffn", [Plain, WithResidual])
@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 2), (3, 3), (2, 5)])
@pytest.mark.parametrize("in_turn", [False, True])
def test_with_all_experts_active_an_old_token_has_the_dense_layers_bits_in_a_mixed_batch(
    num_experts, top_k, ffn, dtype, in_turn
):
    layer = build(num_experts, top_k, classifier=True, ffn=ffn, dtype=dtype).eval()
    layer.in_turn = in_turn
    x = torch.randn(3, 17, HIDDEN, dtype=dtype)
    inputs = (x,) if ffn is Plain else (x, torch.randn_like(x))
    logits = layer.classifier(x.flatten(0, 1)).view(3, 17, 2)
    is_old = logits[..., 0] > logits[..., 1]
    assert 5 < is_old.sum() < 46
    dense, y = layer.experts[0](*inputs), layer(*inputs)
    assert torch.equal(y[is_old], dense[is_old])
    assert not torch.isclose(y[~is_old], dense[~is_old], rtol=1e-2).all(-1).any()


def test_in_a_mixed_batch_an_old_token_has_expert_0s_output_bit_for_bit():
    # Compared with what expert 0 really returned: a matrix product of other rows may round differently.
    layer = build(4, 2, classifier=True).eval()
    ran = {}
    layer.experts[0].register_forward_hook(
        lambda _, args, out: ran.update(zip(map(tuple, args[0].tolist()), out, strict=True))
    )
    x = torch.randn(50, HIDDEN)
    logits = x @ layer.classifier.weight.T
    old = logits[:, 0] > logits[:, 1]
    assert 0 < old.sum() < 50
    y = layer(x)
    assert all(torch.equal(y[t], ran[tuple(x[t].tolist())]) for t in old.nonzero().flatten().tolist())


def test_routers_are_xavier_normal_and_seeded_and_zero_classifiers_change_nothing():
    layer = build(3, 2, classifier=True).eval()
    nn.init.zeros_(layer.classifier.weight)
    without = copy.deepcopy(layer)
    without.classifier = None
    x = torch.randn(40, HIDDEN)
    assert torch.equal(layer(x), without(x))
    weight = torch.empty(8, 4000)
    init_router(weight, torch.Generator().manual_seed(3))
    again = torch.empty(8, 4000)
    init_router(again, torch.Generator().manual_seed(3))
    assert torch.equal(weight, again)
    assert weight.std().item() == pytest.approx((2 / 4008) ** 0.5, rel=0.02)


def test_routing_is_float32_under_autocast_and_captured_with_its_graph():
    layer = build(3, 2, classifier=True)
    ask(layer, capture=(routing := Routing()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(8, HIDDEN)
        layer(x)
    assert routing.layers[0].router_logits.dtype == torch.float32
    assert torch.equal(routing.layers[0].router_logits, x @ layer.router.weight.T)
    assert routing.layers[0].router_logits.requires_grad
    assert routing.layers[0].classifier_logits.shape == (8, 2)


def test_the_captured_decision_under_an_override():
    layer = build(4, 2, classifier=True).eval()
    ask(layer, capture=(routing := Routing()))
    ask(layer, expert=3)
    layer(torch.randn(6, HIDDEN))
    assert torch.equal(routing.layers[0].weight_of_each_expert(), torch.eye(4)[3].expand(6, 4))
    ask(layer, expert=None, expansion=0)
    layer(torch.randn(6, HIDDEN))
    assert routing.layers[0].allowed.sum(-1).tolist() == [1] * 6
    assert torch.equal(routing.layers[0].weight_of_each_expert(), torch.eye(4)[0].expand(6, 4))
