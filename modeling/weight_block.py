"""A block of memory: each of the FFN's matrices of all experts lies in one tensor `[N, out, in]`, last expert first,
and each expert's weight is its slice.

Kernels for all experts at once read the block; checkpoints, optimizers and adapters see ordinary parameters, since
every slice is a storage of its own: nothing takes them for tied weights.

Experts come last first because frozen ones come first (the original FFN, earlier expansions): their gradients are then
the end of a block of gradients, and are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch
from torch import nn

from .ffn_form import FFNForm, Linears

_DEVICES = ("cpu", "cuda")
# Blocks by the address of their first weight. A process may hold copies of this file, brought by checkpoints, but the
# operators (`grouped_kernels.register`) are those of one, and must find the blocks of all.
_BLOCKS: WeakValueDictionary[int, torch.Tensor] = vars(torch.ops.hf_moe_expand).setdefault(
    "blocks", WeakValueDictionary()
)


@dataclass(frozen=True)
class ExpertWeights:
    """The parameters of one `Linears` of all experts, last expert first.

    Attributes:
        weights: one for each expert and name; `[expert 0's gate, its up]` come last.
        biases: likewise; None without a bias.
        block: `[N, sum of out, in]` (`[N, in, out]` of `Conv1D`), of which the weights are slices; None if it is not
            laid out.
    """

    weights: tuple[nn.Parameter, ...]
    biases: tuple[nn.Parameter | None, ...]
    block: torch.Tensor | None


def laid_out(form: FFNForm, found: list[ExpertWeights]) -> list[ExpertWeights]:
    """The same weights, moved into blocks if nothing else uses their memory."""
    blocks = [block_of(one.weights) for one in found]
    if None not in blocks:
        return [replace(one, block=block) for one, block in zip(found, blocks, strict=True)]
    weights = [weight for one in found for weight in one.weights]
    is_tied = len(set(map(id, weights))) < len(weights)
    if weights[0].device.type not in _DEVICES or is_tied or not all(map(is_alone, weights)):
        return found
    with torch.inference_mode(False), torch.no_grad():
        return [_moved(call, one) for call, one in zip(form.linears, found, strict=True)]


def is_alone(weight: nn.Parameter) -> bool:
    """Whether no other tensor shares the weight's memory, such as a dense model's of which this one was made."""
    storage = weight.untyped_storage()
    # Two references: the weight's, and that of the variable above.
    alone = torch._C._storage_Use_Count(storage._cdata) == 2 and storage.nbytes() == weight.nbytes
    return alone and weight.is_contiguous() and not weight.is_shared() and not weight.is_inference()


def _moved(call: Linears, one: ExpertWeights) -> ExpertWeights:
    parts = len(call.names)
    axis = int(call.is_transposed)
    experts = [one.weights[start : start + parts] for start in range(0, len(one.weights), parts)]
    shape = list(call.shape(0))
    shape[axis] = sum(call.outputs)
    block = one.weights[0].new_empty(len(experts), *shape)
    for slices, weights in zip(block, experts, strict=True):
        for part, weight in zip(slices.split(call.outputs, axis), weights, strict=True):
            part.copy_(weight)
            weight.data = torch.from_dlpack(part)  # a storage of its own, in the same memory
    _BLOCKS[block.data_ptr()] = block
    return ExpertWeights(one.weights, one.biases, block)


def block_of(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The block of which `weights` are the slices, in order; None if there is none."""
    block = _BLOCKS.get(weights[0].data_ptr())
    if block is None or block.dtype != weights[0].dtype or block.device != weights[0].device:
        return None
    address = block.data_ptr()
    for weight in weights:
        if weight.data_ptr() != address or not weight.is_contiguous():
            return None
        address += weight.nbytes
    return block if address == block.data_ptr() + block.nbytes else None
