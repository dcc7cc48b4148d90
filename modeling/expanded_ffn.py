"""The mathematics of one expanded layer: router, classifier, dispatch.

Shape suffixes: T tokens of the batch, h hidden size, N experts of this layer, K active experts, A = T * K
assignments of a token to an expert, C classes of the classifier (0 = old languages).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init


@dataclass
class LayerRouting:
    """What one expanded layer decided in one forward pass, in the order of the flattened batch.

    Attributes:
        router_logits: `[T, N]` float32; the router scores G are their softmax.
        classifier_logits: `[T, C]` float32, or None in a layer without a classifier.
        top_k: active experts a token, at most N.
    """

    router_logits: torch.Tensor
    classifier_logits: torch.Tensor | None
    top_k: int


@dataclass
class Routing:
    """Routing of one forward pass: `layers[layer_index]` is that layer's `LayerRouting`."""

    layers: dict[int, LayerRouting] = field(default_factory=dict)

    def __iter__(self) -> Iterator[LayerRouting]:
        return (self.layers[layer] for layer in sorted(self.layers))

    def __len__(self) -> int:
        return len(self.layers)


class RoutingControl:
    """Shared by all expanded FFNs of one model: where routing is recorded, and an override of the router.

    A plain object instead of hooks: it sees every forward pass, whoever calls it, and recomputation under gradient
    checkpointing (outside the capture) records nothing twice.
    """

    def __init__(self) -> None:
        self.capture: Routing | None = None
        self.forced_expert: int | None = None
        self.expansion: int | None = None
        # For analyses: router logits `[T, N]` and K in, the logits to route by out; classifiers then have no say.
        self.change_logits: Callable[[torch.Tensor, int], torch.Tensor] | None = None

    def __deepcopy__(self, memo: dict) -> "RoutingControl":
        memo[id(self)] = new = RoutingControl()
        return new

    def __reduce__(self) -> tuple:
        return RoutingControl, ()


class _Scores(nn.Module):
    """A bias-free linear map that always computes in float32, under autocast too.

    Not an `nn.Linear`, so that quantisation and "all linear layers" adapters leave it alone.
    """

    def __init__(self, hidden_size: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, hidden_size))

    def forward(self, x_Th: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x_Th.device.type, enabled=False):
            return F.linear(x_Th.float(), self.weight.float())


class Router(_Scores):
    """`x W_r`, `[T, h] -> [T, N]`."""


class Classifier(_Scores):
    """`x W_c`, `[T, h] -> [T, C]`. Starts at zero: on a tie the decision is the router's, so an untrained
    classifier changes nothing."""


def init_router(weight_Nh: torch.Tensor, generator: torch.Generator | None = None) -> None:
    """Xavier normal, as MoE-LPR. A zero router would be a trap: all ties, every token to the same experts."""
    init.xavier_normal_(weight_Nh, generator=generator)


def select_experts(
    logits_TN: torch.Tensor, top_k: int, limit_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The K experts with the highest scores and their weights (MoE-LPR Eq. 1-3, LayerMoE Eq. 1-3).

    Args:
        logits_TN: router logits, float32.
        top_k: K; all experts where the layer has fewer.
        limit_T: token t may use its first `limit_T[t]` experts only (LayerMoE Eq. 13: 1 sends it to expert 0 alone).

    Returns:
        weights `[T, K]`, summing to 1, and expert indices `[T, K]`. An assignment beyond a token's limit has weight 0
        and the index N, which `dispatch` drops: it costs nothing. At K = 1 the weight's value is 1 and its gradient
        that of `log G`, so that the router still learns from the language loss.
    """
    N = logits_TN.shape[-1]
    if limit_T is not None:
        hidden_TN = torch.arange(N, device=logits_TN.device) >= limit_T.unsqueeze(-1)
        logits_TN = logits_TN.masked_fill(hidden_TN, float("-inf"))
    top_TK, index_TK = logits_TN.softmax(-1).topk(min(top_k, N), dim=-1)
    norm = top_TK.detach() if top_TK.shape[-1] == 1 else top_TK.sum(-1, keepdim=True)
    if limit_T is not None:
        index_TK = index_TK.masked_fill(index_TK >= limit_T.unsqueeze(-1), N)
    return top_TK / norm, index_TK


def experts_allowed(classifier_logits_TC: torch.Tensor, experts_of_class: Sequence[int]) -> torch.Tensor:
    """How many experts each token may use, by its class, `[T]` (LayerMoE Eq. 13).

    Class 0 (the base model's languages) may use expert 0 alone, class g those that existed after expansion g, the last
    class all. A tie goes to the later class.
    """
    best_TC = classifier_logits_TC == classifier_logits_TC.amax(-1, keepdim=True)
    numbers_C = torch.arange(best_TC.shape[-1], device=best_TC.device)
    class_T = (best_TC * numbers_C).amax(-1)
    limit_T = torch.full_like(class_T, experts_of_class[-1])
    for number, count in enumerate(experts_of_class[:-1]):
        limit_T = limit_T.masked_fill(class_T == number, count)
    return limit_T


def copy_ffn(ffn: nn.Module) -> nn.Module:
    """A copy of a backbone's FFN that shares its configuration."""
    # A later switch of the attention implementation must reach all copies.
    memo: dict[int, Any] = {id(value): value for value in vars(ffn).values() if isinstance(value, PreTrainedConfig)}
    # While DeepSpeed's ZeRO-3 loads a model, a parameter is an empty shell (`ds_shape` tells its shape) that
    # `copy.deepcopy` makes nothing of. Copies are made whole, their values to be loaded later, and handed to ZeRO-3.
    shells: list[Any] = [parameter for parameter in ffn.parameters() if hasattr(parameter, "ds_shape")]
    for shell in shells:
        memo[id(shell)] = nn.Parameter(torch.empty(shell.ds_shape, dtype=shell.dtype, device=shell.device))
    copied = copy.deepcopy(ffn, memo)
    if shells:
        shells[0].convert_to_zero_parameters(param_list=[memo[id(shell)] for shell in shells])
    return copied


class ExpandedFFN(nn.Module):
    """A layer's FFN grown into N experts (`experts[0]` is the original), a router and, optionally, a classifier.

    Args:
        ffn: the backbone's FFN; becomes expert 0 and the template of the others.
        hidden_size: h.
        num_experts: N >= 2.
        top_k: K.
        layer_index: this layer's number in the decoder.
        has_classifier: put a routing classifier in front of the router.
        control: the model's `RoutingControl`.
        earlier_counts: experts that the layer had after each expansion before the last.

    Attributes:
        experts_of_class: experts that existed before any expansion (1), and after each.
    """

    def __init__(
        self,
        ffn: nn.Module,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        layer_index: int,
        has_classifier: bool,
        control: RoutingControl,
        earlier_counts: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList([ffn, *(copy_ffn(ffn) for _ in range(num_experts - 1))])
        self.router = Router(hidden_size, num_experts)
        self.experts_of_class = (1, *earlier_counts, num_experts)
        self.classifier = Classifier(hidden_size, len(self.experts_of_class)) if has_classifier else None
        self.top_k = min(top_k, num_experts)
        self.layer_index = layer_index
        self.control = control

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., h] -> [..., h]`. BLOOM's FFN adds the residual itself: then it is passed, and added once."""
        x_Th = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits_TN = self.router(x_Th)
        classifier_logits_TC = None if self.classifier is None else self.classifier(x_Th)
        if self.control.change_logits is not None:
            logits_TN, classifier_logits_TC = self.control.change_logits(logits_TN, self.top_k), None
        if self.control.capture is not None:
            routing = LayerRouting(logits_TN, classifier_logits_TC, self.top_k)
            self.control.capture.layers[self.layer_index] = routing
        if self.control.forced_expert is not None:
            return self._forced(hidden_states, residual)
        limit_T = None
        if classifier_logits_TC is not None and not self.training:
            limit_T = experts_allowed(classifier_logits_TC, self.experts_of_class)
        if self.control.expansion is not None:
            most = self.experts_of_class[self.control.expansion]
            limit_T = (
                torch.full_like(logits_TN[:, 0], most, dtype=torch.long) if limit_T is None else limit_T.clamp(max=most)
            )
        weights_TK, index_TK = select_experts(logits_TN, self.top_k, limit_T)
        if torch.compiler.is_compiling():
            y_Th = self.combine_all(x_Th, weights_TK, index_TK, residual is not None)
        elif x_Th.shape[0] == 1 and not self.training:
            y_Th = self.run_one_token(x_Th, weights_TK, index_TK, residual is not None)
        else:
            y_Th = self.dispatch(x_Th, weights_TK, index_TK, residual is not None)
        y = y_Th.view(hidden_states.shape)
        return y if residual is None else y + residual

    def _forced(self, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        expert = self.control.forced_expert
        if expert is None or expert >= len(self.experts):
            raise ValueError(
                f"Expert {expert} was asked for, but layer {self.layer_index} has experts 0..{len(self.experts) - 1}."
            )
        y = self.experts[expert](hidden_states, *(() if residual is None else (residual,)))
        if self.training:  # the others stay in the graph, as in `dispatch`
            nothing_0h = hidden_states.flatten(0, -2)[:0]
            idle = [self._run(other, nothing_0h, residual is not None) for other in self.experts]
            y = torch.cat([y.flatten(0, -2), *idle]).view(y.shape)
        return y

    def dispatch(
        self, x_Th: torch.Tensor, weights_TK: torch.Tensor, index_TK: torch.Tensor, takes_residual: bool
    ) -> torch.Tensor:
        """`y = sum_k weight_k * E_index_k(x)`: tokens are sorted by expert, split once, run, put back.

        The sum runs in float32, so that weights that sum to 1 leave equal experts' output unchanged in bfloat16 too.
        Index N means "no expert".
        """
        T, K = index_TK.shape
        assigned_A = index_TK.reshape(-1)
        order_A = assigned_A.argsort(stable=True)
        counts = assigned_A.bincount(minlength=len(self.experts) + 1).tolist()
        unassigned = counts.pop()
        # `index_select`: on a CPU the gradient of `x[index]` is many times slower.
        inputs = x_Th.index_select(0, order_A[: T * K - unassigned] // K).split(counts)
        # In training idle experts run on nothing: they stay in the graph, so ranks of a distributed run agree on it.
        outputs = [
            self._run(expert, x, takes_residual)
            for expert, x in zip(self.experts, inputs, strict=True)
            if self.training or x.shape[0]
        ]
        if unassigned:
            outputs.append(outputs[0].new_zeros(unassigned, x_Th.shape[-1]))
        sorted_Ah = torch.cat(outputs)
        place_A = torch.empty_like(order_A).scatter_(0, order_A, torch.arange(T * K, device=order_A.device))
        y_TKh = sorted_Ah.index_select(0, place_A).view(T, K, -1)
        with torch.autocast(x_Th.device.type, enabled=False):
            y_T1h = torch.bmm(weights_TK.unsqueeze(1), y_TKh.float())
        return y_T1h.squeeze(1).to(sorted_Ah.dtype)

    def run_one_token(
        self, x_1h: torch.Tensor, weights_1K: torch.Tensor, index_1K: torch.Tensor, takes_residual: bool
    ) -> torch.Tensor:
        """`dispatch` of a single token, as in decoding: nothing to sort."""
        outputs = [
            (k, self._run(self.experts[e], x_1h, takes_residual))
            for k, e in enumerate(index_1K[0].tolist())
            if e < len(self.experts)
        ]
        y_1h = torch.stack([y.float() * weights_1K[:, k : k + 1] for k, y in outputs]).sum(0)
        return y_1h.to(outputs[0][1].dtype)

    def combine_all(
        self, x_Th: torch.Tensor, weights_TK: torch.Tensor, index_TK: torch.Tensor, takes_residual: bool
    ) -> torch.Tensor:
        """`dispatch` for `torch.compile` and `torch.export`: every expert sees every token, so that no shape depends on
        the data. Costs N FFNs a token instead of K."""
        N = len(self.experts)
        weights_TN = weights_TK.new_zeros(x_Th.shape[0], N + 1).scatter(1, index_TK, weights_TK)
        outputs = [self._run(expert, x_Th, takes_residual) for expert in self.experts]
        y_Th = sum(y.float() * w_T1 for y, w_T1 in zip(outputs, weights_TN[:, :N].split(1, 1), strict=True))
        return y_Th.to(outputs[0].dtype)

    @staticmethod
    def _run(expert: nn.Module, x_Th: torch.Tensor, takes_residual: bool) -> torch.Tensor:
        return expert(x_Th, torch.zeros_like(x_Th)) if takes_residual else expert(x_Th)
