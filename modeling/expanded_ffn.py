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
        conditional: expert 0 is outside the routed set (see `with_shared_expert`); `top_k` counts the others.
    """

    router_logits: torch.Tensor
    classifier_logits: torch.Tensor | None
    top_k: int
    conditional: bool = False

    @property
    def routed_logits(self) -> torch.Tensor:
        """Logits of the experts that the router chooses among."""
        return self.router_logits[:, 1:] if self.conditional else self.router_logits


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
        self.local = False  # whether gating dropout took this batch

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


class ConditionalGate(_Scores):
    """`w x`, `[T, h] -> [T, 1]`; its sigmoid is the share of the routed experts in a token's output.

    Starts at zero: one half.
    """


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


def with_shared_expert(logits_TN: torch.Tensor, gate_logits_T: torch.Tensor) -> torch.Tensor:
    """Router logits of a layer with conditional routing, whose softmax is each expert's share: `1 - g` of expert 0, the
    shared one, and `g G_i` of the others, with `g = sigmoid(gate_logits)` (Elbayad et al. Eq. 4) and G over the
    routed experts 1..N-1."""
    shared_T1 = F.logsigmoid(-gate_logits_T).unsqueeze(-1)
    routed_TN = F.logsigmoid(gate_logits_T).unsqueeze(-1) + logits_TN[:, 1:].log_softmax(-1)
    return torch.cat([shared_T1, routed_TN], -1)


def beside_shared(
    logits_TN: torch.Tensor, weights_TK: torch.Tensor, index_TK: torch.Tensor, closed_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Conditional routing (Elbayad et al. Eq. 5): `y = (1 - g) E_0(x) + g sum_k weight_k E_k(x)`.

    Args:
        logits_TN: see `with_shared_expert`.
        weights_TK, index_TK: of the routed experts alone, numbered from 0.
        closed_T: bool, the tokens whose gate g is 0.

    Returns:
        weights `[T, 1 + K]` and expert indices `[T, 1 + K]`, expert 0 first; index N where nothing is to run.
    """
    gate_T1 = 1 - logits_TN[:, :1].exp()
    if closed_T is not None:
        gate_T1 = gate_T1.masked_fill(closed_T.unsqueeze(-1), 0)
    index_TK = (index_TK + 1).masked_fill(gate_T1 == 0, logits_TN.shape[-1])
    return (
        torch.cat([1 - gate_T1, gate_T1 * weights_TK], -1),
        torch.cat([torch.zeros_like(index_TK[:, :1]), index_TK], -1),
    )


def mask_outputs(
    weights_TK: torch.Tensor, index_TK: torch.Tensor, none: int, expert_output: float, final_output: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elbayad et al.'s expert output masking and final output masking.

    Each assignment's output is zero with probability `expert_output`, each token's whole output with probability
    `final_output`. The other weights stay as they are. Index `none` means "no expert": what is masked does not run.
    """
    for probability, drawn in ((expert_output, weights_TK), (final_output, weights_TK[:, :1])):
        if probability:
            masked = torch.rand(drawn.shape, device=drawn.device) < probability
            weights_TK, index_TK = weights_TK.masked_fill(masked, 0), index_TK.masked_fill(masked, none)
    return weights_TK, index_TK


def local_experts(logits_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing of a batch whose tokens may not leave their device (gating dropout), as if each of N devices held an
    expert and an Nth of the tokens: weights 1 and expert indices, `[T, 1]`."""
    T, N = logits_TN.shape
    index_T = torch.arange(T, device=logits_TN.device) * N // T
    return torch.ones_like(logits_TN[:, :1]), index_T.unsqueeze(-1)


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


def shared_config(ffn: nn.Module) -> dict[int, Any]:
    """What makes `copy.deepcopy` of an FFN share its configuration, as its second argument: a later switch of the
    attention implementation must reach all copies."""
    return {id(value): value for value in vars(ffn).values() if isinstance(value, PreTrainedConfig)}


def copy_ffn(ffn: nn.Module) -> nn.Module:
    """A copy of a backbone's FFN that shares its configuration."""
    memo = shared_config(ffn)
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
        masking: what says how training masks (`expert_output_masking` and the like): the model's configuration.
        conditional: expert 0 is shared by all tokens, and a gate says how much the routed experts 1..N-1 add.
        new_expert: makes each of the others of `ffn`.

    Attributes:
        experts_of_class: experts that existed before any expansion (1), and after each.
        draws_for_all: gating dropout, which takes whole batches, is drawn here: in a model, in its first layer.
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
        masking: Any = None,
        conditional: bool = False,
        new_expert: Callable[[nn.Module], nn.Module] = copy_ffn,
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList([ffn, *(new_expert(ffn) for _ in range(num_experts - 1))])
        self.router = Router(hidden_size, num_experts)
        self.experts_of_class = (1, *earlier_counts, num_experts)
        self.classifier = Classifier(hidden_size, len(self.experts_of_class)) if has_classifier else None
        self.conditional_gate = ConditionalGate(hidden_size, 1) if conditional else None
        self.top_k = min(top_k, num_experts - conditional)
        self.masking = masking
        self.layer_index = layer_index
        self.control = control
        self.draws_for_all = True

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., h] -> [..., h]`. BLOOM's FFN adds the residual itself: then it is passed, and added once."""
        x_Th = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits_TN = self.router(x_Th)
        classifier_logits_TC = None if self.classifier is None else self.classifier(x_Th)
        conditional = self.conditional_gate is not None
        if self.control.change_logits is not None:
            shared_TN, routed_TN = logits_TN.tensor_split([int(conditional)], dim=-1)
            logits_TN = torch.cat([shared_TN, self.control.change_logits(routed_TN, self.top_k)], -1)
            classifier_logits_TC = None
        if self.conditional_gate is not None:
            logits_TN = with_shared_expert(logits_TN, self.conditional_gate(x_Th).squeeze(-1))
        if self.control.capture is not None:
            routing = LayerRouting(logits_TN, classifier_logits_TC, self.top_k, conditional)
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
        weights_TK, index_TK = self.select(logits_TN, limit_T)
        if torch.compiler.is_compiling():
            y_Th = self.combine_all(x_Th, weights_TK, index_TK, residual is not None)
        elif x_Th.shape[0] == 1 and not self.training:
            y_Th = self.run_one_token(x_Th, weights_TK, index_TK, residual is not None)
        else:
            y_Th = self.dispatch(x_Th, weights_TK, index_TK, residual is not None)
        y = y_Th.view(hidden_states.shape)
        return y if residual is None else y + residual

    def select(self, logits_TN: torch.Tensor, limit_T: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and expert indices of each token, `[T, A / T]` each, index N for no expert (see `select_experts`); in
        training with what the configuration masks."""
        conditional = self.conditional_gate is not None
        masking = self.masking if self.training else None
        routed_TN = logits_TN[:, int(conditional) :]
        routed_limit_T = (limit_T - 1).clamp(min=1) if conditional and limit_T is not None else limit_T
        if masking is not None and self.draws_for_all:
            # Recomputation, before the next batch, draws the same number again.
            self.control.local = bool(masking.gating_dropout) and torch.rand(()).item() < masking.gating_dropout
        if masking is not None and self.control.local:
            weights_TK, index_TK = local_experts(routed_TN)
        else:
            weights_TK, index_TK = select_experts(routed_TN, self.top_k, routed_limit_T)
        if masking is not None:
            weights_TK, index_TK = mask_outputs(
                weights_TK, index_TK, routed_TN.shape[-1], masking.expert_output_masking, masking.final_output_masking
            )
        if not conditional:
            return weights_TK, index_TK
        closed_T = None if limit_T is None else limit_T < 2
        if masking is not None and masking.conditional_routing_masking:
            masked_T = torch.rand_like(logits_TN[:, 0]) < masking.conditional_routing_masking
            closed_T = masked_T if closed_T is None else closed_T | masked_T
        return beside_shared(logits_TN, weights_TK, index_TK, closed_T)

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
