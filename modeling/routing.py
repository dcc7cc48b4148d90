"""Routing of one expanded layer: the router, the classifier, and the selection of experts from their logits.

Shape suffixes: T tokens of the batch, h hidden size, N experts of this layer, K active experts, A = T * K
assignments of a token to an expert, C classes of the classifier (0 = old languages).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init


@dataclass(frozen=True)
class LayerRouting:
    """The routing of one expanded layer in one forward pass, in the order of the flattened batch."""

    router_logits: torch.Tensor  # [T, N] float32; the router scores G are the softmax of `scored_logits`
    classifier_logits: torch.Tensor | None  # [T, C] float32; None in a layer without a classifier
    top_k: int  # K, active experts of a token, at most N
    weights: torch.Tensor  # [T, K], each active expert's factor in the token's output
    experts: torch.Tensor  # [T, K], indices of the active experts; index N means that no expert runs
    allowed: torch.Tensor | None = None  # [T, N] bool, the experts that each token may use; None for all
    # Whether all tokens take expert 0, outside the routed set: `top_k` then counts the other experts, and `weights` and
    # `experts` are [T, 1 + K], expert 0 first.
    shared: bool = False
    classes: torch.Tensor | None = None  # [T], each token's known class; None where nothing but a classifier says it
    most: int | None = None  # with exclusive experts the most of one class, among which a router chooses

    @property
    def own(self) -> torch.Tensor | None:
        """`[T, N]` bool, the experts of each token's class, where those are exclusive; None where they are not."""
        return None if self.most is None else self.allowed

    @property
    def scored_logits(self) -> torch.Tensor:
        """Logits whose softmax is each token's scores G: minus infinity for other classes' exclusive experts."""
        return self.router_logits if self.own is None else self.router_logits.masked_fill(~self.own, float("-inf"))

    @property
    def routed_logits(self) -> torch.Tensor:
        """Logits of the experts among which the router chooses."""
        return self.router_logits[:, 1:] if self.shared else self.scored_logits

    @property
    def has_choice(self) -> bool:
        """Whether a token may have more experts to choose among than it takes."""
        return (self.routed_logits.shape[-1] if self.own is None else self.most or 0) > self.top_k

    @property
    def token_classes(self) -> torch.Tensor | None:
        """`[T]`, the class of each token, told or by the layer's classifier; None without any."""
        if self.classes is not None or self.classifier_logits is None:
            return self.classes
        return token_classes(self.classifier_logits)

    def weight_of_each_expert(self) -> torch.Tensor:
        """`[T, N]`: `weights` by expert; 0 for an expert that does not run."""
        T, N = self.router_logits.shape
        return self.weights.new_zeros(T, N + 1).scatter(1, self.experts, self.weights)[:, :N]


@dataclass(frozen=True)
class TokenClasses:
    """The classes of a pass's tokens, `[T]`, and those that occur among them in order, None where the host does not
    know."""

    class_T: torch.Tensor
    present: Sequence[int] | None = None

    @property
    def only(self) -> int | None:
        """The class of all tokens; None if they have several, or the host does not know."""
        return self.present[0] if self.present is not None and len(self.present) == 1 else None

    def on(self, device: torch.device) -> "TokenClasses":
        """These classes on a device. A compiled pass knows none but a single one, so that it has few graphs."""
        several = self.only is None and torch.compiler.is_compiling()
        return TokenClasses(self.class_T.to(device), None if several else self.present)


@dataclass(frozen=True)
class Choice:
    """A layer's choice among its routed experts, which are numbered from 0 here, without a shared expert."""

    weights: torch.Tensor  # [T, K]
    experts: torch.Tensor  # [T, K], indices; `num_experts` means that no expert runs
    num_experts: int
    closed: torch.Tensor | None = None  # [T] bool, the tokens that take the shared expert alone


class Scores(nn.Module):
    """A bias-free linear map that always computes in float32, under autocast too.

    Not an `nn.Linear`, so that quantisation and PEFT's "all linear layers" leave it alone. Starts at zero.
    """

    def __init__(self, hidden_size: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, hidden_size))

    def forward(self, x_Th: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled(x_Th.device.type):
            return F.linear(x_Th.float(), self.weight.float())
        with torch.autocast(x_Th.device.type, enabled=False):
            return F.linear(x_Th.float(), self.weight.float())

    def init_part(self) -> None:
        """First weights."""
        for parameter in self.parameters():
            init.zeros_(parameter)


class Router(Scores):
    """`x W_r`, `[T, h] -> [T, N]`."""

    def init_part(self) -> None:
        init_router(self.weight)


class Classifier(Scores):
    """`x W_c`, `[T, h] -> [T, C]`. At zero ties leave the choice to the router, so that an untrained classifier has no
    effect."""


def init_router(weight_Nh: torch.Tensor, generator: torch.Generator | None = None) -> None:
    """Xavier normal, as in MoE-LPR. A zero router would give ties only, and send every token to the same experts."""
    init.xavier_normal_(weight_Nh, generator=generator)


def select_experts(
    logits_TN: torch.Tensor, top_k: int, allowed_TN: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The K experts with the highest scores and their weights (MoE-LPR Eq. 1-3, LayerMoE Eq. 1-3).

    The weights are the scores `G = softmax(logits)` of the K experts, divided by their sum, which is the softmax of
    these experts' logits.

    Args:
        logits_TN: router logits, float32.
        top_k: K; all experts if the layer has fewer.
        allowed_TN: bool, the experts that each token may use, at least one; all by default.

    Returns:
        weights `[T, K]`, summing to 1, and expert indices `[T, K]`: the best first or, where every token takes all
        experts, in their order. An assignment beyond a token's allowed experts has weight 0 and the index N, at which
        no expert runs, and so costs nothing. At K = 1 the weight's value is 1, but its gradient is that of `log G`, so
        that the router still learns from the language loss.
    """
    T, N = logits_TN.shape
    if allowed_TN is None and 1 < N <= top_k:
        return logits_TN.softmax(-1), torch.arange(N, device=logits_TN.device).expand(T, N)
    if allowed_TN is not None:
        logits_TN = logits_TN.masked_fill(~allowed_TN, float("-inf"))
    top_TK, index_TK = logits_TN.topk(min(top_k, N), dim=-1)
    if top_TK.shape[-1] == 1:
        score_T1 = logits_TN.softmax(-1).gather(1, index_TK)
        weights_TK = score_T1 / score_T1.detach()
    else:
        weights_TK = top_TK.softmax(-1)
    if allowed_TN is not None:
        index_TK = index_TK.masked_fill(~allowed_TN.gather(1, index_TK), N)
    return weights_TK, index_TK


def token_classes(classifier_logits_TC: torch.Tensor) -> torch.Tensor:
    """Each token's class, `[T]`: the one with the highest logit, the later class on a tie."""
    last = classifier_logits_TC.shape[-1] - 1
    return last - classifier_logits_TC.flip(-1).argmax(-1)


def expert_ranges(counts: Sequence[int], exclusive: bool = False) -> tuple[tuple[int, int], ...]:
    """The experts `first, ..., end - 1` that each class may use, as `(first, end)`, besides expert 0 (LayerMoE Eq. 13).

    Class 0 (the base model's languages) may use only expert 0, class g the experts that existed after expansion g, and
    the last class all experts. With exclusive experts class g has the experts of expansion g alone, without expert 0.

    Args:
        counts: number of the layer's experts before any expansion (1), and after each expansion.
    """
    return ((1, 1), *pairwise(counts)) if exclusive else tuple((1, count) for count in counts)


def experts_allowed(class_T: torch.Tensor, ranges: Sequence[tuple[int, int]], exclusive: bool = False) -> torch.Tensor:
    """`[T, N]` bool: the experts that each token may use, by its class; `ranges` are those of `expert_ranges`.
    With exclusive experts expert 0 is left to the classes that have no other."""
    expert_N = torch.arange(max(end for _, end in ranges), device=class_T.device)
    if not exclusive:  # a class has its own experts and all before
        class_N = sum(expert_N >= end for _, end in ranges[:-1])
        return class_T.unsqueeze(-1) >= class_N
    first_T, end_T = torch.full_like(class_T, ranges[-1][0]), torch.full_like(class_T, ranges[-1][1])
    for number, (first, end) in enumerate(ranges[:-1]):
        first_T, end_T = first_T.masked_fill(class_T == number, first), end_T.masked_fill(class_T == number, end)
    own_TN = (expert_N >= first_T.unsqueeze(-1)) & (expert_N < end_T.unsqueeze(-1))
    return own_TN | ((expert_N == 0) & ~own_TN.any(-1, keepdim=True))
