"""Conditional routing (Elbayad et al. 2022): expert 0 is shared by all tokens, and a gate weighs the routed experts
1..N-1 for each token.

Shape suffixes as in `routing.py`.
"""

import torch
import torch.nn.functional as F

from .routing import Scores


class ConditionalGate(Scores):
    """`w x`, `[T, h] -> [T, 1]`; its sigmoid is the share of the routed experts in a token's output.

    Starts at zero: one half.
    """


def with_shared_expert(logits_TN: torch.Tensor, gate_logits_T: torch.Tensor) -> torch.Tensor:
    """Router logits of a layer with conditional routing, whose softmax is each expert's share: `1 - g` for expert 0,
    the shared one, and `g G_i` for the others, with `g = sigmoid(gate_logits)` (Elbayad et al. Eq. 4) and the scores G
    over the routed experts 1..N-1."""
    shared_T1 = F.logsigmoid(-gate_logits_T).unsqueeze(-1)
    routed_TN = F.logsigmoid(gate_logits_T).unsqueeze(-1) + logits_TN[:, 1:].log_softmax(-1)
    return torch.cat([shared_T1, routed_TN], -1)


def beside_shared(
    logits_TN: torch.Tensor, weights_TK: torch.Tensor, index_TK: torch.Tensor, closed_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Conditional routing (Elbayad et al. Eq. 5): `y = (1 - g) E_0(x) + g sum_k weight_k E_k(x)`.

    Args:
        logits_TN: see `with_shared_expert`.
        weights_TK, index_TK: weights and indices of the routed experts, numbered from 0.
        closed_T: bool, the tokens whose gate g is 0.

    Returns:
        weights `[T, 1 + K]` and expert indices `[T, 1 + K]`, expert 0 first; index N where no expert runs.
    """
    gate_T1 = 1 - logits_TN[:, :1].exp()
    if closed_T is not None:
        gate_T1 = gate_T1.masked_fill(closed_T.unsqueeze(-1), 0)
    index_TK = (index_TK + 1).masked_fill(gate_T1 == 0, logits_TN.shape[-1])
    return (
        torch.cat([1 - gate_T1, gate_T1 * weights_TK], -1),
        torch.cat([torch.zeros_like(index_TK[:, :1]), index_TK], -1),
    )
