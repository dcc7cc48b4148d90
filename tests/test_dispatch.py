"""One expanded layer, and the two ways to run its experts, against slow definitions: outputs, gradients, shapes."""

import copy

import layers
import pytest
import torch
from layers import FORMS, TOLERANCE, Plain, ask, assert_is_the_definition, build, drawn
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from hf_moe_expand.modeling import dispatch as dispatch_module
from hf_moe_expand.modeling.dispatch import fused, run_all, run_in_turn
from hf_moe_expand.modeling.routing import init_router, select_experts
from hf_moe_expand.modeling.routing_control import Routing


def in_all(experts, x_Th, weights_TK, index_TK):
    return run_all(experts, x_Th, weights_TK, index_TK, False)


def in_turn(experts, x_Th, weights_TK, index_TK):
    return run_in_turn(experts, x_Th, weights_TK, index_TK, False, training=True)


WAYS = {"all": in_all, "in turn": in_turn}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_definition(way, form):
    for dtype in TOLERANCE:
        for N, K in ((2, 2), (4, 2), (5, 1)):
            experts = build(form, N, K, dtype=dtype).experts
            for T in (1, 41):
                assert_is_the_definition(WAYS[way], experts, *drawn(T, K, N, dtype))
    experts, (x, weights, _) = build(form, 4).experts, drawn(9, 2, 4)
    for chosen in ([0, 1], [3, 4], [2, 4]):  # experts without tokens, tokens without an expert
        assert_is_the_definition(WAYS[way], experts, x, weights, torch.tensor(chosen).expand(9, 2).contiguous())
    assert not WAYS[way](experts, x, weights, torch.full((9, 2), 4)).any()


@pytest.mark.parametrize("way", WAYS)
def test_frozen_experts_get_no_gradient(way):
    for frozen in ([0], [0, 1, 2, 3]):
        experts, (x, weights, index) = build("plain", 4).experts, drawn(23, 2, 4)
        for number in frozen:
            experts[number].requires_grad_(False)
        assert_is_the_definition(WAYS[way], experts, x, weights, index)
        WAYS[way](experts, x.requires_grad_(), weights, index).sum().backward()
        for number, expert in enumerate(experts):
            assert all((p.grad is None) == (number in frozen) for p in expert.parameters())


def test_in_training_an_expert_without_tokens_has_a_gradient_of_zero():
    """Else ranks would not agree on which parameters have one."""
    for way in WAYS.values():
        experts, (x, weights, _) = build("plain", 3).experts, drawn(5, 1, 3)
        way(experts, x, weights, torch.zeros(5, 1, dtype=torch.long)).sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in experts[1:].parameters())
    layer = build(num_experts=3).train()
    ask(layer, expert=1)  # which runs alone
    layer(torch.randn(1, 5, 16)).sum().backward()
    assert [{bool(p.grad.any()) for p in one.parameters()} for one in layer.experts] == [{False}, {True}, {False}]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_that_sum_to_one_leave_equal_outputs_as_they_are(way, dtype):
    experts = build("gated", 3, dtype=dtype).experts
    for expert in experts[1:]:
        expert.load_state_dict(experts[0].state_dict())
    x, weights, index = drawn(200, 3, 3, dtype, missing=0)
    rows = WAYS[way](nn.ModuleList([experts[0]] * 3), x, torch.ones(200, 3) / 3, index)
    found = WAYS[way](experts, x, weights, index)
    if dtype == torch.float32:
        torch.testing.assert_close(found, rows, rtol=3e-6, atol=1e-6)
    else:
        assert torch.equal(found, rows)


@pytest.mark.parametrize("way", WAYS)
def test_an_expert_that_overflows_leaves_the_tokens_of_others_alone(way):
    experts = build("gated", 2, dtype=torch.float16).experts
    nn.init.constant_(experts[1].down_proj.weight, 60000.0)
    x, weights, _ = drawn(9, 2, 2, torch.float16)
    y = WAYS[way](experts, x, torch.ones_like(weights), torch.tensor([0, 2]).repeat(9, 1))
    torch.testing.assert_close(y, experts[0](x), rtol=5e-3, atol=5e-3)


def test_the_way_is_chosen_from_shapes(monkeypatch):
    ran = []
    for name in ("run_all", "run_in_turn"):
        original = getattr(dispatch_module, name)
        monkeypatch.setattr(dispatch_module, name, lambda *args, f=original, n=name: ran.append(n) or f(*args))

    def chosen(N, K, T=100, in_turn=False):
        layer = build("gated", N, K).eval()
        layer.in_turn = in_turn
        layer(torch.randn(1, T, 16))
        return ran.pop()

    assert chosen(2, 2) == chosen(3, 4) == "run_all"
    assert chosen(4, 2) == chosen(4, 2, T=1) == chosen(2, 2, in_turn=True) == "run_in_turn"


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_nothing_is_read_on_the_host(mode):
    layer, fake = build(num_experts=9, has_classifier=True, dtype=torch.bfloat16), FakeTensorMode()
    with FakeCopyMode(fake):
        layer = getattr(copy.deepcopy(layer), mode)()
    with fake:
        y = layer(torch.randn(1, 90, 16, dtype=torch.bfloat16))
        y.sum().backward()
    assert y.shape == (1, 90, 16)
    assert layer.experts[3].up_proj.weight.grad.shape == (24, 16)


def test_exported_it_holds_each_weight_once():
    layer = build(has_classifier=True).eval()
    tokens = torch.export.Dim("tokens", min=2, max=1000)
    program = torch.export.export(layer, (torch.randn(1, 13, 16),), dynamic_shapes=({1: tokens},), strict=False)
    assert set(program.state_dict) == set(layer.state_dict())
    assert not program.constants
    for number in (2, 500):
        x = torch.randn(1, number, 16)
        torch.testing.assert_close(program.module()(x), layer(x))


def test_the_fused_sum_compiles_and_gives_what_its_code_gives(monkeypatch):
    """As on a GPU with large tensors."""
    experts = build("gated", 4, dtype=torch.bfloat16).experts
    code = dispatch_module._weighted_sum.__wrapped__
    compiled = torch.compile(code, dynamic=True, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(dispatch_module, "_weighted_sum", compiled)
    for T in (23, 70):
        assert_is_the_definition(in_all, experts, *drawn(T, 2, 4, torch.bfloat16))


def test_without_a_compiler_the_code_itself_runs(monkeypatch):
    class Large(torch.Tensor):
        is_cuda = True

        def numel(self):
            return 1 << 24

    def no_compiler(function, **_):
        raise RuntimeError("no gcc")

    said = []
    monkeypatch.setattr(dispatch_module.logger, "warning_once", said.append)
    monkeypatch.setattr(torch, "compile", no_compiler)
    twice = fused(lambda outputs: 2 * outputs[0])
    for _ in range(2):
        found = twice([torch.ones(3).as_subclass(Large)])
        assert torch.equal(found.as_subclass(torch.Tensor), 2 * torch.ones(3))
    assert len(said) == 1


HIDDEN = 6


class WithResidual(Plain):
    def forward(self, x, residual):
        return super().forward(x) + residual


def layer_of(num_experts, top_k, classifier=False, ffn=Plain, dtype=torch.float32):
    return layers.build(ffn, num_experts, top_k, HIDDEN, 10, dtype, classifier).eval()


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


@torch.no_grad()
@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 1), (2, 2), (3, 2), (5, 2), (4, 3), (2, 5)])
@pytest.mark.parametrize("classifier", [False, True])
def test_forward_is_the_definition(num_experts, top_k, classifier):
    layer = layer_of(num_experts, top_k, classifier)
    for training in (False, True):
        layer.train(training)
        for shape in ((1, 1), (3, 5), (1, 64)):
            x = torch.randn(*shape, HIDDEN)
            torch.testing.assert_close(layer(x), slow(layer, x), rtol=1e-5, atol=1e-6)


def test_top_1_has_weight_one_and_the_gradient_of_log_g():
    logits = torch.randn(4, 3, requires_grad=True)
    weights, index = select_experts(logits, 1)
    assert torch.equal(weights.detach(), torch.ones(4, 1))
    assert torch.equal(index[:, 0], logits.argmax(-1))
    (found,) = torch.autograd.grad(weights.sum(), logits)
    (expected,) = torch.autograd.grad(logits.log_softmax(-1).amax(-1).sum(), logits)
    torch.testing.assert_close(found, expected)


def runs(layer):
    """A list that receives the number and the input of each expert that runs."""
    ran = []
    for number, expert in enumerate(layer.experts):
        expert.register_forward_pre_hook(lambda _, args, n=number: ran.append((n, args[0])))
    return ran


def test_tokens_that_all_go_to_expert_0_have_the_dense_output_bit_for_bit():
    layer = layer_of(4, 2, classifier=True)
    layer.classifier.weight.data = torch.stack([torch.ones(HIDDEN), torch.zeros(HIDDEN)])
    ran = runs(layer)
    x = torch.rand(3, 17, HIDDEN)  # positive: all classed old
    y = layer(x)
    assert [(number, given[..., 0].numel()) for number, given in ran] == [(0, 3 * 17)]  # once, and no other
    assert torch.equal(y, layer.experts[0](x))
    ask(layer, expert=0)
    x = torch.randn(3, 17, HIDDEN)
    assert torch.equal(layer(x), layer.experts[0](x))


def test_a_single_token_runs_its_own_experts_only():
    layer = layer_of(5, 2)
    ran, x = runs(layer), torch.randn(1, 1, HIDDEN)
    layer(x)
    assert sorted(number for number, _ in ran) == sorted((layer.router.weight @ x[0, 0]).topk(2).indices.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ffn", [Plain, WithResidual])
@pytest.mark.parametrize("in_turn", [False, True])
def test_with_all_experts_active_an_old_token_has_the_dense_layers_bits_in_a_mixed_batch(ffn, dtype, in_turn):
    for count in (2, 3):
        layer = layer_of(count, 3, classifier=True, ffn=ffn, dtype=dtype)
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
    layer, ran = layer_of(4, 2, classifier=True), {}
    layer.experts[0].register_forward_hook(
        lambda _, args, out: ran.update(zip(map(tuple, args[0].tolist()), out, strict=True))
    )
    x = torch.randn(50, HIDDEN)
    logits = x @ layer.classifier.weight.T
    old = logits[:, 0] > logits[:, 1]
    assert 0 < old.sum() < 50
    y = layer(x)
    assert all(torch.equal(y[t], ran[tuple(x[t].tolist())]) for t in old.nonzero().flatten().tolist())


def test_routers_are_xavier_normal_and_zero_classifiers_change_nothing():
    layer, x = layer_of(3, 2, classifier=True), torch.randn(40, HIDDEN)
    nn.init.zeros_(layer.classifier.weight)
    found, layer.classifier = layer(x), None
    assert torch.equal(layer(x), found)
    weight = torch.empty(8, 4000)
    init_router(weight, torch.Generator().manual_seed(3))
    assert weight.std().item() == pytest.approx((2 / 4008) ** 0.5, rel=0.02)


def test_routing_is_float32_under_autocast_and_captured_with_its_graph():
    layer, x = layer_of(3, 2, classifier=True), torch.randn(8, HIDDEN)
    ask(layer, capture=(routing := Routing()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)
    assert routing.layers[0].router_logits.dtype == torch.float32
    assert torch.equal(routing.layers[0].router_logits, x @ layer.router.weight.T)
    assert routing.layers[0].router_logits.requires_grad
    assert routing.layers[0].classifier_logits.shape == (8, 2)


def test_the_captured_decision_under_an_override():
    layer = layer_of(4, 2, classifier=True)
    ask(layer, capture=(routing := Routing()), expert=3)
    layer(torch.randn(6, HIDDEN))
    assert torch.equal(routing.layers[0].weight_of_each_expert(), torch.eye(4)[3].expand(6, 4))
    ask(layer, expert=None, expansion=0)
    layer(torch.randn(6, HIDDEN))
    assert routing.layers[0].allowed.sum(-1).tolist() == [1] * 6
    assert torch.equal(routing.layers[0].weight_of_each_expert(), torch.eye(4)[0].expand(6, 4))
