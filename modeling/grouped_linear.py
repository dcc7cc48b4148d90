"""Linear layers of all experts at once, on tokens that are sorted by expert: `y_a = x_a W_e(a)^T + b_e(a)`.

On a CPU, where the host knows the routing, each expert's rows are multiplied in turn, straight into one output; with
few rows, where calls take the time, by one call of torch's `grouped_mm` on the experts' block. Elsewhere, and while a
graph is traced, the product is one operator that reads no value on the host; it runs `grouped_mm` too or, with few
rows, `bmm` on copies of the selected experts' weights, as the experts `grouped_mm` and `batched_mm` of transformers do.

Shape suffixes as in `routing.py`; experts are numbered by their place in the block, last expert first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from . import grouped_kernels as kernels
from .ffn_form import Linears
from .weight_block import ExpertWeights

# On a CPU, at most this many rows are multiplied in one call; more run at the same speed one expert at a time, and gate
# and up then have outputs of their own, which later steps read faster.
ROWS_OF_ONE_CALL = 1024


@dataclass(frozen=True)
class Groups:
    """The rows of each expert.

    Attributes:
        counts: number of each expert's rows, which are all rows; None where the host does not know it.
        ends_N: int32, the end of each expert's rows.
        place_A: each row's place in the block, N behind the last expert's rows; None where `counts` says it.
        batched: whether each row is multiplied by a copy of its expert's weight.
    """

    ends_N: torch.Tensor
    counts: tuple[int, ...] | None = None
    place_A: torch.Tensor | None = None
    batched: bool = False


def grouped_linear(
    x_Ai: torch.Tensor, call: Linears, found: ExpertWeights, groups: Groups, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """The output of each of the layers that `call` names, computed in `dtype`, the input's.

    Rows behind the last expert's are zero, and so are their gradients. An expert without rows gets zero gradients; one
    whose weights are frozen gets none.
    """
    if groups.counts is None:
        y_Ao = torch.ops.hf_moe_expand.grouped_linear(
            x_Ai, found.weights, groups.ends_N, groups.place_A, list(call.outputs), groups.batched, call.is_transposed
        )
        outputs = y_Ao.split(call.outputs, dim=1)
        return tuple(_with_bias(y, found, groups, place, call) for place, y in enumerate(outputs))
    parameters = (*found.weights, *(bias for bias in found.biases if bias is not None))
    wanted = torch.is_grad_enabled() and (x_Ai.requires_grad or any(p.requires_grad for p in parameters))
    block = found.block
    if block is not None and _in_one_call(x_Ai, call, block, dtype):
        if wanted:
            return _OneCall.apply(x_Ai, call, groups, block, *found.weights)
        return tuple(F.grouped_mm(x_Ai, part_Nio, offs=groups.ends_N) for part_Nio in _parts(block, call))
    if wanted:
        return _InTurn.apply(x_Ai, call, groups.counts, *found.weights, *found.biases)
    return _products(x_Ai, call, groups.counts, _cast(found.weights, call, groups.counts, dtype), found.biases)


def _in_one_call(x_Ai: torch.Tensor, call: Linears, block: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        block.dtype == dtype  # a converted block would be large, and the host gives large memory slowly
        and 0 < x_Ai.shape[0] <= ROWS_OF_ONE_CALL
        and not any(call.has_bias)
        and kernels.can_group(x_Ai.device, call, dtype)
    )


def _with_bias(y_Ao: torch.Tensor, found: ExpertWeights, groups: Groups, place: int, call: Linears) -> torch.Tensor:
    if not call.has_bias[place]:
        return y_Ao
    biases: Any = found.biases[place :: len(call.names)]
    none_1o = y_Ao.new_zeros(1, y_Ao.shape[1])
    return y_Ao + torch.cat([torch.stack(biases).to(y_Ao.dtype), none_1o]).index_select(0, groups.place_A)  # type: ignore[arg-type]


class _InTurn(torch.autograd.Function):
    """The products of one expert after the other. Frozen weights cost neither a gradient nor a copy of the input."""

    @staticmethod
    def forward(ctx: Any, x_Ai: torch.Tensor, call: Linears, counts: tuple[int, ...], *parameters: Any) -> Any:
        number = len(call.names) * len(counts)
        weights, biases = parameters[:number], parameters[number:]
        cast = _cast(weights, call, counts, x_Ai.dtype)
        ctx.call, ctx.counts, ctx.number = call, counts, number
        ctx.types = [None if p is None else p.dtype for p in parameters]
        x_needed = any(ctx.needs_input_grad[3 : 3 + number])
        ctx.save_for_backward(x_Ai if x_needed else None, *(cast if ctx.needs_input_grad[0] else ()))
        return _products(x_Ai, call, counts, cast, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_Ai, *weights = ctx.saved_tensors
        call, counts = ctx.call, ctx.counts
        parts = len(call.names)
        dy = [grad.split(counts) for grad in grads]
        dx_Ai = None
        if weights:
            dx_Ai = grads[0].new_empty(grads[0].shape[0], call.inputs)
            for expert, rows in enumerate(dx_Ai.split(counts)):
                for part in range(parts if counts[expert] else 0):
                    weight_oi = _out_in(weights[expert * parts + part], call)
                    if part == 0:
                        torch.mm(dy[part][expert], weight_oi, out=rows)
                    else:
                        rows.add_(torch.mm(dy[part][expert], weight_oi, out=torch.empty_like(rows)))
        needed = ctx.needs_input_grad[3:]
        of_weights = _of_weights(x_Ai, grads, call, counts, needed[: ctx.number], ctx.types[0])
        of_biases = [
            dy[number % parts][number // parts].sum(0).to(ctx.types[ctx.number + number]) if wanted else None
            for number, wanted in enumerate(needed[ctx.number :])
        ]
        return dx_Ai, None, None, *of_weights, *of_biases


class _OneCall(torch.autograd.Function):
    """The products of all experts in one call; gradients of weights are memory of their own, one expert at a time."""

    @staticmethod
    def forward(
        ctx: Any, x_Ai: torch.Tensor, call: Linears, groups: Groups, block: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.groups, ctx.block = call, groups, block
        # The slices of the block are saved too, so that torch notices if they change.
        ctx.save_for_backward(
            x_Ai if any(ctx.needs_input_grad[4:]) else None, *(weights if ctx.needs_input_grad[0] else ())
        )
        return tuple(F.grouped_mm(x_Ai, part_Nio, offs=groups.ends_N) for part_Nio in _parts(block, call))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_Ai, *_ = ctx.saved_tensors
        call, groups, block = ctx.call, ctx.groups, ctx.block
        dx_Ai = None
        if ctx.needs_input_grad[0]:
            for grad, part_Nio in zip(grads, _parts(block, call), strict=True):
                of_part_Ai = F.grouped_mm(grad.contiguous(), part_Nio.transpose(1, 2), offs=groups.ends_N)
                dx_Ai = of_part_Ai if dx_Ai is None else dx_Ai.add_(of_part_Ai)
        trained = ctx.needs_input_grad[4:]
        return dx_Ai, None, None, None, *_of_weights(x_Ai, grads, call, groups.counts, trained, block.dtype)


def _of_weights(
    x_Ai: torch.Tensor | None,
    grads: Sequence[torch.Tensor],
    call: Linears,
    counts: Sequence[int],
    trained: Sequence[bool],
    dtype: torch.dtype,
) -> list[torch.Tensor | None]:
    """The gradients of the experts' weights that train."""
    if x_Ai is None:
        return [None] * len(trained)
    x, dy = x_Ai.split(counts), [grad.split(counts) for grad in grads]
    found: list[torch.Tensor | None] = []
    for number, wanted in enumerate(trained):
        expert, part = divmod(number, len(grads))
        found.append(_of_weight(x[expert], dy[part][expert], call, part, dtype) if wanted else None)
    return found


def _of_weight(x_Ai: torch.Tensor, dy_Ao: torch.Tensor, call: Linears, part: int, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of one expert's weight."""
    if not x_Ai.shape[0]:
        return torch.zeros(call.shape(part), dtype=dtype, device=x_Ai.device)
    grad = x_Ai.new_empty(call.shape(part))
    first, second = (x_Ai, dy_Ao) if call.is_transposed else (dy_Ao, x_Ai)
    return torch.mm(first.t(), second, out=grad).to(dtype)


def _products(
    x_Ai: torch.Tensor, call: Linears, counts: Sequence[int], weights: Sequence[Any], biases: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    outputs = tuple(x_Ai.new_empty(x_Ai.shape[0], size) for size in call.outputs)
    x = x_Ai.split(counts)
    for part, output in enumerate(outputs):
        for expert, rows in enumerate(output.split(counts)):
            if not counts[expert]:
                continue
            number = expert * len(outputs) + part
            weight_io = _out_in(weights[number], call).t()
            if biases[number] is None:
                torch.mm(x[expert], weight_io, out=rows)
            else:
                torch.addmm(biases[number].to(x_Ai.dtype), x[expert], weight_io, out=rows)
    return outputs


def _cast(weights: Sequence[Any], call: Linears, counts: Sequence[int], dtype: torch.dtype) -> Sequence[Any]:
    """The weights in `dtype`, of the experts that have rows."""
    if weights[0].dtype == dtype:
        return weights
    return [w.to(dtype) if counts[number // len(call.names)] else None for number, w in enumerate(weights)]


def _parts(block: torch.Tensor, call: Linears) -> list[torch.Tensor]:
    """`[N, in, out]` of each layer that `call` names. One product for each rounds as the products in turn do."""
    parts = block.split(call.outputs, 1 + call.is_transposed)
    return list(parts) if call.is_transposed else [part.transpose(1, 2) for part in parts]


def _out_in(weight: torch.Tensor, call: Linears) -> torch.Tensor:
    return weight.t() if call.is_transposed else weight


kernels.register()
