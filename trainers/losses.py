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


def gate_budget_loss(
    router_logits_TN: torch.Tensor,
    budget: float,
    mask_T: torch.Tensor | None = None,
    count: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """`L_budget = mean_t |g(x_t) - b|` of conditional routing (Elbayad et al. Eq. 7).

    Args:
        router_logits_TN: of a layer with a gate: the score of expert 0, the shared one, is `1 - g`.
        budget: b, the share of the routed experts.
        mask_T: which tokens count; all by default.
        count: what to divide the sum by, if not by the number of counted tokens.
    """
    distance_T = (1 - router_logits_TN.softmax(-1)[:, 0] - budget).abs()
    if mask_T is not None:
        distance_T = distance_T[mask_T]
    divisor = max(distance_T.shape[0], 1) if count is None else count
    return distance_T.sum() / divisor


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


def language_importance(router_logits_TN: torch.Tensor, old_T: torch.Tensor, new_T: torch.Tensor) -> torch.Tensor:
    """`[2, N]`: each expert's scores, summed over the tokens of old and of new languages."""
    masks_2T = torch.stack([old_T, new_T]).to(router_logits_TN.dtype)
    return masks_2T @ router_logits_TN.softmax(-1)


def localized_balance_loss(
    router_logits_TN: torch.Tensor,
    old_T: torch.Tensor,
    new_T: torch.Tensor,
    delta: float = 0.1,
    importance_2N: torch.Tensor | None = None,
    tokens_2: torch.Tensor | None = None,
) -> torch.Tensor:
    """`L_lbc = variance(Z) / mean(Z)`, `Z = I * Q`: LoRAMoE's localized balancing constraint (Dou et al. 2024).

    The first `N // 2` experts are the old languages' half (expert 0 is one of them), the others the new ones'.
    `Q_nm = N * mean over m's tokens of G_n`, the importance of expert n to the languages m (old or new), 1 under even
    routing. `I_nm` is `1 - delta` where n is of m's half, else `1 + delta`. The loss is 0 where Z is constant: inside a
    half all experts count alike, and m's own half counts `(1 + delta) / (1 - delta)` times the other.

    Args:
        old_T, new_T: bool, the tokens of old and of new languages. Languages without tokens do not count.
        delta: how uneven the halves are, at least 0 and less than 1.
        importance_2N, tokens_2: `language_importance` and the numbers of tokens over all ranks of a distributed run.
            The result is then this rank's share, and the sum of the ranks' results is the loss of all their tokens.
    """
    N = router_logits_TN.shape[-1]
    here_2N = language_importance(router_logits_TN, old_T, new_T)
    here_2 = torch.stack([old_T.sum(), new_T.sum()]).to(here_2N)
    # The loss is not linear in the tokens: its slope is that at all ranks' sums, its argument's change is local.
    all_2N = here_2N if importance_2N is None else importance_2N + here_2N - here_2N.detach()
    all_2 = here_2 if tokens_2 is None else tokens_2.to(here_2)
    is_own_2N = (torch.arange(N, device=here_2N.device) >= N // 2) == torch.tensor([[False], [True]]).to(here_2N.device)
    Z_2N = (1 + delta - 2 * delta * is_own_2N) * N * all_2N / all_2.clamp(min=1).unsqueeze(-1)
    Z = Z_2N[all_2 > 0]
    if not Z.numel():
        return here_2N.sum() * 0
    loss = Z.var(correction=0) / Z.mean()
    share = here_2.sum() / all_2.sum()
    return loss - (1 - share) * loss.detach()
