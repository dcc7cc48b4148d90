"""All experts at once against one after the other: outputs, gradients, awkward shapes, traced graphs."""

import copy
from dataclasses import replace

import pytest
import torch
from layers import FORMS, TOLERANCE, assert_agree, build, other_rate, results
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from hf_moe_expand.modeling import dispatch as dispatch_module
from hf_moe_expand.modeling import grouped_experts, grouped_kernels, grouped_linear


def forbid_modules(layer, monkeypatch):
    """Lets a call of any expert as a module fail."""
    for name in ("dispatch_sorted", "dispatch_one_token", "dispatch_to_all"):
        monkeypatch.setattr(dispatch_module, name, lambda *_: pytest.fail("experts ran as modules"))


@pytest.mark.parametrize("tokens", [1, 3, 40, 700])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_all_at_once_is_one_after_the_other(form, tokens, implementation, monkeypatch):
    layer = build(form).train()
    x = torch.randn(1, tokens, 16)
    assert_agree(layer, x, implementation)
    forbid_modules(layer, monkeypatch)
    results(layer, x, implementation)


@pytest.mark.parametrize(("hidden", "inner"), [(16, 24), (7, 11)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [5, 900])
def test_types_and_odd_widths(hidden, inner, dtype, tokens):
    layer = build(hidden=hidden, inner=inner, dtype=dtype, num_experts=3).train()
    assert_agree(layer, torch.randn(1, tokens, hidden, dtype=dtype), "grouped_mm")


@pytest.mark.parametrize("tokens", [1, 3, 60, 900])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_autocast_keeps_its_type(tokens, mode):
    layer = getattr(build(has_classifier=True), mode)()
    assert_agree(layer, torch.randn(1, tokens, 16), None, autocast=True)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_autocast_computes_in_its_type_whatever_the_weights(implementation):
    layer = build(dtype=torch.float16).eval()
    layer.model_config._experts_implementation = implementation
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.full((1, 40, 16), 1e5)).isfinite().all()  # more than float16 holds


@pytest.mark.parametrize("tokens", [30, 900])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("fields", [{"has_classifier": True}, {"has_classifier": True, "conditional": True}])
def test_tokens_for_which_fewer_experts_run(tokens, implementation, fields):
    layer = build(earlier_counts=(2,), **fields).eval()
    x = torch.randn(1, tokens, 16)
    experts = layer.route(x[0]).experts
    assert (experts == 4).any()  # "no expert"
    assert (experts != 4).sum(-1).unique().numel() > 1
    assert_agree(layer, x, implementation)


@pytest.mark.parametrize("tokens", [6, 900])
@pytest.mark.parametrize("chosen", [0, 2])
def test_all_tokens_in_one_expert(tokens, chosen):
    layer = build(top_k=1).train()
    with torch.no_grad():
        layer.router.weight.zero_()[chosen].fill_(1.0)
    x = torch.rand(1, tokens, 16)  # positive: the same expert wins everywhere
    assert_agree(layer, x, "grouped_mm")
    layer(x).sum().backward()
    for number, expert in enumerate(layer.experts):
        assert all((p.grad.any() if number == chosen else not p.grad.any()) for p in expert.parameters())


def test_sequences_that_the_user_sends_home_in_a_mixed_batch():
    layer = build().eval()
    layer.control.classes = [0, None]
    x = torch.randn(2, 9, 16)
    layer.model_config._experts_implementation = "grouped_mm"
    y = layer(x)
    assert torch.equal(y[0], layer.experts[0](x)[0])
    layer.model_config._experts_implementation = "eager"
    torch.testing.assert_close(y, layer(x))


@pytest.mark.parametrize("tokens", [6, 900])
def test_tokens_without_any_expert_keep_the_experts_in_the_graph(tokens):
    layer = build().train()
    x = torch.randn(1, tokens, 16, requires_grad=True)
    layer.control.change_choice = lambda _, choice: replace(choice, experts=torch.full_like(choice.experts, 4))
    y = layer(x)
    assert not y.any()
    y.sum().backward()
    assert not x.grad.any()
    assert all(not parameter.grad.any() for parameter in layer.experts.parameters())


@pytest.mark.parametrize("tokens", [30, 900])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_a_choice_without_an_expert_adds_nothing_whatever_its_weight(tokens, implementation):
    layer = build().train()
    left_out = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(0)) < 0.3
    layer.control.change_choice = lambda _, choice: replace(choice, experts=choice.experts.masked_fill(left_out, 4))
    assert_agree(layer, torch.randn(1, tokens, 16), implementation)


@pytest.mark.parametrize("tokens", [6, 900])
@pytest.mark.parametrize("frozen", [1, 3, 4])
def test_frozen_experts_get_no_gradient(tokens, frozen):
    layer = build().train()
    for expert in layer.experts[:frozen]:
        expert.requires_grad_(False)
    x = torch.randn(1, tokens, 16)
    assert_agree(layer, x, "grouped_mm")
    layer.model_config._experts_implementation = "grouped_mm"
    layer(x).sum().backward()
    assert all((p.grad is None) == (n < frozen) for n, e in enumerate(layer.experts) for p in e.parameters())


def test_frozen_experts_cost_no_memory_for_gradients(monkeypatch):
    made = []
    monkeypatch.setattr(
        grouped_linear, "_of_weight", lambda *args: made.append(args) or torch.zeros(args[2].shape(args[3]))
    )
    layer = build().train()
    layer.experts[0].requires_grad_(False)
    layer(torch.randn(1, 40, 16)).sum().backward()
    assert len(made) == 3 * 3  # three experts, three matrices each
    made.clear()
    layer.experts.requires_grad_(False)
    layer(torch.randn(1, 40, 16)).sum().backward()
    assert not made


@pytest.mark.parametrize("tokens", [6, 900])
def test_frozen_layers_keep_no_input(tokens):
    layer = build()
    x = torch.randn(tokens, 16, requires_grad=True)

    def kept():
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            layer(x)
        return len({t.data_ptr() for t in found if t.shape == (2 * tokens, 24)})

    assert kept() == 4  # the inputs of the activation, of the product of gate and up, and of the last layer
    for expert in layer.experts:
        expert.down_proj.requires_grad_(False)
    assert kept() == 3


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_weights_need_no_grouped_mm(transposed):
    """As on a GPU of an earlier generation, with few tokens."""
    x, dy = torch.randn(9, 6), torch.randn(9, 10)
    ends = torch.tensor([4, 4, 7], dtype=torch.int32)  # an expert without rows, and rows of a frozen one
    first, second = (x, dy) if transposed else (dy, x)
    found = grouped_kernels._products_of_all_rows(first, second, ends)
    torch.testing.assert_close(found, grouped_kernels.grouped_linear_weight(x, dy, ends, transposed))
    torch.testing.assert_close(found[2], first[4:7].t() @ second[4:7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_that_sum_to_one_leave_equal_outputs_as_they_are(dtype):
    y = torch.randn(4, 8, dtype=dtype) * 100
    weights = torch.rand(5000, 3).softmax(-1)
    rows = torch.arange(4).repeat(1250).unsqueeze(1).expand(-1, 3).contiguous()
    found = grouped_experts._weighted_rows(y, rows, weights)
    expected = y[rows[:, 0]]
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("implementation", [None, "grouped_mm", "batched_mm"])
def test_nothing_is_read_on_the_host(mode, implementation):
    layer = getattr(build(has_classifier=True), mode)()
    layer.experts[0].requires_grad_(False)
    layer.model_config._experts_implementation = implementation
    fake = FakeTensorMode()
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(fake.from_tensor(parameter), parameter.requires_grad)
    with fake:
        y = layer(torch.randn(1, 11, 16))
        y.sum().backward()
    assert y.shape == (1, 11, 16)
    assert layer.experts[0].up_proj.weight.grad is None
    assert layer.experts[3].up_proj.weight.grad.shape == (24, 16)


def graph_of(layer, x):
    """The targets of the graph's calls, and the compiled layer."""
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    compiled(x)
    return targets, compiled


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_it_computes_k_experts_a_token(mode, form):
    layer = getattr(build(form, has_classifier=True), mode)()
    x = torch.randn(1, 13, 16)
    targets, _ = graph_of(layer, x)
    assert sum("grouped_linear" in target for target in targets) == 2  # for gate and up, and for down
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x.requires_grad_()
    wanted = [x, *layer.parameters()]
    found = torch.autograd.grad(compiled(x).square().sum(), wanted, allow_unused=True)
    for one, other in zip(found, results(layer, x, "eager")[1:], strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * other.abs().max().item())


def without_bias(expert):
    expert.up.bias = None


@pytest.mark.parametrize(("ffn", "change"), [("plain", without_bias), ("conv1d", other_rate), ("gated", None)])
def test_compiled_a_changed_expert_is_noticed(ffn, change):
    layer = build(ffn).eval()
    x = torch.randn(1, 13, 16)
    _, compiled = graph_of(layer, x)
    if change is None:
        layer.experts[1].act_fn = nn.Tanh()
    else:
        change(layer.experts[1])
    y = compiled(x)
    layer.model_config._experts_implementation = "eager"
    torch.testing.assert_close(y, layer(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_trace_of_the_old_kind_holds_no_routing():
    layer = build().eval()
    with torch.no_grad():
        traced = torch.jit.trace(layer, torch.randn(1, 13, 16), check_trace=False)
        x = torch.randn(1, 13, 16)
        torch.testing.assert_close(traced(x), layer(x))


def test_compiled_in_decoding_and_after_weights_moved():
    layer = build().eval()
    x = torch.randn(1, 1, 16)
    with torch.no_grad():
        _, compiled = graph_of(layer, x)
        torch.testing.assert_close(compiled(x), layer(x))
        layer.experts[1].up_proj.weight.data = torch.randn(24, 16)
        layer.experts[2].up_proj.weight.data = torch.randn(24, 16)
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_it_holds_each_weight_once(strict):
    layer = build(has_classifier=True).eval()
    layer(torch.randn(1, 3, 16))  # lays the block out
    tokens = torch.export.Dim("tokens", min=2, max=1000)
    program = torch.export.export(layer, (torch.randn(1, 13, 16),), dynamic_shapes=({1: tokens},), strict=strict)
    assert set(program.state_dict) == set(layer.state_dict())
    assert not program.constants
    for number in (2, 13, 500):
        x = torch.randn(1, number, 16)
        torch.testing.assert_close(program.module()(x), layer(x))


def test_transforms_of_functions_and_copies_go_on():
    layer = build().eval()
    x = torch.randn(1, 4, 16)
    expected = layer(x)
    doubled = torch.func.vmap(layer.experts[0])(torch.stack([x, x]))
    torch.testing.assert_close(doubled[0], layer.experts[0](x))
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    assert tangent.isfinite().all()
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x))))
    torch.testing.assert_close(dual.tangent, tangent)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
