"""Runs plain FFNs of all experts in grouped products, on tokens that are sorted by expert.

Plain FFNs are `down(act(gate(x)) * up(x))` or `down(act(up(x)))`. Whether an FFN is plain, and which of its layers is
which, no list of names says: its own code, run once with small random layers in place of its own, computes the form or
another one.

Shape suffixes as in `routing.py`; the A assignments are sorted, those without an expert (index N) last. Experts stand
in the order of their places, last expert first: the first experts are the frozen ones, and the product of gradients
ends before them. A layer `[o, i]` with a bias is a matrix `[o, i + 8]`, whose inputs end with 1 and seven zeros, since
torch groups products of rows of 16 bytes.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from .experts import shared_config

Experts = Sequence[nn.Module] | nn.ModuleList
_WORTH_COMPILING = 1 << 23  # elements; fewer take less time than the compiler
logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class PlainFFN:
    """The form of a plain FFN.

    Attributes:
        kind: class of its linear layers, `nn.Linear` or `Conv1D`.
        first: names of `gate` and `up`, of one layer with the outputs of both, or of `up`.
        last: name of `down`.
        activation: name of `act`.
        gated: whether there is a gate.
    """

    kind: type[Any]
    first: tuple[str, ...]
    last: str
    activation: str
    gated: bool

    def layers(self, expert: nn.Module) -> list[Any]:
        """The linear layers of an expert, `down` last."""
        return [expert.get_submodule(name) for name in (*self.first, self.last)]

    def inner(self, activation: Any, hidden_AF: torch.Tensor) -> torch.Tensor:
        """The input of `down`, `[A, f]`, from the outputs of the layers before it."""
        if not self.gated:
            return activation(hidden_AF)
        gate_Af, up_Af = hidden_AF.chunk(2, -1)
        return activation(gate_Af) * up_Af


def plain_form(ffn: nn.Module) -> PlainFFN | None:
    """The form that an FFN computes, in training too; None if it is not plain."""
    layers: Any = {name: layer for name, layer in ffn.named_modules() if type(layer) in (nn.Linear, Conv1D)}
    kinds = {type(layer) for layer in layers.values()}
    owned = {f"{name}.{kind}" for name, layer in layers.items() for kind, _ in layer.named_parameters()}
    if len(layers) not in (2, 3) or len(kinds) != 1 or owned != {name for name, _ in ffn.named_parameters()}:
        return None
    activations = [n for n, value in {**vars(ffn), **ffn._modules}.items() if callable(value) and n not in layers]
    for *first, last in permutations(layers):
        for activation in activations:
            for gated in (True, False):
                form = PlainFFN(next(iter(kinds)), tuple(first), last, activation, gated)
                if (gated or len(first) == 1) and _computes(ffn, form):
                    return form
    return None


def _computes(ffn: nn.Module, form: PlainFFN) -> bool:
    draw = torch.Generator().manual_seed(0)
    hidden, inner = 6, 10
    outputs = 2 * inner if form.gated and len(form.first) == 1 else inner
    small = [*(_Small(hidden, outputs, draw) for _ in form.first), _Small(inner, hidden, draw)]
    replaced: dict[int, Any] = {id(layer): other for layer, other in zip(form.layers(ffn), small, strict=True)}
    x = torch.randn(5, hidden, generator=draw, dtype=torch.float64, device="cpu")
    try:
        actual = copy.deepcopy(ffn, replaced | shared_config(ffn)).train()(x)
        activation = getattr(ffn, form.activation)
        expected = small[-1](form.inner(activation, torch.cat([layer(x) for layer in small[:-1]], -1)))
        return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-9, atol=1e-12)
    except Exception:  # code of another form fails in many ways
        return False


class _Small(nn.Module):
    """A linear layer whose weights are no parameters, since the library may create those on another device."""

    def __init__(self, inputs: int, outputs: int, draw: torch.Generator) -> None:
        super().__init__()
        self.weight = torch.randn(outputs, inputs, generator=draw, dtype=torch.float64, device="cpu")
        self.bias = torch.randn(outputs, generator=draw, dtype=torch.float64, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of elements for large tensors on a GPU, where one kernel then does the work of many."""
    state: dict[str, Any] = {"compiled": None, "has_compiler": True}

    @wraps(function)
    def run(first: Any, *others: Any) -> Any:
        large = first[0] if isinstance(first, list) else first
        is_large = large.is_cuda and large.numel() >= _WORTH_COMPILING
        if is_large and state["has_compiler"] and not torch.compiler.is_compiling():
            try:
                state["compiled"] = state["compiled"] or torch.compile(function, dynamic=True)
                return state["compiled"](first, *others)
            except Exception as error:  # a machine without a compiler fails in many ways
                state["has_compiler"] = False
                logger.warning_once(f"torch.compile failed ({type(error).__name__}): the experts run somewhat slower.")
        return function(first, *others)

    return run


def has_kernel(x: torch.Tensor) -> bool:
    """Whether torch groups products of such inputs in a kernel, not in a loop that reads values on the host."""
    capable = x.is_cuda and torch.cuda.get_device_capability(x.device) in ((9, 0), (10, 0))
    return capable and torch.version.hip is None and _computed_dtype(x) == torch.bfloat16


def can_group(form: PlainFFN, experts: Experts, x: torch.Tensor) -> bool:
    """Whether torch groups products of these sizes and types, and nothing (an adapter, a quantised layer, a hook)
    stands in a layer's place."""
    layers: list[Any] = [layer for expert in experts for layer in form.layers(expert)]
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in (*experts, *layers))
    if hooked or set(map(type, layers)) != {form.kind} or not hasattr(F, "grouped_mm"):
        return False
    weights, dtype = [layer.weight for layer in layers], _computed_dtype(x)
    converts = torch.is_autocast_enabled(x.device.type)
    fits = all(w.device == x.device and (converts or w.dtype == dtype) for w in weights)
    fits = fits and len({tuple(layer.weight.shape for layer in form.layers(expert)) for expert in experts}) == 1
    return fits and dtype != torch.float64 and all(size % 8 == 0 for weight in weights for size in weight.shape)


def run_grouped(
    form: PlainFFN, experts: Experts, x_Th: torch.Tensor, weights_TK: torch.Tensor, index_TK: torch.Tensor
) -> torch.Tensor:
    """The layer's output, `[T, h]`."""
    activation, dtype = getattr(experts[0], form.activation), _computed_dtype(x_Th)
    parameters = [p for one in reversed(experts) for layer in form.layers(one) for p in (layer.weight, layer.bias)]
    with torch.autocast(x_Th.device.type, enabled=False):
        return _GroupedExperts.apply(x_Th, weights_TK, index_TK, form, activation, dtype, *parameters)


def _computed_dtype(x: torch.Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class _GroupedExperts(torch.autograd.Function):
    """`y = sum_k weight_k E_index_k(x)`. What a grouped product leaves unwritten, the rows without an expert and the
    gradients of an expert without rows, becomes zero where it is read."""

    @staticmethod
    def forward(
        ctx: Any, x_Th: torch.Tensor, weights_TK: torch.Tensor, index_TK: torch.Tensor, form: PlainFFN,
        activation: Any, dtype: torch.dtype, *parameters: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        N = len(parameters) // (2 * len(form.first) + 2)
        place_A = ((N - 1 - index_TK) % (N + 1)).reshape(-1)
        sorted_A, order_A = place_A.sort(stable=True)
        ends_N = torch.searchsorted(sorted_A, torch.arange(N, device=x_Th.device), right=True).to(torch.int32)
        rows = torch.arange(order_A.numel(), device=x_Th.device)
        row_TK = torch.empty_like(order_A).scatter_(0, order_A, rows).view(index_TK.shape)
        into_NFi, out_Nhj = _matrices(form, parameters, N, dtype)
        x_Ai = _inputs(x_Th.to(dtype).index_select(0, order_A // index_TK.shape[1]), into_NFi)
        hidden_AF = F.grouped_mm(x_Ai, into_NFi.transpose(1, 2), offs=ends_N)
        product_Aj = _inner(hidden_AF, form, activation, out_Nhj)
        y_Ah = F.grouped_mm(product_Aj, out_Nhj.transpose(1, 2), offs=ends_N)
        ctx.form, ctx.activation, ctx.dtype = form, activation, dtype
        ctx.save_for_backward(x_Th, weights_TK, order_A, row_TK, ends_N, hidden_AF, index_TK < N, *parameters)
        return _sum_of_rows(y_Ah, row_TK, weights_TK, index_TK < N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_Th: torch.Tensor) -> Any:
        x_Th, weights_TK, order_A, row_TK, ends_N, hidden_AF, has_expert_TK, *parameters = ctx.saved_tensors
        form, dtype, N, token_A = ctx.form, ctx.dtype, ends_N.numel(), order_A // weights_TK.shape[1]
        into_NFi, out_Nhj = _matrices(form, parameters, N, dtype)
        dy_Ah = dy_Th.to(dtype).index_select(0, token_A)
        d_product_Aj = F.grouped_mm(dy_Ah, out_Nhj, offs=ends_N)
        weights_A1, has_expert_A1 = (of.reshape(-1, 1).index_select(0, order_A) for of in (weights_TK, has_expert_TK))
        d_hidden_AF, weighted_Aj, d_weights_A = _inner_backward(
            hidden_AF, form, ctx.activation, out_Nhj, d_product_Aj, weights_A1, has_expert_A1
        )
        dx_Th = None
        if ctx.needs_input_grad[0]:
            dx_Ai = F.grouped_mm(d_hidden_AF, into_NFi, offs=ends_N)
            dx_Th = _sum_of_rows(dx_Ai, row_TK, torch.ones_like(weights_TK), has_expert_TK)[:, : x_Th.shape[1]]
        wanted, each = ctx.needs_input_grad[6:], len(parameters) // N
        n = max([0, *(number // each + 1 for number, one in enumerate(wanted) if one)])
        d_parameters: list[torch.Tensor | None] = []
        if n:
            x_Ai, ends_n = _inputs(x_Th.to(dtype).index_select(0, token_A), into_NFi), ends_N[:n]
            empty_n11 = (ends_n.diff(prepend=ends_n.new_zeros(1)) == 0).view(n, 1, 1)
            d_into_nFi = F.grouped_mm(d_hidden_AF.t(), x_Ai, offs=ends_n).masked_fill_(empty_n11, 0)
            d_out_nhj = F.grouped_mm(dy_Ah.t(), weighted_Aj, offs=ends_n).masked_fill_(empty_n11, 0)
            for d_into_Fi, d_out_hj in zip(d_into_nFi, d_out_nhj, strict=True):
                for matrix in (*d_into_Fi.chunk(len(form.first)), d_out_hj):
                    bias = parameters[len(d_parameters) + 1]
                    d_weight = matrix if bias is None else matrix[:, :-8]
                    d_parameters.append(d_weight.t() if form.kind is Conv1D else d_weight)
                    d_parameters.append(None if bias is None else matrix[:, -8])
        d_parameters += [None] * (len(parameters) - len(d_parameters))
        grads = [d if needed else None for d, needed in zip(d_parameters, wanted, strict=True)]
        return dx_Th, d_weights_A[row_TK], None, None, None, None, *grads


def _matrices(form: PlainFFN, parameters: Sequence[Any], N: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """`[N, F, i]` of the experts' first layers, and `[N, h, j]` of their last."""
    each, last = len(parameters) // N, 2 * len(form.first)

    def matrix(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight_oi = (weight.t() if form.kind is Conv1D else weight).to(dtype)
        return weight_oi if bias is None else torch.cat([weight_oi, F.pad(bias.to(dtype).unsqueeze(1), (0, 7))], 1)

    def layers(start: int, end: int) -> torch.Tensor:
        return torch.cat([matrix(*parameters[number : number + 2]) for number in range(start, end, 2)])

    starts = range(0, len(parameters), each)
    return [torch.stack([layers(start + a, start + b) for start in starts]) for a, b in ((0, last), (last, each))]


def _inputs(x_Ai: torch.Tensor, matrices_Noi: torch.Tensor) -> torch.Tensor:
    """`x_Ai` itself, or followed by the constants that a bias is multiplied by."""
    if x_Ai.shape[1] == matrices_Noi.shape[2]:
        return x_Ai
    one_A8 = F.pad(torch.ones_like(x_Ai[:, :1]), (0, 7))
    return torch.cat([x_Ai, one_A8], 1)


@fused
def _inner(hidden_AF: torch.Tensor, form: PlainFFN, activation: Any, out_Nhj: torch.Tensor) -> torch.Tensor:
    return _inputs(form.inner(activation, hidden_AF), out_Nhj)


@fused
def _inner_backward(
    hidden_AF: torch.Tensor, form: PlainFFN, activation: Any, out_Nhj: torch.Tensor, d_product_Aj: torch.Tensor,
    weights_A1: torch.Tensor, has_expert_A1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradient of `hidden_AF`, the weighted inputs of the last layer for the gradient of its matrix, and the
    gradient of the weights."""
    hidden_AF, d_product_Aj = (torch.where(has_expert_A1, one, 0) for one in (hidden_AF, d_product_Aj))
    inner: Any = torch.func.vjp(lambda hidden: _inputs(form.inner(activation, hidden), out_Nhj), hidden_AF)
    product_Aj, pull_back = inner
    (d_hidden_AF,) = pull_back((d_product_Aj * weights_A1).to(product_Aj.dtype))
    weighted_Aj = torch.where(has_expert_A1, product_Aj * weights_A1, 0).to(product_Aj.dtype)
    return d_hidden_AF, weighted_Aj, (product_Aj * d_product_Aj.to(weights_A1.dtype)).sum(-1)


@fused
def _sum_of_rows(
    y_Ah: torch.Tensor, row_TK: torch.Tensor, weights_TK: torch.Tensor, has_expert_TK: torch.Tensor
) -> torch.Tensor:
    y_TKh = y_Ah.index_select(0, row_TK.reshape(-1)).view(*row_TK.shape, -1) * weights_TK.unsqueeze(-1)
    return torch.where(has_expert_TK.unsqueeze(-1), y_TKh, 0).sum(1).to(y_Ah.dtype)
