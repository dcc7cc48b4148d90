"""The load-balancing loss of MoE-LPR and LayerMoE, under which experts are chosen equally often. LoRAMoE's localized
balancing constraint, under which one half of the experts is for old languages, the other for new ones.

Shape suffixes: T tokens, N experts of a layer, K active experts of a token.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ...core.errors import InputError
from ...core.schema import checked
from .layer_loss import LayerLoss, LossBatch, where_counted

BalanceCounts = Literal["top-k", "top-1"]


def expert_selections(router_logits_TN: torch.Tensor, top_k: int, mask_T: torch.Tensor | None = None) -> torch.Tensor:
    """`[N]` float: number of counted tokens that select each expert (the sum in LayerMoE Eq. 15); none whose logit is
    minus infinity."""
    chosen_TK = router_logits_TN.detach().topk(min(top_k, router_logits_TN.shape[-1]), dim=-1).indices
    selected_TN = torch.zeros_like(router_logits_TN).scatter_(1, chosen_TK, 1.0) * (router_logits_TN > float("-inf"))
    return (selected_TN if mask_T is None else where_counted(mask_T, selected_TN)).sum(0)


def load_balance_loss(
    router_logits_TN: torch.Tensor, top_k: int, mask_T: torch.Tensor | None = None,
    selections_N: torch.Tensor | None = None, tokens: float | torch.Tensor | None = None,
    own_TN: torch.Tensor | None = None, tokens_N: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`L_balance = sum_i f_i P_i` (MoE-LPR Eq. 5-7, LayerMoE Eq. 14-16), exactly 1 under even routing.

    `f_i = N / (K T) * #{tokens that select i}`, `P_i = mean_t G_i(t)`; K is at most N. With exclusive experts each
    class has a loss of its own experts and tokens; the result is their mean, weighted by tokens.

    Args:
        top_k: K; 1 counts each token's first expert alone, as GShard does.
        mask_T: bool, the counted tokens (without padding); all by default.
        selections_N, tokens: the counts and T over all ranks of a distributed run. The result is then this rank's
            share, and the ranks' results sum to the loss of all their tokens.
        own_TN: bool, with exclusive experts those of each token's class; the others' logits are minus infinity.
        tokens_N: the number of counted tokens whose class has each expert, over all ranks.
    """
    N = router_logits_TN.shape[-1]
    if selections_N is None:
        selections_N = expert_selections(router_logits_TN, top_k, mask_T)
    scores_TN, T = router_logits_TN.softmax(-1), router_logits_TN.shape[0] if tokens is None else tokens
    if mask_T is not None:
        scores_TN, T = where_counted(mask_T, scores_TN), mask_T.sum() if tokens is None else tokens
    if own_TN is not None:
        own_T = own_TN.sum(-1)  # N of the token's class
        tokens_N = tokens_of_experts(own_TN, mask_T) if tokens_N is None else tokens_N
        share_N = (scores_TN * (own_T / own_T.clamp(max=top_k)).unsqueeze(-1)).sum(0) / T
        return (selections_N / tokens_N.clamp(min=1) * share_N).sum()
    f_N = N / (min(top_k, N) * T) * selections_N
    P_N = scores_TN.sum(0) / T
    return (f_N * P_N).sum()


def tokens_of_experts(own_TN: torch.Tensor, mask_T: torch.Tensor | None = None) -> torch.Tensor:
    """`[N]` float: number of counted tokens whose class has each expert."""
    return (own_TN if mask_T is None else where_counted(mask_T, own_TN)).sum(0).float()


@checked
@dataclass(frozen=True)
class BalanceLoss(LayerLoss):
    """`load_balance_loss` of each micro-batch (alpha of MoE-LPR and LayerMoE; lambda_MoE of Elbayad et al.)."""

    name = "balance"
    metrics = ("balance_loss",)
    per_micro_batch = True
    of_choice = True

    coef: float = 0.01
    # The choices of a token that count: all K experts, or the first one alone (the loss of GShard, which Elbayad et al.
    # use).
    balance_counts: BalanceCounts = "top-k"

    def layer_loss(self, batch: LossBatch, layer: int, count: torch.Tensor) -> torch.Tensor:
        routing, counted_T = batch.routing[layer], batch.tokens.counted_T
        logits_TN, top_k, own_TN = routing.routed_logits, routing.top_k, routing.own
        selections_N, tokens_N = batch.selections[layer], None
        if self.balance_counts == "top-1" and top_k > 1:
            top_k, selections_N = 1, batch.sum_over_ranks(expert_selections(logits_TN, 1, counted_T))
        if own_TN is not None:
            tokens_N = batch.sum_over_ranks(tokens_of_experts(own_TN, counted_T))
        return load_balance_loss(logits_TN, top_k, counted_T, selections_N, count, own_TN, tokens_N)


def language_importance(router_logits_TN: torch.Tensor, old_T: torch.Tensor, new_T: torch.Tensor) -> torch.Tensor:
    """`[2, N]`: each expert's scores, summed over the tokens of old and of new languages."""
    masks_2T = torch.stack([old_T, new_T]).to(router_logits_TN.dtype)
    return masks_2T @ router_logits_TN.softmax(-1)


def localized_balance_loss(
    router_logits_TN: torch.Tensor, old_T: torch.Tensor, new_T: torch.Tensor, delta: float = 0.1,
    importance_2N: torch.Tensor | None = None, tokens_2: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`L_lbc = variance(Z) / mean(Z)`, `Z = I * Q`: LoRAMoE's localized balancing constraint (Dou et al. 2024).

    The first `N // 2` experts are the old languages' half (expert 0 is one of them), the others the new ones'.
    `Q_nm = N * mean over m's tokens of G_n`, the importance of expert n to the languages m (old or new), 1 under even
    routing. `I_nm` is `1 - delta` if n is in m's half, else `1 + delta`. The loss is 0 if Z is constant: then all
    experts of a half have equal importance, and m's own half has `(1 + delta) / (1 - delta)` times that of the other.

    Args:
        old_T, new_T: bool, the tokens of old and of new languages. Languages without tokens do not count.
        delta: imbalance of the halves, at least 0 and less than 1.
        importance_2N, tokens_2: `language_importance` and the numbers of tokens over all ranks of a distributed run.
            The result is then this rank's share, and the ranks' results sum to the loss of all their tokens.
    """
    N = router_logits_TN.shape[-1]
    here_2N = language_importance(router_logits_TN, old_T, new_T)
    here_2 = torch.stack([old_T.sum(), new_T.sum()]).to(here_2N)
    # The loss is not linear in the tokens: its slope is taken at the sums over ranks, its argument's change locally.
    all_2N = here_2N if importance_2N is None else importance_2N + here_2N - here_2N.detach()
    all_2 = here_2 if tokens_2 is None else tokens_2.to(here_2)
    half_N = torch.arange(N, device=here_2N.device) >= N // 2
    is_own_2N = torch.stack([~half_N, half_N])
    Z_2N = (1 + delta - 2 * delta * is_own_2N) * N * all_2N / all_2.clamp(min=1).unsqueeze(-1)
    has_tokens_2 = all_2 > 0
    values = N * has_tokens_2.sum().clamp(min=1)
    mean = where_counted(has_tokens_2, Z_2N).sum() / values
    variance = where_counted(has_tokens_2, (Z_2N - mean).square()).sum() / values
    loss = variance / mean.where(has_tokens_2.any(), 1)
    share = here_2.sum() / all_2.sum().clamp(min=1)
    return loss - (1 - share) * loss.detach()


@checked
@dataclass(frozen=True)
class LocalizedBalanceLoss(LayerLoss):
    """`localized_balance_loss` of each micro-batch; raises InputError where delta is outside its range."""

    name = "localized_balance"
    metrics = ("localized_balance_loss",)
    needs_languages = True
    per_micro_batch = True
    logged_at_zero = False

    delta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.delta < 1:
            raise InputError(f"LocalizedBalanceLoss: delta is {self.delta}: must be at least 0 and less than 1.")

    def layer_loss(self, batch: LossBatch, layer: int, count: torch.Tensor) -> torch.Tensor:
        logits_TN, old_T, new_T = batch.routing[layer].scored_logits, batch.tokens.old_T, batch.tokens.new_T
        importance_2N = language_importance(logits_TN.detach(), old_T, new_T)
        counts_21 = torch.stack([old_T.sum(), new_T.sum()]).to(importance_2N).unsqueeze(-1)
        sums = batch.sum_over_ranks(torch.cat([counts_21, importance_2N], -1))
        return localized_balance_loss(logits_TN, old_T, new_T, self.delta, sums[:, 1:], sums[:, 0])
