"""Linear layers of all experts at once, on tokens that are sorted by expert: `y_a = x_a W_e(a)^T + b_e(a)`.

On a CPU, where the host knows the routing, each expert's rows are multiplied in turn, straight into one output.
Elsewhere, and while a graph is traced, the product is one operator that reads no value on the host; it runs torch's
`grouped_mm` on the experts' block or, with few rows, `bmm` on copies of the selected experts' weights, as the experts
`grouped_mm` and `batched_mm` of transformers do.

Shape suffixes as in `routing.py`; experts are numbered by their place in the block, last expert first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import grouped_kernels as kernels
from .expert_block import ExpertWeights
from .ffn_form import Linears


@dataclass(frozen=True)
class Groups:
    """The rows of each expert.

    Attributes:
        counts: number of each expert's rows, which are all rows; None where the host does not know it.
        ends_N: int32, the end of each expert's rows; None where `counts` says it.
        place_A: each row's place in the block, N behind the last expert's rows; None likewise.
        batched: whether each row is multiplied by a copy of its expert's weight.
    """

    counts: tuple[int, ...] | None = None
    ends_N: torch.Tensor | None = None
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
    if torch.is_grad_enabled() and (x_Ai.requires_grad or any(p.requires_grad for p in parameters)):
        return _OnCPU.apply(x_Ai, call, groups.counts, *found.weights, *found.biases)
    return _products(x_Ai, call, groups.counts, _cast(found.weights, call, groups.counts, dtype), found.biases)


def _with_bias(y_Ao: torch.Tensor, found: ExpertWeights, groups: Groups, place: int, call: Linears) -> torch.Tensor:
    if not call.has_bias[place]:
        return y_Ao
    biases: Any = found.biases[place :: len(call.names)]
    none_1o = y_Ao.new_zeros(1, y_Ao.shape[1])
    return y_Ao + torch.cat([torch.stack(biases).to(y_Ao.dtype), none_1o]).index_select(0, groups.place_A)  # type: ignore[arg-type]


class _OnCPU(torch.autograd.Function):
    """The products on a CPU. Frozen weights cost neither a gradient nor a copy of the input."""

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
                        rows.addmm_(dy[part][expert], weight_oi)
        x = None if x_Ai is None else x_Ai.split(counts)
        of_parameters: list[torch.Tensor | None] = [None] * len(ctx.types)
        for number, dtype in enumerate(ctx.types):
            if not ctx.needs_input_grad[3 + number]:
                continue
            expert, part = divmod(number % ctx.number, parts)
            if number >= ctx.number:
                grad = dy[part][expert].sum(0).to(dtype)
            else:
                assert x is not None
                grad = _of_weight(x[expert], dy[part][expert], call, part, dtype)
            of_parameters[number] = grad
        return dx_Ai, None, None, *of_parameters


def _of_weight(
    x_Ai: torch.Tensor, dy_Ao: torch.Tensor, call: Linears, part: int, dtype: torch.dtype
) -> torch.Tensor:
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


def _out_in(weight: torch.Tensor, call: Linears) -> torch.Tensor:
    return weight.t() if call.is_transposed else weight


kernels.register()
