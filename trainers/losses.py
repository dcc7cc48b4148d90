"""The training losses of the routers, each equation once, as pure functions.

Shape suffixes: T tokens, N experts of a layer, K active experts a token, C classes. Each function handles one layer;
a model's loss is the mean over its expanded layers.
"""

import torch
import torch.nn.functional as F

OLD = 0  # language class of the languages that the base model came with


def expert_selections(router_logits_TN: torch.Tensor, top_k: int, mask_T: torch.Tensor | None = None) -> torch.Tensor:
    """`[N]` float: how many of the counted tokens select each expert (the sum in LayerMoE Eq. 15)."""
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
        mask_T: which tokens count (padding does not); all by default.
        selections_N, tokens: the counts and T over all ranks of a distributed run. The result is then this rank's
            share, and the sum of the ranks' results is the loss of all their tokens.
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


def language_prior_routing_loss(
    router_logits_TN: torch.Tensor, old_T: torch.Tensor, count: float | torch.Tensor | None = None
) -> torch.Tensor:
    """`L_LPR = - mean over old tokens of log G_0(t)` (MoE-LPR Eq. 9-10): old-language tokens go to expert 0.

    Args:
        old_T: bool, the tokens of old languages (F(t) in the paper).
        count: what to divide the sum by, if not by the number of old tokens here (zero of them give 0).
    """
    log_scores_T = router_logits_TN.log_softmax(-1)[:, 0]
    divisor = old_T.sum().clamp(min=1) if count is None else count
    return -log_scores_T[old_T].sum() / divisor


def classifier_loss(
    classifier_logits_TC: torch.Tensor,
    class_T: torch.Tensor,
    mask_T: torch.Tensor | None = None,
    count: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """`L_CLS`: cross-entropy of the routing classifier over all counted tokens.

    LayerMoE's Eq. 11 as printed sums over old tokens only, which a constant classifier would satisfy. Given a router's
    logits and the language group of each token it is DMoE's language-group loss (Eq. 3), `- log p(group | token)`.

    Args:
        class_T: class of each token's language, 0 = old.
        mask_T: which tokens count; all by default.
        count: what to divide the sum by, if not by the number of counted tokens.
    """
    if mask_T is not None:
        classifier_logits_TC, class_T = classifier_logits_TC[mask_T], class_T[mask_T]
    divisor = max(class_T.shape[0], 1) if count is None else count
    return F.cross_entropy(classifier_logits_TC, class_T, reduction="sum") / divisor
