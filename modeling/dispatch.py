"""Dispatch: runs the experts of one layer on the tokens that were routed to them, and adds up their outputs.

`y = sum_k weight_k * E_index_k(x)`. The sum is computed in float32, so that weights that sum to 1 leave equal experts'
output unchanged in bfloat16 too. Index N means "no expert". BLOOM's FFN takes the residual as a second argument and
adds it: with `takes_residual` it gets zeros, and the caller adds the residual once.

There are two ways. `grouped_mm` and `batched_mm` run all experts together (`grouped_experts.py`); `eager` runs one
after the other as the modules that they are, which is right for every FFN and everything that may have changed it.

Shape suffixes as in `routing.py`.
"""

import torch
from torch import nn
from torch.autograd import forward_ad
from transformers.utils import logging

from .expert_block import ExpertBlock
from .grouped_experts import knows_routing, run_grouped
from .grouped_kernels import has_grouped_mm

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
_FEW_ASSIGNMENTS = 128
_FEW_ROWS = 16
logger = logging.get_logger(__name__)


def dispatch(
    experts: nn.ModuleList,
    x_Th: torch.Tensor,
    weights_TK: torch.Tensor,
    index_TK: torch.Tensor,
    takes_residual: bool,
    training: bool,
    block: ExpertBlock | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """The layer's output, `[T, h]`.

    Args:
        block: finds the experts' weights, to run them together; None runs them as modules.
        implementation: one of `IMPLEMENTATIONS`; None chooses by the number of tokens.
    """
    form = None if block is None or takes_residual else block.forms[training]
    if implementation is None and _is_faster_apart(x_Th, index_TK, len(experts)):
        form = None
    if form is not None and implementation != "eager" and not _has_transforms():
        found = block.weights(experts, form, x_Th)  # type: ignore[union-attr]
        if found is not None and _fits(x_Th, found[0].weights[0]):
            batched = _is_batched(implementation, x_Th, index_TK, len(experts))
            if batched or has_grouped_mm(x_Th.device, form.linears, found[0].weights[0].dtype):
                return run_grouped(form, experts[0], found, x_Th, weights_TK, index_TK, len(experts), batched)
            if implementation is not None:
                logger.warning_once(
                    f"experts_implementation {implementation!r}: torch {torch.__version__} has no grouped_mm for these "
                    f"experts on {x_Th.device.type}; they run as with 'eager'."
                )
    if torch.compiler.is_compiling():
        return dispatch_to_all(experts, x_Th, weights_TK, index_TK, takes_residual)
    if _is_one_token(x_Th, training):
        return dispatch_one_token(experts, x_Th, weights_TK, index_TK, takes_residual)
    return dispatch_sorted(experts, x_Th, weights_TK, index_TK, takes_residual, training)


def _has_transforms() -> bool:
    """Whether derivatives are taken forward or by `torch.func`, which the joint products do not know."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _is_one_token(x_Th: torch.Tensor, training: bool) -> bool:
    """Whether this is a step of decoding whose routing the host reads at no cost."""
    return not training and knows_routing(x_Th) and x_Th.shape[0] == 1


def _is_faster_apart(x_Th: torch.Tensor, index_TK: torch.Tensor, num_experts: int) -> bool:
    """Whether experts on a CPU run faster as modules, as measured for few tokens (docs/speed.md): in a type of 16 bits
    those of a single token, without gradients, which need no sorting; in float32 those that have many rows. Under
    autocast modules would convert gate and up apart."""
    T, K = index_TK.shape
    if not knows_routing(x_Th) or T * K > _FEW_ASSIGNMENTS or torch.is_autocast_enabled(x_Th.device.type):
        return False
    if T == 1:
        return K == 1 or (x_Th.dtype.itemsize == 2 and not torch.is_grad_enabled())
    rows = T if num_experts == K else 2 * T * K / num_experts  # of an expert; about twice the mean at most
    return x_Th.dtype.itemsize > 2 and rows > _FEW_ROWS


def _fits(x_Th: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the products need no conversion but autocast's."""
    same = x_Th.dtype == weight.dtype or torch.is_autocast_enabled(x_Th.device.type)
    return same and x_Th.device == weight.device


def _is_batched(implementation: str | None, x_Th: torch.Tensor, index_TK: torch.Tensor, num_experts: int) -> bool:
    """Whether each assignment reads a copy of its expert's weights: by default not on a CPU, and elsewhere while the
    copies are no more than the experts, as in decoding, for which transformers changes to `batched_mm` too."""
    if implementation is None:
        return x_Th.device.type != "cpu" and index_TK.numel() <= num_experts
    return implementation == "batched_mm"


def dispatch_sorted(
    experts: nn.ModuleList,
    x_Th: torch.Tensor,
    weights_TK: torch.Tensor,
    index_TK: torch.Tensor,
    takes_residual: bool,
    training: bool,
) -> torch.Tensor:
    """Sorts tokens by expert, splits them once, runs the experts, and restores the order."""
    T, K = index_TK.shape
    assigned_A = index_TK.reshape(-1)
    order_A = assigned_A.argsort(stable=True)
    counts = assigned_A.bincount(minlength=len(experts) + 1).tolist()
    unassigned = counts.pop()
    # `index_select`: on a CPU the gradient of `x[index]` is many times slower.
    inputs = x_Th.index_select(0, order_A[: T * K - unassigned] // K).split(counts)
    # In training idle experts run on empty batches: they stay in the graph, so that all ranks have the same graph.
    outputs = [
        run_expert(expert, x, takes_residual)
        for expert, x in zip(experts, inputs, strict=True)
        if training or x.shape[0]
    ]
    if unassigned:
        outputs.append(outputs[0].new_zeros(unassigned, x_Th.shape[-1]))
    sorted_Ah = torch.cat(outputs)
    place_A = torch.empty_like(order_A).scatter_(0, order_A, torch.arange(T * K, device=order_A.device))
    y_TKh = sorted_Ah.index_select(0, place_A).view(T, K, -1)
    with torch.autocast(x_Th.device.type, enabled=False):
        y_T1h = torch.bmm(weights_TK.unsqueeze(1), y_TKh.float())
    return y_T1h.squeeze(1).to(sorted_Ah.dtype)


def dispatch_one_token(
    experts: nn.ModuleList,
    x_1h: torch.Tensor,
    weights_1K: torch.Tensor,
    index_1K: torch.Tensor,
    takes_residual: bool,
) -> torch.Tensor:
    """Runs the experts of a single token, as in decoding, without sorting."""
    outputs = [
        (k, run_expert(experts[e], x_1h, takes_residual))
        for k, e in enumerate(index_1K[0].tolist())
        if e < len(experts)
    ]
    y_1h = torch.stack([y.float() * weights_1K[:, k : k + 1] for k, y in outputs]).sum(0)
    return y_1h.to(outputs[0][1].dtype)


def dispatch_to_all(
    experts: nn.ModuleList,
    x_Th: torch.Tensor,
    weights_TK: torch.Tensor,
    index_TK: torch.Tensor,
    takes_residual: bool,
) -> torch.Tensor:
    """For `torch.compile` and `torch.export` of experts that run as modules: every expert runs on every token, so that
    no shape depends on the data. Costs N FFNs for each token instead of K."""
    N = len(experts)
    weights_TN = weights_TK.new_zeros(x_Th.shape[0], N + 1).scatter(1, index_TK, weights_TK)
    outputs = [run_expert(expert, x_Th, takes_residual) for expert in experts]
    y_Th = sum(y.float() * w_T1 for y, w_T1 in zip(outputs, weights_TN[:, :N].split(1, 1), strict=True))
    return y_Th.to(outputs[0].dtype)


def run_alone(
    experts: nn.ModuleList, number: int, hidden_states: torch.Tensor, residual: torch.Tensor | None, training: bool
) -> torch.Tensor:
    """One expert on all tokens, `[..., h] -> [..., h]`, called as the dense layer calls its FFN, so that the output is
    the same bit for bit. The output includes the residual, if the FFN takes one."""
    y = experts[number](hidden_states, *(() if residual is None else (residual,)))
    if training:  # the other experts stay in the graph, as in `dispatch_sorted`
        nothing_0h = hidden_states.flatten(0, -2)[:0]
        idle = [run_expert(other, nothing_0h, residual is not None) for other in experts]
        y = torch.cat([y.flatten(0, -2), *idle]).view(y.shape)
    return y


def run_expert(expert: nn.Module, x_Th: torch.Tensor, takes_residual: bool) -> torch.Tensor:
    """One expert's output without a residual, `[T, h]`."""
    return expert(x_Th, torch.zeros_like(x_Th)) if takes_residual else expert(x_Th)
