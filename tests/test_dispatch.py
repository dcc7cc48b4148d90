"""One expanded layer, and the two ways to run its experts, against slow definitions: outputs, gradients, shapes."""

import copy
import logging

import layers
import pytest
import torch
from layers import FORMS, TOLERANCE, Plain, ask, assert_is_the_definition, build, drawn
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from hf_moe_expand.modeling import dispatch as dispatch_module
from hf_moe_expand.modeling.dispatch import fused, run_all, run_in_turn
from hf_moe_expand.modeling.routing import init_router, select_experts
from hf_moe_expand.modeling.routing_control import Routing


def in_all(experts, x_Th, weights_TK, index_TK):
    return run_all(experts, x_Th, weights_TK, index_TK, False)


def in_turn(experts, x_Th, weights_TK, index_TK):
    return run_in_turn(experts, x_Th, weights_TK, index_TK, False, training=True)


WAYS = {"all": in_all, "in turn": in_turn}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_definition(way, form, dtype):
    for N, K in ((2, 2), (4, 2), (5, 1), (3, 3)):
        experts = build(form, N, K, dtype=dtype).experts
        for T in (1, 3, 41):
            assert_is_the_definition(WAYS[way], experts, *drawn(T, K, N, dtype))


class Inline(nn.Module):
    """Its activation is a function in its code."""

    def __init__(self, hidden, inner):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["gated", "conv1d"])
def test_experts_without_tokens_all_in_one_and_tokens_without_an_expert(way, form):
    experts = build(form, 4, dtype=torch.bfloat16).experts
    x, weights, _ = drawn(9, 2, 4, torch.bfloat16)
    for chosen in ([0, 1], [3, 4], [2, 4]):
        index = torch.tensor(chosen).expand(9, 2).contiguous()
        assert_is_the_definition(WAYS[way], experts, x, weights, index)
    assert not WAYS[way](experts, x, weights, torch.full((9, 2), 4)).any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frozen", [[0], [0, 1, 2], [0, 1, 2, 3], [1, 3]])
def test_frozen_experts_get_no_gradient(way, frozen):
    experts = build("plain", 4).experts
    for number in frozen:
        experts[number].requires_grad_(False)
    assert_is_the_definition(WAYS[way], experts, *drawn(23, 2, 4))
    x, weights, index = drawn(23, 2, 4)
    WAYS[way](experts, x.requires_grad_(), weights, index).sum().backward()
    for number, expert in enumerate(experts):
        assert all((p.grad is None) == (number in frozen) for p in expert.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_in_training_an_expert_without_tokens_has_a_gradient_of_zero(way):
    """Else ranks would not agree on which parameters have one."""
    experts, (x, weights, _) = build("plain", 3).experts, drawn(5, 1, 3)
    WAYS[way](experts, x, weights, torch.zeros(5, 1, dtype=torch.long)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in experts[1:].parameters())


def test_in_training_experts_beside_the_one_that_runs_alone_have_a_gradient_of_zero():
    layer = build(num_experts=3).train()
    ask(layer, expert=1)
    layer(torch.randn(1, 5, 16)).sum().backward()
    moved = [[bool(p.grad.any()) for p in expert.parameters()] for expert in layer.experts]
    assert [{*of} for of in moved] == [{False}, {True}, {False}]


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_change_before_the_backward_pass_are_noticed(way):
    experts = build("gated", 4).experts
    x, weights, index = drawn(23, 2, 4)
    y = WAYS[way](experts, x.requires_grad_(), weights, index)
    with torch.no_grad():
        experts[1].up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


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
    with torch.no_grad():
        experts[1].down_proj.weight.fill_(60000.0)
    x, weights, _ = drawn(9, 2, 2, torch.float16)
    index = torch.tensor([0, 2]).repeat(9, 1)
    y = WAYS[way](experts, x, torch.ones_like(weights), index)
    torch.testing.assert_close(y, experts[0](x), rtol=5e-3, atol=5e-3)


# Which way runs


def make_fake(layer, convert):
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(convert(parameter), parameter.requires_grad)


def ways(monkeypatch):
    """A list that receives the name of each way that runs."""
    ran = []
    for name in ("run_all", "run_in_turn"):
        original = getattr(dispatch_module, name)
        monkeypatch.setattr(dispatch_module, name, lambda *args, f=original, n=name: ran.append(n) or f(*args))
    return ran


def test_the_way_is_chosen_from_shapes(monkeypatch):
    ran = ways(monkeypatch)

    def chosen(N, K, T=100, in_turn=False):
        ran.clear()
        layer = build("gated", N, K).eval()
        layer.in_turn = in_turn
        layer(torch.randn(1, T, 16))
        return ran[0]

    assert chosen(2, 2) == chosen(3, 4) == "run_all"
    assert chosen(4, 2) == chosen(4, 2, T=1) == chosen(2, 2, in_turn=True) == "run_in_turn"


# Graphs and transforms


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_nothing_is_read_on_the_host(mode):
    layer = getattr(build(num_experts=9, has_classifier=True, dtype=torch.bfloat16), mode)()
    layer.experts[0].requires_grad_(False)
    fake = FakeTensorMode()
    make_fake(layer, fake.from_tensor)
    with fake:
        y = layer(torch.randn(1, 90, 16, dtype=torch.bfloat16))
        y.sum().backward()
    assert y.shape == (1, 90, 16)
    assert layer.experts[0].up_proj.weight.grad is None
    assert layer.experts[3].up_proj.weight.grad.shape == (24, 16)


@pytest.mark.parametrize(
    ("mode", "form", "tokens"),
    [("eval", "gated", 13), ("train", "gated", 100), ("train", "conv1d", 100), ("train", Inline, 100)],
)
def test_compiled_it_is_one_graph(mode, form, tokens, monkeypatch):
    ran = ways(monkeypatch)
    layer = getattr(build(form, 4, has_classifier=True, dtype=torch.bfloat16), mode)()
    x = torch.randn(1, tokens, 16, dtype=torch.bfloat16).requires_grad_()
    wanted = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).float().square().sum(), wanted, allow_unused=True)
    torch.compiler.reset()
    ran.clear()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x).float().square().sum(), wanted, allow_unused=True)
    assert ran[0] == "run_all"
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=4e-2 * max(other.abs().max().item(), 1e-6))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_it_holds_each_weight_once(strict):
    layer = build(has_classifier=True).eval()
    tokens = torch.export.Dim("tokens", min=2, max=1000)
    program = torch.export.export(layer, (torch.randn(1, 13, 16),), dynamic_shapes=({1: tokens},), strict=strict)
    assert set(program.state_dict) == set(layer.state_dict())
    assert not program.constants
    for number in (2, 13, 500):
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


HIDDEN = 6


class WithResidual(Plain):
    def forward(self, x, residual):
        return super().forward(x) + residual


def layer_of(num_experts, top_k, classifier=False, ffn=Plain, dtype=torch.float32):
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
    layer = getattr(layer_of(num_experts, top_k, classifier), mode)()
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


def test_tokens_that_all_go_to_expert_0_have_the_dense_output_bit_for_bit():
    layer = layer_of(4, 2, classifier=True).eval()
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
    layer = layer_of(num_experts, top_k, classifier=True, ffn=ffn, dtype=dtype).eval()
    layer.in_turn = in_turn
    x = torch.randn(3, 17, HIDDEN, dtype=dtype)
    inputs = (x,) if ffn is Plain else (x, torch.randn_like(x))
    logits = layer.classifier(x.flatten(0, 1)).view(3, 17, 2)
    is_old = logits[..., 0] > logits[..., 1]
    assert 5 < is_old.sum() < 46
    dense, y = layer.experts[0](*inputs), layer(*inputs)
    assert torch.equal(y[is_old], dense[is_old])
    assert not torch.isclose(y[~is_old], dense[~is_old], rtol=1e-2).all(-1).any()


def test_routers_are_xavier_normal_and_seeded_and_zero_classifiers_change_nothing():
    layer = layer_of(3, 2, classifier=True).eval()
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
    layer = layer_of(3, 2, classifier=True)
    ask(layer, capture=(routing := Routing()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(8, HIDDEN)
        layer(x)
    assert routing.layers[0].router_logits.dtype == torch.float32
    assert torch.equal(routing.layers[0].router_logits, x @ layer.router.weight.T)
    assert routing.layers[0].router_logits.requires_grad
    assert routing.layers[0].classifier_logits.shape == (8, 2)


def test_without_a_compiler_the_code_itself_runs(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_moe_expand"), "propagate", True)
    dispatch_module.logger.warning_once.cache_clear()

    def broken(function, **_):
        def call(*args):
            raise RuntimeError("no gcc")

        return call

    class Large(torch.Tensor):
        is_cuda = True

        def numel(self):
            return 1 << 24

    monkeypatch.setattr(torch, "compile", broken)
    twice = fused(lambda outputs: 2 * outputs[0])
    with caplog.at_level("WARNING"):
        for _ in range(2):
            large = torch.ones(3).as_subclass(Large)
            assert torch.equal(twice([large]).as_subclass(torch.Tensor), 2 * torch.ones(3))
    assert len(caplog.records) == 1


def test_transforms_of_functions_and_copies_go_on():
    layer = build().eval()
    x = torch.randn(1, 4, 16)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    try:
        torch.func.jvp(lambda x: x * x.tolist()[0], (torch.ones(1),), (torch.ones(1),))
    except RuntimeError:
        pytest.skip(f"torch {torch.__version__} lets no code read values inside torch.func.jvp")
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x))))
    torch.testing.assert_close(dual.tangent, tangent)


def test_a_single_token_runs_its_own_experts_only():
    layer = layer_of(5, 2).eval()
    ran = []
    for number, expert in enumerate(layer.experts):
        expert.register_forward_pre_hook(lambda _, args, n=number: ran.append(n))
    x = torch.randn(1, 1, HIDDEN)
    layer(x)
    assert sorted(ran) == sorted((layer.router.weight @ x[0, 0]).topk(2).indices.tolist())


def test_in_a_mixed_batch_an_old_token_has_expert_0s_output_bit_for_bit():
    # Compared with what expert 0 really returned: a matrix product of other rows may round differently.
    layer = layer_of(4, 2, classifier=True).eval()
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


def test_the_captured_decision_under_an_override():
    layer = layer_of(4, 2, classifier=True).eval()
    ask(layer, capture=(routing := Routing()))
    ask(layer, expert=3)
    layer(torch.randn(6, HIDDEN))
    assert torch.equal(routing.layers[0].weight_of_each_expert(), torch.eye(4)[3].expand(6, 4))
    ask(layer, expert=None, expansion=0)
    layer(torch.randn(6, HIDDEN))
    assert routing.layers[0].allowed.sum(-1).tolist() == [1] * 6
    assert torch.equal(routing.layers[0].weight_of_each_expert(), torch.eye(4)[0].expand(6, 4))
