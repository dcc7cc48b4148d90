"""The mathematics of one expanded layer: router, classifier, dispatch.

Shape suffixes: T tokens of the batch, h hidden size, N experts of this layer, K active experts, A = T * K
assignments of a token to an expert, C classes of the classifier (0 = old languages).
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init

OLD = 0  # the classifier's class of the languages that the base model came with


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


def select_experts(logits_TN: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The K experts with the highest scores and their weights (MoE-LPR Eq. 1-3, LayerMoE Eq. 1-3).

    Args:
        logits_TN: router logits, float32.
        top_k: K; all experts where the layer has fewer.

    Returns:
        weights `[T, K]`, summing to 1, and expert indices `[T, K]`. At K = 1 the weight's value is 1 and its
        gradient that of `log G`, so that the router still learns from the language loss.
    """
    scores_TN = logits_TN.softmax(-1)
    top_TK, index_TK = scores_TN.topk(min(top_k, scores_TN.shape[-1]), dim=-1)
    norm = top_TK.detach() if top_TK.shape[-1] == 1 else top_TK.sum(-1, keepdim=True)
    return top_TK / norm, index_TK


def send_old_home(
    classifier_logits_TC: torch.Tensor, weights_TK: torch.Tensor, index_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inference with a classifier (LayerMoE Eq. 13): a token classed old goes to expert 0 alone.

    Its other K - 1 assignments get the index `num_experts`, which `dispatch` drops: the token costs one FFN.
    """
    other = classifier_logits_TC[:, OLD + 1 :].amax(-1)
    old_T1 = (classifier_logits_TC[:, OLD] > other).unsqueeze(-1)
    home_1K = torch.full_like(index_TK[:1], num_experts)
    home_1K[:, 0] = 0
    only_1K = torch.zeros_like(weights_TK[:1])
    only_1K[:, 0] = 1
    return torch.where(old_T1, only_1K, weights_TK), torch.where(old_T1, home_1K, index_TK)


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
    ) -> None:
        super().__init__()
        # Copies share `ffn.config`: a later switch of the attention implementation must reach them all.
        shared = {id(value): value for value in vars(ffn).values() if isinstance(value, PreTrainedConfig)}
        copies = [copy.deepcopy(ffn, dict(shared)) for _ in range(num_experts - 1)]
        self.experts = nn.ModuleList([ffn, *copies])
        self.router = Router(hidden_size, num_experts)
        self.classifier = Classifier(hidden_size, 2) if has_classifier else None
        self.top_k = min(top_k, num_experts)
        self.layer_index = layer_index
        self.control = control

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., h] -> [..., h]`. BLOOM's FFN adds the residual itself: then it is passed, and added once."""
        if self.control.forced_expert is not None:
            return self._forced(hidden_states, residual)
        x_Th = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits_TN = self.router(x_Th)
        classifier_logits_TC = None if self.classifier is None else self.classifier(x_Th)
        if self.control.capture is not None:
            routing = LayerRouting(logits_TN, classifier_logits_TC, self.top_k)
            self.control.capture.layers[self.layer_index] = routing
        weights_TK, index_TK = select_experts(logits_TN, self.top_k)
        if classifier_logits_TC is not None and not self.training:
            weights_TK, index_TK = send_old_home(classifier_logits_TC, weights_TK, index_TK, len(self.experts))
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
        return self.experts[expert](hidden_states, *(() if residual is None else (residual,)))

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
        inputs = x_Th[order_A[: T * K - unassigned] // K].split(counts)
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
        y_TKh = sorted_Ah[place_A].view(T, K, -1)
        return (y_TKh.float() * weights_TK.unsqueeze(-1)).sum(1).to(sorted_Ah.dtype)

    def run_one_token(
        self, x_1h: torch.Tensor, weights_1K: torch.Tensor, index_1K: torch.Tensor, takes_residual: bool
    ) -> torch.Tensor:
        """`dispatch` of a single token, as in decoding: nothing to sort."""
        outputs = [
            self._run(self.experts[e], x_1h, takes_residual) for e in index_1K[0].tolist() if e < len(self.experts)
        ]
        y_Kh = torch.cat(outputs)
        weights_K1 = weights_1K[0, : len(outputs)].unsqueeze(-1)
        return (y_Kh.float() * weights_K1).sum(0, keepdim=True).to(y_Kh.dtype)

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
