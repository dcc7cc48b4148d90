"""Dispatch: runs the experts of one layer on the tokens that were routed to them, and adds up their outputs.

`y = sum_k weight_k * E_index_k(x)`. The sum is computed in float32, so that weights that sum to 1 leave equal experts'
output unchanged in bfloat16 too. Index N means "no expert". BLOOM's FFN takes the residual as a second argument and
adds it: with `takes_residual` it gets zeros, and the caller adds the residual once.

Experts run as the modules that they are, in one of two ways that shapes alone choose:

- `run_all`: every expert on every token, where a token takes all experts (N <= K), and for few tokens on a GPU.
  Nothing is sorted or read on the host, and expert 0 runs with the dense layer's shapes.
- `run_in_turn`: each expert on its own tokens.

Grouped products of stacked weights were slower on a GPU (docs/speed.md).

Shape suffixes as in `routing.py`.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

Experts = Sequence[nn.Module] | nn.ModuleList
FEW_ROWS, FEW_EXPERTS = 2048, 8  # rows: tokens times experts
_WORTH_COMPILING = 1 << 23  # elements; fewer take less time than the compiler
logger = logging.get_logger(__name__)


def dispatch(
    experts: Experts, x: torch.Tensor, weights_TK: torch.Tensor, index_TK: torch.Tensor | None, takes_residual: bool,
    training: bool, in_turn: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The layer's output, `[..., h] -> [T, h]`.

    Args:
        index_TK: None if every token takes all experts, in their order.
        in_turn: whether the experts run in turn where they might all run on all tokens.
    """
    (T, K), N = weights_TK.shape, len(experts)
    few = x.device.type != "cpu" and N <= FEW_EXPERTS and (torch.compiler.is_exporting() or T * N <= FEW_ROWS)
    # In a graph no shape may depend on the data.
    if is_traced(x) or (not in_turn and (N <= K or few)):
        return run_all(experts, x, weights_TK, index_TK, takes_residual)
    if index_TK is None:
        index_TK = torch.arange(N, device=x.device).expand(T, N)
    return run_in_turn(experts, x.flatten(0, -2), weights_TK, index_TK, takes_residual, training)


def is_traced(x: torch.Tensor) -> bool:
    """Whether a graph is made of the pass, or its tensors hold no values, so that the host can read none."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or type(x) is not torch.Tensor


def run_all(
    experts: Experts, x: torch.Tensor, weights_TK: torch.Tensor, index_TK: torch.Tensor | None, takes_residual: bool
) -> torch.Tensor:
    """Every expert on every token, `[..., h] -> [T, h]`."""
    outputs = [run_expert(expert, x, takes_residual).flatten(0, -2) for expert in experts]
    if index_TK is None:
        return _weighted_sum(outputs, weights_TK, all_taken=True)
    weights_TN = weights_TK.new_zeros(index_TK.shape[0], len(experts) + 1).scatter(1, index_TK, weights_TK)
    return _weighted_sum(outputs, weights_TN, all_taken=False)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of elements for large tensors on a GPU, where one kernel then does the work of many."""
    state: dict[str, Any] = {"compiled": None, "has_compiler": True}

    @wraps(function)
    def run(outputs: list[torch.Tensor], *others: Any, **options: Any) -> Any:
        is_large = outputs[0].is_cuda and outputs[0].numel() >= _WORTH_COMPILING
        if is_large and state["has_compiler"] and not torch.compiler.is_compiling():
            try:
                state["compiled"] = state["compiled"] or torch.compile(function, dynamic=True)
                return state["compiled"](outputs, *others, **options)
            except Exception as error:  # a machine without a compiler fails in many ways
                state["has_compiler"] = False
                logger.warning_once(f"torch.compile failed ({type(error).__name__}): the experts run somewhat slower.")
        return function(outputs, *others, **options)

    return run


@fused
def _weighted_sum(outputs: list[torch.Tensor], weights_TN: torch.Tensor, *, all_taken: bool) -> torch.Tensor:
    y_Th = outputs[0] * weights_TN[:, :1]
    for number, output in enumerate(outputs[1:], start=1):
        weight_T1 = weights_TN[:, number : number + 1]
        # An expert that a token does not take adds nothing, even if its output overflowed.
        taken = output if all_taken else output.masked_fill(weight_T1 == 0, 0)
        y_Th = torch.addcmul(y_Th, taken, weight_T1)
    return y_Th.to(outputs[0].dtype)


def run_in_turn(
    experts: Experts, x_Th: torch.Tensor, weights_TK: torch.Tensor, index_TK: torch.Tensor, takes_residual: bool,
    training: bool,
) -> torch.Tensor:  # fmt: skip
    """Each expert on its own tokens, `[T, h]`, which are sorted by expert once."""
    (T, K), N = index_TK.shape, len(experts)
    assigned_A = index_TK.reshape(-1)
    # The only values that the host reads; `bincount` lets it wait three times.
    counts = (assigned_A.unsqueeze(-1) == torch.arange(N + 1, device=assigned_A.device)).sum(0).tolist()
    order_A = assigned_A.argsort(stable=True)[: T * K - counts.pop()]
    token_A = order_A // K
    x_Ah, weights_A1 = x_Th.index_select(0, token_A), weights_TK.reshape(-1, 1).index_select(0, order_A)
    y_Th, dtype = None, x_Th.dtype
    for expert, x, token, weight in zip(
        experts, x_Ah.split(counts), token_A.split(counts), weights_A1.split(counts), strict=True
    ):
        if not training and not x.shape[0]:
            continue  # in training idle experts stay in the graph, so that all ranks have the same graph
        y = run_expert(expert, x, takes_residual)
        dtype, weighted = y.dtype, y * weight
        y_Th = weighted.new_zeros(x_Th.shape) if y_Th is None else y_Th
        y_Th = y_Th.index_add_(0, token, weighted)
    return torch.zeros_like(x_Th) if y_Th is None else y_Th.to(dtype)


def run_expert(expert: nn.Module, x: torch.Tensor, takes_residual: bool) -> torch.Tensor:
    """One expert's output without a residual, `[..., h] -> [..., h]`."""
    return expert(x, torch.zeros_like(x)) if takes_residual else expert(x)
