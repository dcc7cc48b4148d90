"""The operators of grouped linear layers: torch sees each as one call, whose shapes do not depend on the routing.

`torch.compile` and `torch.export` put them into their graphs as they are, with the experts' own weights as inputs, so
that an exported program holds each weight once. Weights that lie in a block are read there.

Shape suffixes as in `grouped_linear.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .ffn_form import Linears
from .weight_block import block_of


def has_grouped_mm(device: torch.device, linears: Sequence[Linears], dtype: torch.dtype) -> bool:
    """Whether a device multiplies groups of rows by these layers' weights without a value on the host; a CPU needs no
    such call."""
    return device.type == "cpu" or all(can_group(device, (call.inputs, *call.outputs), dtype) for call in linears)


def can_group(device: torch.device, sizes: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether torch's `grouped_mm` takes weights of these sizes, whose rows must be multiples of 16 bytes, under
    autocast too."""
    if not hasattr(F, "grouped_mm") or dtype == torch.float64 or any(size % 8 for size in sizes):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def grouped_linear(
    x_Ai: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ends_N: torch.Tensor,
    place_A: torch.Tensor,
    outputs: Sequence[int],
    batched: bool,
    transposed: bool,
) -> torch.Tensor:
    """`[A, sum of outputs]`; zero in the rows behind the last expert's.

    Args:
        weights: of each expert, those of its layers, whose sizes are `outputs`.
        transposed: whether they are `[in, out]`.
    """
    block_Nio = _block(weights, len(outputs), transposed, x_Ai.dtype)
    block_Nio = block_Nio if transposed else block_Nio.transpose(1, 2)
    return _multiplied(x_Ai, block_Nio, ends_N, place_A, batched)


def grouped_linear_input(
    dy_Ao: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ends_N: torch.Tensor,
    place_A: torch.Tensor,
    parts: int,
    batched: bool,
    transposed: bool,
) -> torch.Tensor:
    """`[A, in]`: the gradient of `grouped_linear`'s input."""
    block = _block(weights, parts, transposed, dy_Ao.dtype)
    return _multiplied(dy_Ao, block.transpose(1, 2) if transposed else block, ends_N, place_A, batched)


def grouped_linear_weight(
    x_Ai: torch.Tensor, dy_Ao: torch.Tensor, ends_N: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """`[N, out, in]`, or `[N, in, out]` if `transposed`: the gradient of the weights of the experts in `ends_N`."""
    first, second = (x_Ai, dy_Ao) if transposed else (dy_Ao, x_Ai)
    if x_Ai.device.type == "cpu":
        grad = x_Ai.new_zeros(len(ends_N), first.shape[1], second.shape[1])
        for number, (start, end) in enumerate(_spans(ends_N)):
            torch.mm(first[start:end].t(), second[start:end], out=grad[number])
        return grad
    if can_group(x_Ai.device, (first.shape[1], second.shape[1]), x_Ai.dtype):
        return F.grouped_mm(first.t(), second, offs=ends_N)
    return _products_of_all_rows(first, second, ends_N)


def _products_of_all_rows(first_Ao: torch.Tensor, second_Ai: torch.Tensor, ends_N: torch.Tensor) -> torch.Tensor:
    """`[N, out, in]`, where torch has no `grouped_mm`: for each expert all rows, those of others as zeros. That is few
    rows, multiplied by copies of the weights."""
    rows_A = torch.arange(first_Ao.shape[0], dtype=ends_N.dtype, device=ends_N.device)
    expert_A1 = torch.searchsorted(ends_N, rows_A, right=True).unsqueeze(1)
    return torch.stack([
        first_Ao.masked_fill(expert_A1 != number, 0).t() @ second_Ai for number in range(len(ends_N))
    ])  # fmt: skip


def _multiplied(
    x_Ai: torch.Tensor, block_Nio: torch.Tensor, ends_N: torch.Tensor, place_A: torch.Tensor, batched: bool
) -> torch.Tensor:
    if batched:
        chosen_Aio = block_Nio.index_select(0, place_A.clamp(max=len(block_Nio) - 1))
        y_Ao = torch.bmm(x_Ai.unsqueeze(1), chosen_Aio).squeeze(1)
    elif x_Ai.device.type == "cpu":
        y_Ao = x_Ai.new_zeros(x_Ai.shape[0], block_Nio.shape[2])
        for number, (start, end) in enumerate(_spans(ends_N)):
            torch.mm(x_Ai[start:end], block_Nio[number], out=y_Ao[start:end])
        return y_Ao
    else:
        y_Ao = F.grouped_mm(x_Ai, block_Nio, offs=ends_N)
    return y_Ao.masked_fill_((place_A == len(block_Nio)).unsqueeze(-1), 0)


def _spans(ends_N: torch.Tensor) -> list[tuple[int, int]]:
    ends = ends_N.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _block(weights: Sequence[torch.Tensor], parts: int, transposed: bool, dtype: torch.dtype) -> torch.Tensor:
    """`[N, out, in]`, or `[N, in, out]` if `transposed`."""
    block = block_of(weights)
    if block is None:
        experts = [weights[start : start + parts] for start in range(0, len(weights), parts)]
        block = torch.stack([torch.cat(list(one), dim=int(transposed)) for one in experts])
    return block.to(dtype)


def _setup(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x_Ai, weights, ends_N, place_A, outputs, batched, transposed = inputs
    trained = [weight.requires_grad for weight in weights]
    ctx.trained = trained
    ctx.save_for_backward(x_Ai if any(trained) else None, ends_N, place_A, *weights)
    ctx.outputs, ctx.batched, ctx.transposed = outputs, batched, transposed


def _backward(ctx: Any, dy_Ao: torch.Tensor) -> tuple:
    x_Ai, ends_N, place_A, *weights = ctx.saved_tensors
    outputs, trained = ctx.outputs, ctx.trained
    parts, ops = len(outputs), torch.ops.hf_moe_expand
    dy_Ao = dy_Ao.contiguous()
    dx_Ai = None
    if ctx.needs_input_grad[0]:
        dx_Ai = ops.grouped_linear_input(dy_Ao, weights, ends_N, place_A, parts, ctx.batched, ctx.transposed)
    grads: list[torch.Tensor | None] = [None] * len(weights)
    if any(trained):
        experts = number_trained(trained, parts)
        found = ops.grouped_linear_weight(x_Ai, dy_Ao, ends_N[:experts], ctx.transposed)
        slices = slices_of(found, outputs, ctx.transposed, trained)
        grads = [s if s is None else s.to(weight.dtype) for s, weight in zip(slices, weights, strict=True)]
    return dx_Ai, grads, None, None, None, None, None


def number_trained(trained: Sequence[bool], parts: int) -> int:
    """The number of experts up to the last one of which a weight trains. Frozen experts come last: neither time nor
    memory goes into their gradients."""
    return max(number for number, wanted in enumerate(trained) if wanted) // parts + 1


def slices_of(
    block: torch.Tensor, outputs: Sequence[int], transposed: bool, trained: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The slice of each weight that trains, of a block of the first experts; None for the others."""
    found: list[torch.Tensor | None] = [None] * len(trained)
    for expert, of_expert in enumerate(block):
        for part, one in enumerate(of_expert.split(list(outputs), dim=int(transposed))):
            number = expert * len(outputs) + part
            found[number] = one if trained[number] else None
    return found


def register() -> None:
    """Makes the operators known to torch, once in a process: a checkpoint may bring a copy of this file."""
    if hasattr(torch.ops.hf_moe_expand, "grouped_linear"):
        return
    schemas: dict[Any, tuple[str, Any]] = {
        grouped_linear: (
            "(Tensor x, Tensor[] weights, Tensor ends, Tensor place, int[] outputs, bool batched, bool transposed)"
            " -> Tensor",
            lambda x, weights, ends, place, outputs, batched, transposed: x.new_empty(x.shape[0], sum(outputs)),
        ),
        grouped_linear_input: (
            "(Tensor dy, Tensor[] weights, Tensor ends, Tensor place, int parts, bool batched, bool transposed)"
            " -> Tensor",
            lambda dy, weights, ends, place, parts, batched, transposed: dy.new_empty(
                dy.shape[0], weights[0].shape[0 if transposed else 1]
            ),
        ),
        grouped_linear_weight: (
            "(Tensor x, Tensor dy, Tensor ends, bool transposed) -> Tensor",
            lambda x, dy, ends, transposed: x.new_empty(
                ends.shape[0], *((x.shape[1], dy.shape[1]) if transposed else (dy.shape[1], x.shape[1]))
            ),
        ),
    }
    for function, (schema, fake) in schemas.items():
        name = f"hf_moe_expand::{function.__name__}"
        torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        torch.library.register_fake(name, fake)
    torch.library.register_autograd("hf_moe_expand::grouped_linear", _backward, setup_context=_setup)
