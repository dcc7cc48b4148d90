"""Few tokens on a CPU: the experts' rows in one product, filled up so that each expert has equally many."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import TOLERANCE, assert_agree, build
from torch import nn

from hf_moe_expand.modeling import grouped_experts, grouped_kernels, grouped_linear
from hf_moe_expand.modeling.ffn_form import Linears
from hf_moe_expand.modeling.grouped_linear import Groups
from hf_moe_expand.modeling.weight_block import ExpertWeights


@st.composite
def choices(draw):
    """`[T, K]` experts of N, different ones for a token, some of them N: no expert."""
    N = draw(st.integers(2, 7))
    K = draw(st.integers(1, N))
    tokens = [draw(st.permutations(range(N)))[:K] for _ in range(draw(st.integers(1, 20)))]
    missing = draw(st.sampled_from([0.0, 0.3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    index_TK = torch.tensor(tokens)
    return index_TK.masked_fill(torch.rand(index_TK.shape, generator=generator) < missing, N), N


@settings(max_examples=300, deadline=None)
@given(choices(), st.sampled_from([0.0, 1.0, 1.5]))
def test_every_assignment_finds_its_row_among_its_experts(chosen, share):
    index_TK, N = chosen
    rows = grouped_experts._sorted(index_TK, N, share)
    counts = [(index_TK == N - 1 - place).sum().item() for place in range(N)]
    assert rows.unassigned == (index_TK == N).sum()
    assert len(rows.token_A) == sum(rows.counts)
    if rows.counts != tuple(counts):
        assert share
        assert min(counts) > 0
        assert rows.counts == (max(counts),) * N
    place_of_row = torch.arange(N).repeat_interleave(torch.tensor(rows.counts))
    for token, experts in enumerate(index_TK.tolist()):
        for slot, expert in enumerate(experts):
            if expert < N:
                row = rows.row_TK[token, slot]
                assert rows.token_A[row] == token
                assert place_of_row[row] == N - 1 - expert
    assigned = rows.row_TK[index_TK < N]
    assert len(assigned.unique()) == len(assigned)
    assert rows.counts != tuple(counts) or torch.equal(rows.row_TK.view(-1)[rows.order_A], torch.arange(sum(counts)))


def test_experts_are_filled_up_to_a_few_rows_or_to_half_as_many_again():
    def filled(*counts, share=1.5):
        experts = torch.arange(len(counts)).flip(0).repeat_interleave(torch.tensor(counts)).unsqueeze(1)
        return grouped_experts._sorted(experts, len(counts), share).counts

    assert filled(1, 8, 2) == (8, 8, 8)
    assert filled(1, 9, 2) == (1, 9, 2)
    assert filled(20, 30, 10) == (30, 30, 30)
    assert filled(20, 31, 10) == (20, 31, 10)
    assert filled(3, 0, 3) == (3, 0, 3)
    assert filled(1, 8, 2, share=1.0) == (8, 8, 8)
    assert filled(20, 30, 10, share=1.0) == (20, 30, 10)
    assert filled(1, 8, 2, share=0.0) == (1, 8, 2)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_even_names_exactly_the_experts_with_rows(counts):
    even = Groups(tuple(counts)).even
    places = [place for place, count in enumerate(counts) if count]
    steps = {second - first for first, second in pairwise(places)}
    is_even = len(places) > 1 and len(steps) == 1 and len({counts[place] for place in places}) == 1
    assert (even is not None) == is_even
    assert even is None or list(range(len(counts)))[even] == places


@pytest.mark.parametrize("frozen", [0, 1, 4])
@pytest.mark.parametrize("num_experts", [2, 4, 7])
@pytest.mark.parametrize("form", ["gated", "fused", "plain", "conv1d"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_filled_up_experts_compute_what_modules_do(dtype, form, num_experts, frozen):
    layer = build(form, num_experts, dtype=dtype).train()
    for expert in layer.experts[:frozen]:
        expert.requires_grad_(False)
    for tokens in (2, 9, 31, 64):
        assert_agree(layer, torch.randn(1, tokens, 16, dtype=dtype), "grouped_mm")


@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_frozen_experts_are_no_part_of_a_block_of_gradients(tokens, monkeypatch):
    found = []
    slices_of = grouped_kernels.slices_of
    monkeypatch.setattr(
        grouped_kernels, "slices_of", lambda block, *args: found.append(block) or slices_of(block, *args)
    )
    layer = build(dtype=torch.bfloat16).train()
    for expert in layer.experts[:3]:
        expert.requires_grad_(False)
    layer(torch.randn(1, tokens, 16, dtype=torch.bfloat16)).sum().backward()
    assert [block.shape for block in found] == [(1, 16, 24), (1, 48, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pair", list(combinations(range(5), 2)))
def test_a_single_tokens_experts_are_one_product_wherever_they_lie(pair, dtype, monkeypatch):
    made = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args: made.append(args) or bmm(*args))
    layer = build(num_experts=5, dtype=dtype).train()
    with torch.no_grad():
        layer.router.weight.zero_()[list(pair)] = 1.0
    x = torch.rand(1, 1, 16, dtype=dtype) + 0.1
    assert_agree(layer, x, "grouped_mm")
    made.clear()
    layer.eval()(x)
    is_one = dtype == torch.float32 or pair[1] - pair[0] == 1
    assert len(made) == 1 + 2 * is_one  # the weighted sum; gate and up; down


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", [(1030, 0, 3, 17, 1), (0, 5, 1200, 0), (7, 9, 11, 1001), (1100,)])
def test_many_rows_of_one_expert_leave_the_next_ones_alone(counts, transposed, dtype):
    """In 16 bits a product also writes rows of the experts behind it, whose own products come later."""
    torch.manual_seed(0)
    call = Linears(("gate", "up"), nn.Linear, (False, False), 16, (24, 24))
    if transposed:
        call = Linears(("one",), type(build("conv1d").experts[0].c_fc), (False,), 16, (24,))
    parts = len(call.names)
    weights = tuple(nn.Parameter(torch.randn(call.shape(0), dtype=dtype)) for _ in range(parts * len(counts)))
    found = ExpertWeights(weights, (None,) * len(weights), None)
    x_Ai = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    outputs = grouped_linear.grouped_linear(x_Ai, call, found, Groups(counts), dtype)
    dy = [torch.randn_like(y) for y in outputs]
    dx_Ai = torch.autograd.grad(outputs, x_Ai, dy)[0]
    expert_A = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    slow_dx_Ai = torch.zeros_like(x_Ai, dtype=torch.float32)
    for part, y in enumerate(outputs):
        weight_Aoi = torch.stack(weights[part::parts]).float()[expert_A]
        weight_Aoi = weight_Aoi.transpose(1, 2) if transposed else weight_Aoi
        slow_y = torch.bmm(weight_Aoi, x_Ai.float().unsqueeze(2)).squeeze(2)
        slow_dx_Ai += torch.bmm(dy[part].float().unsqueeze(1), weight_Aoi).squeeze(1)
        torch.testing.assert_close(y.float(), slow_y, rtol=0, atol=TOLERANCE[dtype] * slow_y.abs().max().item())
    torch.testing.assert_close(dx_Ai.float(), slow_dx_Ai, rtol=0, atol=TOLERANCE[dtype] * slow_dx_Ai.abs().max().item())
