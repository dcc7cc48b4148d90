"""Linear layers of all experts at once, on tokens that are sorted by expert: `y_a = x_a W_e(a)^T + b_e(a)`.

On a CPU, where the host knows the routing, each expert's rows are multiplied in turn, straight into one output; with
few rows, where calls take the time, gate and up in one product, and all experts in one if each has equally many rows.
Elsewhere, and while a graph is traced, the product is one operator that reads no value on the host; it runs torch's
`grouped_mm` or, with few rows, `bmm` on copies of the selected experts' weights, as the experts `grouped_mm` and
`batched_mm` of transformers do.

Shape suffixes as in `routing.py`; experts are numbered by their place in the block, last expert first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from . import grouped_kernels as kernels
from .ffn_form import Linears
from .weight_block import ExpertWeights

# On a CPU, gate and up of at most this many rows are multiplied in one call; of more, the products run at the same
# speed apart, and have outputs of their own, which later steps read faster. In float32 only single rows are: more take
# no less time, and would be rounded in another way than where no block lies.
ROWS_OF_ONE_CALL = 1024
# MKL multiplies up to this many rows in float32 faster as `(W x^T)^T`, up to four times.
_ROWS_TURNED = 16
# oneDNN multiplies more than so many rows in a type of 16 bits faster if they are a multiple of 16.
_MANY_ROWS = 256


@dataclass(frozen=True)
class Groups:
    """The rows of each expert.

    Attributes:
        counts: number of each expert's rows, which are all rows; None where the host does not know it.
        ends_N: int32, the end of each expert's rows; None where `counts` says it.
        place_A: each row's place in the block, N behind the last expert's rows; None where `counts` says it.
        batched: whether each row is multiplied by a copy of its expert's weight.
    """

    counts: tuple[int, ...] | None
    ends_N: torch.Tensor | None = None
    place_A: torch.Tensor | None = None
    batched: bool = False

    @cached_property
    def counted_ends_N(self) -> torch.Tensor:
        """int32, the end of each expert's rows, by `counts`."""
        return torch.tensor(list(accumulate(self.counts or ())), dtype=torch.int32)

    @cached_property
    def even(self) -> slice | None:
        """The places of the experts that have rows, two or more, if all have equally many and the places lie at equal
        distances, as those of a single token's two experts do."""
        counts = self.counts or ()
        places = [place for place, count in enumerate(counts) if count]
        if len(places) < 2:
            return None
        found = range(places[0], places[-1] + 1, places[1] - places[0])
        if places != list(found) or any(counts[place] != counts[places[0]] for place in places):
            return None
        return slice(found.start, found.stop, found.step)


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
    if found.block is not None and _takes_one_call(x_Ai, call, groups):
        if _wants_grad(x_Ai, found.weights):
            return _InOneCall.apply(x_Ai, call, groups, found.block, *found.weights)
        return _joint_products(x_Ai, call, groups, found.block)
    if _wants_grad(x_Ai, (*found.weights, *found.biases)):
        return _InTurn.apply(x_Ai, call, groups.counts, *found.weights, *found.biases)
    return _products(x_Ai, call, groups.counts, _cast(found.weights, call, groups.counts, dtype), found.biases)


def can_be_one_product(found: ExpertWeights, dtype: torch.dtype) -> bool:
    """Whether few rows of all experts are one product in `dtype` if each expert has equally many."""
    in_block = found.block is not None and found.block.dtype == dtype
    return in_block and dtype.itemsize == 2 and not any(bias is not None for bias in found.biases)


def _takes_one_call(x_Ai: torch.Tensor, call: Linears, groups: Groups) -> bool:
    rows = x_Ai.shape[0]
    if any(call.has_bias) or rows > ROWS_OF_ONE_CALL:  # a bias would be added to an output that is rounded
        return False
    return x_Ai.dtype.itemsize == 2 or (groups.even is not None and max(groups.counts or ()) == 1)


def _wants_grad(x_Ai: torch.Tensor, parameters: Sequence[Any]) -> bool:
    needs_grad = torch.is_grad_enabled()
    return needs_grad and (x_Ai.requires_grad or any(p is not None and p.requires_grad for p in parameters))


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
            for expert, rows in _spans(counts, dx_Ai.dtype):
                torch.mm(grads[0][rows], _out_in(weights[expert * parts], call), out=dx_Ai[rows])
                for part in range(1, parts):
                    dx_Ai[rows].add_(torch.mm(grads[part][rows], _out_in(weights[expert * parts + part], call)))
        needed = ctx.needs_input_grad[3:]
        of_weights = _of_weights(x_Ai, grads, call, counts, needed[: ctx.number], ctx.types[0])
        of_biases = [
            dy[number % parts][number // parts].sum(0).to(ctx.types[ctx.number + number]) if wanted else None
            for number, wanted in enumerate(needed[ctx.number :])
        ]
        return dx_Ai, None, None, *of_weights, *of_biases


class _InOneCall(torch.autograd.Function):
    """Few rows: one product for each expert, or for all, of all layers that `call` names."""

    @staticmethod
    def forward(
        ctx: Any, x_Ai: torch.Tensor, call: Linears, groups: Groups, block: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.groups, ctx.block = call, groups, block
        ctx.is_converted = block.dtype != x_Ai.dtype
        converted: list[torch.Tensor | None] = []
        y = _joint_products(x_Ai, call, groups, block, converted)
        # Slices of the block are saved too, so that torch notices if they change.
        read = (converted if ctx.is_converted else weights) if ctx.needs_input_grad[0] else ()
        ctx.save_for_backward(x_Ai if any(ctx.needs_input_grad[4:]) else None, *read)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_Ai, *read = ctx.saved_tensors
        call, groups, trained = ctx.call, ctx.groups, ctx.needs_input_grad[4:]
        dy_Ao = torch.cat(grads, 1) if len(grads) > 1 else grads[0].contiguous()
        dx_Ai = None
        if ctx.needs_input_grad[0]:
            dx_Ai = _multiplied(dy_Ao, read if ctx.is_converted else ctx.block, groups, call.inputs, call.is_transposed)
        if x_Ai is None or ctx.is_converted or not kernels.can_group(x_Ai.device, ctx.block.shape[1:], x_Ai.dtype):
            of_weights = _of_weights(x_Ai, grads, call, groups.counts, trained, ctx.block.dtype)
        else:
            of_weights = _of_all_weights(x_Ai, dy_Ao, call, groups, trained)
        return dx_Ai, None, None, None, *of_weights


def _joint_products(
    x_Ai: torch.Tensor,
    call: Linears,
    groups: Groups,
    block: torch.Tensor,
    converted: list[torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, ...]:
    y_Ao = _multiplied(x_Ai, block, groups, sum(call.outputs), not call.is_transposed, converted)
    return (y_Ao,) if len(call.outputs) == 1 else torch.split_with_sizes(y_Ao, call.outputs, 1)


def _multiplied(
    x_Ai: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
    groups: Groups,
    outputs: int,
    transposed: bool,
    converted: list[torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """`[A, outputs]`: each expert's rows, times its weight, `[out, in]` if `transposed`.

    Weights of another type than the rows are converted one at a time, which keeps them in the cache, and only those of
    experts that have rows; `converted` collects them.
    """
    counts, dtype = groups.counts or (), x_Ai.dtype
    if isinstance(weights, torch.Tensor) and weights.dtype == dtype and x_Ai.shape[0] > 0:
        block_Nio = weights.transpose(1, 2) if transposed else weights
        # oneDNN, which multiplies 16 bits, takes no block of which experts are left out.
        if groups.even is not None and (groups.even.step == 1 or dtype.itemsize > 2):
            block_Nio = block_Nio[groups.even]
            return torch.bmm(x_Ai.unflatten(0, (len(block_Nio), -1)), block_Nio).flatten(0, 1)
        if kernels.can_group(x_Ai.device, (x_Ai.shape[1], outputs), dtype):
            return F.grouped_mm(x_Ai, block_Nio, offs=groups.counted_ends_N)
    y_Ao = x_Ai.new_empty(x_Ai.shape[0], outputs)
    rows = torch.split_with_sizes(x_Ai, counts), torch.split_with_sizes(y_Ao, counts)
    read = None
    for count, weight, x, y in zip(counts, weights, *rows, strict=True):
        del read  # its memory, which is still in the cache, takes the next one
        read = weight.to(dtype) if count else None
        if converted is not None:
            converted.append(read)
        if read is not None:
            torch.mm(x, read.t() if transposed else read, out=y)
    return y_Ao


def _of_all_weights(
    x_Ai: torch.Tensor, dy_Ao: torch.Tensor, call: Linears, groups: Groups, trained: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of the experts' weights that train, in a block of memory."""
    experts = kernels.number_trained(trained, len(call.outputs))
    counts = (groups.counts or ())[:experts]
    first, second = (x_Ai, dy_Ao) if call.is_transposed else (dy_Ao, x_Ai)
    first_Ao, second_Ai = first[: sum(counts)], second[: sum(counts)]
    if groups.even is not None and min(counts) > 0 and x_Ai.dtype.itemsize == 2:
        first_NAo, second_NAi = (rows.unflatten(0, (experts, -1)) for rows in (first_Ao, second_Ai))
        block = torch.bmm(first_NAo.transpose(1, 2), second_NAi)
    else:
        block = F.grouped_mm(first_Ao.t(), second_Ai, offs=groups.counted_ends_N[:experts])
    return kernels.slices_of(block, call.outputs, call.is_transposed, trained)


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
    for part, output in enumerate(outputs):
        for expert, rows in _spans(counts, x_Ai.dtype):
            number = expert * len(outputs) + part
            weight, bias = weights[number], biases[number]
            if bias is None:
                _multiply(x_Ai[rows], weight, call, output[rows])
            else:
                torch.addmm(bias.to(x_Ai.dtype), x_Ai[rows], _out_in(weight, call).t(), out=output[rows])
    return outputs


def _spans(counts: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and the rows to multiply for each: its own and, of many in a type of 16 bits, up to
    the next multiple of 16, rows of experts behind it, which write theirs later."""
    start = 0
    for expert, count in enumerate(counts):
        more = -count % 16 if count > _MANY_ROWS and dtype.itemsize == 2 else 0
        if count:
            yield expert, slice(start, start + count + more)
        start += count


def _multiply(x_Ai: torch.Tensor, weight: torch.Tensor, call: Linears, y_Ao: torch.Tensor) -> None:
    A = x_Ai.shape[0]
    turned = x_Ai.dtype == torch.float32 and not call.is_transposed and torch.backends.mkl.is_available()
    if A > _ROWS_TURNED or not turned:
        torch.mm(x_Ai, _out_in(weight, call).t(), out=y_Ao)
        return
    both_Ai = x_Ai if A > 1 else torch.cat([x_Ai, x_Ai])  # a single row is multiplied as a vector, which is slower
    y_Ao.copy_(torch.mm(weight, both_Ai.t())[:, :A].t())


def _cast(weights: Sequence[Any], call: Linears, counts: Sequence[int], dtype: torch.dtype) -> Sequence[Any]:
    """The weights in `dtype`, of the experts that have rows."""
    if weights[0].dtype == dtype:
        return weights
    return [w.to(dtype) if counts[number // len(call.names)] else None for number, w in enumerate(weights)]


def _out_in(weight: torch.Tensor, call: Linears) -> torch.Tensor:
    return weight.t() if call.is_transposed else weight


kernels.register()
