"""The load-balancing loss of MoE-LPR and LayerMoE, under which experts are chosen equally often.

Shape suffixes: T tokens, N experts of a layer, K active experts of a token.
"""

from dataclasses import dataclass

import torch

from .base import LayerLoss, LossBatch


def expert_selections(router_logits_TN: torch.Tensor, top_k: int, mask_T: torch.Tensor | None = None) -> torch.Tensor:
    """`[N]` float: number of counted tokens that select each expert (the sum in LayerMoE Eq. 15)."""
    chosen_TK = router_logits_TN.detach().topk(min(top_k, router_logits_TN.shape[-1]), dim=-1).indices
    selected_TN = torch.zeros_like(router_logits_TN).scatter_(1, chosen_TK, 1.0)
    return selected_TN.sum(0) if mask_T is None else selected_TN[mask_T].sum(0)


def load_balance_loss(
    router_logits_TN: torch.Tensor,
    top_k: int,
    mask_T: torch.Tensor | None = None,
    selections_N: torch.Tensor | None = None,
    tokens: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """`L_balance = sum_i f_i P_i` (MoE-LPR Eq. 5-7, LayerMoE Eq. 14-16), exactly 1 under even routing.

    `f_i = N / (K T) * #{tokens that select i}`, `P_i = mean_t G_i(t)`; K is at most N.

    Args:
        router_logits_TN: router logits, float32.
        top_k: K.
        mask_T: bool, the counted tokens (without padding); all by default.
        selections_N, tokens: the counts and T over all ranks of a distributed run. The result is then this rank's
            share, and the ranks' results sum to the loss of all their tokens.
    """
    N = router_logits_TN.shape[-1]
    if selections_N is None:
        selections_N = expert_selections(router_logits_TN, top_k, mask_T)
    scores_TN = router_logits_TN.softmax(-1)
    if mask_T is not None:
        scores_TN = scores_TN[mask_T]
    T = scores_TN.shape[0] if tokens is None else tokens
    f_N = N / (min(top_k, N) * T) * selections_N
    P_N = scores_TN.sum(0) / T
    return (f_N * P_N).sum()


@dataclass(frozen=True)
class BalanceLoss(LayerLoss):
    """`load_balance_loss` of each micro-batch (alpha of MoE-LPR and LayerMoE; lambda_MoE of Elbayad et al.)."""

    name = "balance"
    metrics = ("balance_loss",)
    per_micro_batch = True

    coef: float = 0.01

    def layer_loss(self, batch: LossBatch, layer: int, count: torch.Tensor) -> torch.Tensor:
        routing, selections_N = batch.routing[layer], batch.selections[layer]
        return load_balance_loss(routing.routed_logits, routing.top_k, batch.tokens.counted_T, selections_N, count)
