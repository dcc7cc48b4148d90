"""The three ways to run a layer's experts against their slow definition: outputs, every gradient, awkward shapes."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from layers import FORMS, TOLERANCE, Plain, assert_is_the_definition, build, drawn, slow
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from hf_moe_expand.modeling import dispatch as dispatch_module
from hf_moe_expand.modeling import grouped_experts
from hf_moe_expand.modeling.dispatch import dispatch, run_all, run_in_turn
from hf_moe_expand.modeling.grouped_experts import can_group, plain_form, run_grouped


class Inline(nn.Module):
    """Not plain: its activation is a function in its code."""

    def __init__(self, hidden, inner):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def in_all(experts, x_Th, weights_TK, index_TK):
    return run_all(experts, x_Th, weights_TK, index_TK, False)


def in_turn(experts, x_Th, weights_TK, index_TK):
    return run_in_turn(experts, x_Th, weights_TK, index_TK, False, training=True)


def grouped(experts, x_Th, weights_TK, index_TK):
    form = plain_form(experts[0])
    assert can_group(form, experts, x_Th)
    return run_grouped(form, experts, x_Th, weights_TK, index_TK)


needs_grouped_mm = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch before 2.10 has no grouped_mm")
WAYS = {"all": in_all, "in turn": in_turn, "grouped": grouped}
EACH_WAY = ["all", "in turn", pytest.param("grouped", marks=needs_grouped_mm)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", EACH_WAY)
def test_every_way_is_the_definition(way, form, dtype):
    if way == "grouped" and dtype == torch.float64:
        pytest.skip("torch groups no products in float64")
    for N, K in ((2, 2), (4, 2), (5, 1), (3, 3)):
        experts = build(form, N, K, dtype=dtype).experts
        for T in (1, 3, 41):
            assert_is_the_definition(WAYS[way], experts, *drawn(T, K, N, dtype))


@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(way, dtype):
    experts = build("plain", 4, dtype=dtype).experts
    assert_is_the_definition(WAYS[way], experts, *drawn(23, 2, 4), autocast=True)


@pytest.mark.parametrize("way", ["all", "in turn"])
def test_ffns_of_any_kind_and_odd_widths(way):
    assert plain_form(Inline(7, 11)) is None
    experts = build(Inline, 4, hidden=7, inner=11).experts
    assert_is_the_definition(WAYS[way], experts, *drawn(23, 2, 4, hidden=7))
    gated = build("gated", 4, hidden=7, inner=11)
    assert not can_group(gated.form, gated.experts, torch.randn(3, 7))
    assert_is_the_definition(WAYS[way], gated.experts, *drawn(23, 2, 4, hidden=7))


@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize("form", ["gated", "conv1d"])
def test_experts_without_tokens_all_in_one_and_tokens_without_an_expert(way, form):
    experts = build(form, 4, dtype=torch.bfloat16).experts
    x, weights, _ = drawn(9, 2, 4, torch.bfloat16)
    for chosen in ([0, 1], [3, 4], [2, 4]):
        index = torch.tensor(chosen).expand(9, 2).contiguous()
        assert_is_the_definition(WAYS[way], experts, x, weights, index)
    assert not WAYS[way](experts, x, weights, torch.full((9, 2), 4)).any()


def poisoned(monkeypatch):
    """Lets `grouped_mm` leave NaN wherever it writes nothing, as a kernel may."""
    product = F.grouped_mm

    def kernel(a, b, *, offs):
        y = product(a, b, offs=offs)
        if b.dim() == 3:
            return y.index_fill(0, torch.arange(int(offs[-1]), len(y)), torch.nan)
        empty = offs.diff(prepend=offs.new_zeros(1)) == 0
        return y.index_fill(0, empty.nonzero().flatten(), torch.nan)

    monkeypatch.setattr(F, "grouped_mm", kernel)


@needs_grouped_mm
@pytest.mark.parametrize("form", FORMS)
def test_what_a_grouped_product_leaves_unwritten_is_never_read(form, monkeypatch):
    poisoned(monkeypatch)
    experts = build(form, 5, dtype=torch.bfloat16).experts
    for T in (2, 31):
        assert_is_the_definition(grouped, experts, *drawn(T, 2, 5, torch.bfloat16, missing=0.5))


@pytest.mark.parametrize("way", EACH_WAY)
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


@needs_grouped_mm
def test_frozen_experts_cost_a_grouped_product_neither_time_nor_memory(monkeypatch):
    ends, product = [], F.grouped_mm

    def counted(a, b, *, offs):
        ends.append((b.dim(), len(offs)))
        return product(a, b, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", counted)
    experts = build(num_experts=4).experts
    experts[:3].requires_grad_(False)
    x, weights, index = drawn(23, 2, 4)
    grouped(experts, x.requires_grad_(), weights, index).sum().backward()
    assert [count for dim, count in ends if dim == 2] == [1, 1]  # gradients of weights: the last expert's alone
    ends.clear()
    experts.requires_grad_(False)
    grouped(experts, x, weights, index).sum().backward()
    assert not [count for dim, count in ends if dim == 2]


@pytest.mark.parametrize("way", EACH_WAY)
def test_weights_that_change_before_the_backward_pass_are_noticed(way):
    experts = build("gated", 4).experts
    x, weights, index = drawn(23, 2, 4)
    y = WAYS[way](experts, x.requires_grad_(), weights, index)
    with torch.no_grad():
        experts[1].up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("way", EACH_WAY)
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


@pytest.mark.parametrize("way", EACH_WAY)
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
    for name in ("run_all", "run_grouped", "run_in_turn"):
        original = getattr(dispatch_module, name)
        monkeypatch.setattr(dispatch_module, name, lambda *args, f=original, n=name: ran.append(n) or f(*args))
    return ran


@needs_grouped_mm
def test_the_way_is_chosen_from_shapes_and_modules(monkeypatch):
    ran = ways(monkeypatch)

    def chosen(N, K, T=100, kernel=False, form="gated", implementation=None, change=None):
        ran.clear()
        monkeypatch.setattr(dispatch_module, "has_kernel", lambda x: kernel)
        layer = build(form, N, K, dtype=torch.bfloat16).eval()
        if change:
            change(layer.experts)
        layer.model_config._experts_implementation_internal = implementation
        layer(torch.randn(1, T, 16, dtype=torch.bfloat16))
        return ran[0]

    assert chosen(2, 2) == chosen(3, 4) == chosen(2, 2, kernel=True) == "run_all"
    assert chosen(4, 2) == chosen(4, 2, T=1) == "run_in_turn"
    assert chosen(4, 2, kernel=True) == chosen(4, 2, implementation="grouped_mm") == "run_grouped"
    assert chosen(2, 2, implementation="grouped_mm") == "run_grouped"
    assert chosen(2, 2, implementation="eager") == chosen(4, 2, kernel=True, implementation="eager") == "run_in_turn"
    assert chosen(4, 2, kernel=True, form=Inline) == "run_in_turn"
    assert chosen(4, 2, kernel=True, change=lambda e: e[1].register_forward_hook(lambda *_: None)) == "run_in_turn"
    assert chosen(4, 2, kernel=True, change=lambda e: setattr(e[1], "up_proj", Subclass(16, 24))) == "run_in_turn"


def test_few_tokens_on_an_accelerator_run_all_experts_of_few(monkeypatch):
    ran = []
    for name in ("run_all", "run_grouped", "run_in_turn"):
        monkeypatch.setattr(dispatch_module, name, lambda *args, n=name: ran.append(n))
    monkeypatch.setattr(dispatch_module, "has_kernel", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(dispatch_module, "can_group", lambda *_: True)
    monkeypatch.setattr(dispatch_module, "is_traced", lambda x: False)

    def chosen(N, T, dtype=torch.bfloat16):
        with FakeTensorMode():  # no accelerator is at hand
            x, weights = torch.empty(1, T, 16, dtype=dtype, device="cuda"), torch.empty(T, 2, device="cuda")
            index = torch.empty(T, 2, dtype=torch.long, device="cuda")
        dispatch(nn.ModuleList([nn.Identity()] * N), x, weights, index, False, False, plain_form(Plain(16, 24)))
        return ran.pop()

    assert chosen(4, 64) == chosen(8, 1) == chosen(3, 64, torch.float32) == "run_all"
    assert chosen(9, 64) == chosen(4, 65) == "run_grouped"
    assert chosen(9, 64, torch.float32) == chosen(4, 65, torch.float32) == "run_in_turn"


class Subclass(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False, dtype=torch.bfloat16)


def test_the_kernel_is_that_of_two_generations_of_gpus_in_bfloat16(monkeypatch):
    class Device:
        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda")

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    capability = {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability["now"])
    for capability["now"], expected in (((9, 0), True), ((10, 0), True), ((8, 0), False), ((12, 0), False)):
        assert grouped_experts.has_kernel(Device()) == expected
    capability["now"], Device.dtype = (9, 0), torch.float16
    assert not grouped_experts.has_kernel(Device())


def test_one_that_the_device_lacks_falls_back_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_moe_expand"), "propagate", True)
    dispatch_module.logger.warning_once.cache_clear()
    experts = build("gated", 4, dtype=torch.float64).experts
    x, weights, index = drawn(23, 2, 4, torch.float64)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            y = dispatch(experts, x, weights, index, False, False, plain_form(experts[0]), "grouped_mm")
    torch.testing.assert_close(y, slow(experts, x, weights, index), rtol=1e-5, atol=1e-6)
    (record,) = caplog.records
    assert "'grouped_mm'" in record.getMessage()
    assert "float64" in record.getMessage()


# Plain FFNs


class Mixing(Plain):
    """Not row by row: the tokens of one call depend on each other."""

    def forward(self, x):
        inner = self.act(self.up(x))
        return self.down(inner - inner.mean(0, keepdim=True))


class Dropped(Plain):
    def forward(self, x):
        return self.down(F.dropout(self.act(self.up(x)), 0.5, self.training))


class Scaled(Plain):
    def forward(self, x):
        return 2 * super().forward(x)


class WithNorm(Plain):
    def __init__(self, hidden, inner):
        super().__init__(hidden, inner)
        self.norm = nn.LayerNorm(inner)

    def forward(self, x):
        return self.down(self.norm(self.act(self.up(x))))


@pytest.mark.parametrize("ffn", [Mixing, Dropped, Scaled, WithNorm, Inline])
def test_code_of_another_form_is_not_plain(ffn):
    assert plain_form(Plain(16, 24)) is not None
    assert plain_form(ffn(16, 24)) is None


class Swapped(nn.Module):
    """Gated, with names that say nothing, the layers in another order, and equal sizes."""

    def __init__(self, hidden, inner):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.f = nn.Tanh()

    def forward(self, x):
        return self.a(self.f(self.c(x)) * self.b(x))


@needs_grouped_mm
def test_layers_are_known_by_what_they_compute():
    form = plain_form(Swapped(16, 16))
    assert (form.first, form.last, form.activation, form.gated) == (("c", "b"), "a", "f", True)
    experts = build(Swapped, 4, inner=16, dtype=torch.bfloat16).experts
    assert_is_the_definition(grouped, experts, *drawn(23, 2, 4, torch.bfloat16))


def test_the_form_is_found_on_a_device_without_values_and_draws_no_random_numbers():
    with torch.device("meta"):
        ffn = FORMS["gated"](16, 24)
        state = torch.get_rng_state()
        assert plain_form(ffn) is not None
    assert torch.equal(torch.get_rng_state(), state)


# Graphs and transforms


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=needs_grouped_mm)])
def test_nothing_is_read_on_the_host(mode, kernel, monkeypatch):
    monkeypatch.setattr(dispatch_module, "has_kernel", lambda x: kernel)
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


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(("form", "tokens"), [("gated", 13), ("gated", 100), ("conv1d", 100), (Inline, 100)])
@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=needs_grouped_mm)])
def test_compiled_it_is_one_graph(mode, form, tokens, kernel, monkeypatch):
    monkeypatch.setattr(dispatch_module, "has_kernel", lambda x: kernel)
    ran = ways(monkeypatch)
    layer = getattr(build(form, 4, has_classifier=True, dtype=torch.bfloat16), mode)()
    x = torch.randn(1, tokens, 16, dtype=torch.bfloat16).requires_grad_()
    wanted = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).float().square().sum(), wanted, allow_unused=True)
    torch.compiler.reset()
    ran.clear()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x).float().square().sum(), wanted, allow_unused=True)
    assert ran[0] == ("run_grouped" if kernel and form is not Inline else "run_all")
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


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_trace_of_the_old_kind_holds_no_routing():
    layer = build().eval()
    with torch.no_grad():
        traced = torch.jit.trace(layer, torch.randn(1, 13, 16), check_trace=False)
        x = torch.randn(1, 13, 16)
        torch.testing.assert_close(traced(x), layer(x))


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


@needs_grouped_mm
def test_fused_functions_compile_and_give_what_their_code_gives(monkeypatch):
    """As on a GPU with large tensors."""
    experts = build("gated", 4, dtype=torch.bfloat16).experts
    places = [(grouped_experts, name) for name in ("_inner", "_inner_backward", "_sum_of_rows")]
    for module, name in [*places, (dispatch_module, "_weighted_sum")]:
        function = getattr(module, name).__wrapped__
        compiled = torch.compile(function, dynamic=True, backend="aot_eager", fullgraph=True)
        monkeypatch.setattr(module, name, compiled)
    for T in (23, 70):
        assert_is_the_definition(grouped, experts, *drawn(T, 2, 4, torch.bfloat16))
    assert_is_the_definition(in_all, experts, *drawn(23, 2, 4, torch.bfloat16))


def test_without_a_compiler_the_code_itself_runs(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_moe_expand"), "propagate", True)
    grouped_experts.logger.warning_once.cache_clear()

    def broken(function, **_):
        def call(*args):
            raise RuntimeError("no gcc")

        return call

    class Large(torch.Tensor):
        is_cuda = True

        def numel(self):
            return 1 << 24

    monkeypatch.setattr(torch, "compile", broken)
    twice = grouped_experts.fused(lambda x: 2 * x)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert torch.equal(twice(torch.ones(3).as_subclass(Large)).as_subclass(torch.Tensor), 2 * torch.ones(3))
    assert len(caplog.records) == 1
