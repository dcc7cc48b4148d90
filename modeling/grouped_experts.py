"""Runs the experts of one layer together: sorts tokens by expert, takes each step of the FFN once for all experts, and
adds up the weighted outputs.

`y = sum_k weight_k * E_index_k(x)`, summed in float32. Index N means "no expert".

Shape suffixes as in `routing.py`; A' of the A assignments have an expert.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from .ffn_form import FFNForm
from .grouped_linear import ROWS_OF_ONE_CALL, Groups, can_be_one_product, grouped_linear
from .weight_block import ExpertWeights

# Under autocast on a CPU, float32 weights are converted for at least this many tokens an expert; fewer compute in
# float32, which takes less time than the conversion.
_ROWS_WORTH_A_CONVERSION = 2
# Experts are filled up to this many rows: reading weights takes longer than multiplying so few. Where a weight has at
# most so many elements, to half as many rows again: calling an operator for each expert takes longer.
_ROWS_FILLED_UP = 8
_SMALL_WEIGHT = 1 << 21
_CHUNK = 256


def run_grouped(
    form: FFNForm,
    ffn: nn.Module,
    found: list[ExpertWeights],
    x_Th: torch.Tensor,
    weights_TK: torch.Tensor,
    index_TK: torch.Tensor,
    num_experts: int,
    batched: bool,
) -> torch.Tensor:
    """The layer's output, `[T, h]`.

    Args:
        form: of the experts' FFN.
        ffn: expert 0, for the steps that have no weights.
        found: the experts' weights.
        num_experts: N.
        batched: whether each assignment reads a copy of its expert's weights.
    """
    device = x_Th.device.type
    run = _run_counted if knows_routing(x_Th) and not batched else _run_uncounted
    arguments = (form, ffn, found, x_Th, weights_TK, index_TK, num_experts, batched)
    if not torch.is_autocast_enabled(device):
        return run(*arguments, x_Th.dtype)
    double = _dtype_of(found) == torch.float64  # autocast leaves it
    with torch.autocast(device, enabled=False):
        return run(*arguments, torch.float64 if double else torch.get_autocast_dtype(device))


def knows_routing(x_Th: torch.Tensor) -> bool:
    """Whether the host reads values at no cost: on a CPU, unless a graph is traced or the tensors are fake."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return x_Th.device.type == "cpu" and type(x_Th) is torch.Tensor and not is_traced


def _run_counted(
    form: FFNForm, ffn: nn.Module, found: list[ExpertWeights], x_Th: torch.Tensor, weights_TK: torch.Tensor,
    index_TK: torch.Tensor, N: int, batched: bool, result: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    T, K = weights_TK.shape
    few = T * K <= ROWS_OF_ONE_CALL  # for which a call costs more than memory
    share = 0.0
    if few and all(can_be_one_product(one, result) for one in found):
        share = 1.5 if max(one.weights[0].numel() for one in found) <= _SMALL_WEIGHT else 1.0
    rows = _sorted(index_TK, N, share)
    dtype = result
    assigned = T * K - rows.unassigned
    if _dtype_of(found) == torch.float32 and assigned < _ROWS_WORTH_A_CONVERSION * sum(map(bool, rows.counts)):
        dtype = torch.float32
    row_TK, mask_TK = rows.row_TK, None
    if rows.unassigned:
        # A slot without an expert points at its token's first row, with weight 0.
        mask_TK = index_TK < N
        row_TK = torch.where(mask_TK, row_TK, row_TK[:, :1])
        weights_TK = weights_TK * mask_TK
    x_Th = x_Th.to(dtype)
    needs_grad = torch.is_grad_enabled() and assigned > 0 and not few
    x_Ah = _Gather.apply(x_Th, rows.token_A, row_TK, mask_TK) if needs_grad else x_Th.index_select(0, rows.token_A)
    groups = Groups(rows.counts)
    y_Ah = form.run(ffn, x_Ah, lambda x, n: grouped_linear(x, form.linears[n], found[n], groups, dtype))
    if assigned == 0:  # the experts stay in the graph, with zero gradients
        return (x_Th.new_zeros(x_Th.shape) + (y_Ah.sum() + 0 * weights_TK.sum())).to(result)
    if few:
        return _sum_of_copies(y_Ah, weights_TK, row_TK, result)
    if needs_grad:
        return _WeightedSum.apply(y_Ah, weights_TK, rows.order_A, row_TK).to(result)
    return _weighted_rows(y_Ah, row_TK, weights_TK).to(result)


def _run_uncounted(
    form: FFNForm, ffn: nn.Module, found: list[ExpertWeights], x_Th: torch.Tensor, weights_TK: torch.Tensor,
    index_TK: torch.Tensor, N: int, batched: bool, result: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    T, K = weights_TK.shape
    place_TK = _places(index_TK, N)
    sorted_A, order_A = place_TK.reshape(-1).sort(stable=True)
    ends_N = torch.searchsorted(sorted_A, torch.arange(N, device=x_Th.device), right=True).to(torch.int32)
    groups = Groups(None, ends_N, sorted_A, batched)
    x_Ah = x_Th.to(result).index_select(0, order_A // K)
    y_Ah = form.run(ffn, x_Ah, lambda x, n: grouped_linear(x, form.linears[n], found[n], groups, result))
    row_A = torch.empty_like(order_A).scatter(0, order_A, torch.arange(T * K, device=x_Th.device))
    return _sum_of_copies(y_Ah, weights_TK * (index_TK < N), row_A.view(T, K), result)


@dataclass(frozen=True)
class _Rows:
    """The rows of the experts, in the order of their places.

    Attributes:
        token_A: the token of each row; 0 in a row that only fills up an expert's.
        row_TK: the row of each assignment; 0 without an expert.
        counts: number of each place's rows.
        order_A: the assignment of each row, where no row fills up.
        unassigned: number of assignments without an expert.
    """

    token_A: torch.Tensor
    row_TK: torch.Tensor
    counts: tuple[int, ...]
    order_A: torch.Tensor
    unassigned: int


def _sorted(index_TK: torch.Tensor, N: int, share: float) -> _Rows:
    """The assignments sorted by place. Rows that nobody reads may fill up the experts', so that one product serves all:
    to `_ROWS_FILLED_UP` rows, or to `share` times the rows; if it is 0, none do."""
    K = index_TK.shape[1]
    place_A = _places(index_TK.numpy().reshape(-1), N).astype(np.int16)  # sorted by digits, in linear time
    *counts, unassigned = np.bincount(place_A, minlength=N + 1).tolist()
    order_A = place_A.argsort(kind="stable")[: len(place_A) - unassigned]
    token_A, most = order_A // K, max(counts)
    row_of_order_A = np.arange(len(order_A))
    if share and min(counts) > 0 and (most <= _ROWS_FILLED_UP or N * most <= share * len(order_A)):
        row_of_order_A += np.repeat(np.arange(N) * most - np.cumsum(counts) + counts, counts)
        filled_A = np.zeros(N * most, token_A.dtype)
        filled_A[row_of_order_A] = token_A
        token_A, counts = filled_A, [most] * N
    row_A = np.zeros_like(place_A, row_of_order_A.dtype)
    row_A[order_A] = row_of_order_A
    token, row, order = (torch.from_numpy(found) for found in (token_A, row_A, order_A))
    return _Rows(token, row.view_as(index_TK), tuple(counts), order, unassigned)


def _places(index: Any, N: int) -> Any:
    """Places in the block, of a tensor or an array: last expert first, N for "no expert"."""
    return (N - 1 - index) % (N + 1)


def _sum_of_copies(
    y_Ah: torch.Tensor, weights_TK: torch.Tensor, row_TK: torch.Tensor, result: torch.dtype
) -> torch.Tensor:
    y_TKh = y_Ah.index_select(0, row_TK.view(-1)).view(*row_TK.shape, -1)
    return torch.bmm(weights_TK.unsqueeze(1), y_TKh.to(weights_TK.dtype)).squeeze(1).to(result)


def _dtype_of(found: list[ExpertWeights]) -> torch.dtype:
    return found[0].weights[0].dtype


class _Gather(torch.autograd.Function):
    """`x[token]` on a CPU, whose gradient is gathered too: adding rows to a sum by index is many times slower."""

    @staticmethod
    def forward(ctx: Any, x_Th: torch.Tensor, token_A: torch.Tensor, row_TK: Any, mask_TK: Any) -> torch.Tensor:
        ctx.save_for_backward(row_TK, mask_TK)
        return x_Th.index_select(0, token_A)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_Ah: torch.Tensor) -> Any:
        row_TK, mask_TK = ctx.saved_tensors
        weights_TK = None if mask_TK is None else mask_TK.to(dx_Ah.dtype)
        dx_Ah = dx_Ah.contiguous()
        return F.embedding_bag(row_TK, dx_Ah, mode="sum", per_sample_weights=weights_TK), None, None, None


class _WeightedSum(torch.autograd.Function):
    """`sum_k weight_k y_k` on a CPU, in float32, without a copy of the outputs in float32."""

    @staticmethod
    def forward(
        ctx: Any, y_Ah: torch.Tensor, weights_TK: torch.Tensor, order_A: torch.Tensor, row_TK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(y_Ah if ctx.needs_input_grad[1] else None, weights_TK, order_A)
        return _weighted_rows(y_Ah, row_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_Th: torch.Tensor) -> Any:
        y_Ah, weights_TK, order_A = ctx.saved_tensors
        token_A = order_A // weights_TK.shape[1]
        of_outputs = of_weights = None
        if ctx.needs_input_grad[0]:
            weights_A1 = weights_TK.reshape(-1).index_select(0, order_A).unsqueeze(1)
            of_outputs = _weighted_rows(dy_Th, token_A.unsqueeze(1), weights_A1)
        if ctx.needs_input_grad[1]:
            products = [
                (dy_Th.index_select(0, token).to(weights_TK.dtype) * y.to(weights_TK.dtype)).sum(-1)
                for token, y in zip(token_A.split(_CHUNK), y_Ah.split(_CHUNK), strict=True)
            ]
            of_weights = weights_TK.new_zeros(weights_TK.numel())
            of_weights = of_weights.index_copy_(0, order_A, torch.cat(products)).view_as(weights_TK)
        return of_outputs, of_weights, None, None


def _weighted_rows(y_Ah: torch.Tensor, row_BK: torch.Tensor, weights_BK: torch.Tensor) -> torch.Tensor:
    """`[B, h]`: `sum_k weights[b, k] y[row[b, k]]`, accumulated in float32 at least.

    torch's weighted sum of rows takes weights in the rows' type. In a type of 16 bits each weight is given as the sum
    of two numbers, which is closer to it than the result can show.
    """
    y_Ah, high_BK = y_Ah.contiguous(), weights_BK.to(y_Ah.dtype)
    if y_Ah.dtype.itemsize < weights_BK.dtype.itemsize:
        low_BK = (weights_BK - high_BK).to(y_Ah.dtype)
        row_BK, high_BK = torch.cat([row_BK, row_BK], 1), torch.cat([high_BK, low_BK], 1)
    return F.embedding_bag(row_BK, y_Ah, mode="sum", per_sample_weights=high_BK)
