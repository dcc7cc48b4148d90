"""What a token uses of a mixture of experts of the backbone's own."""

from typing import Any

from ..modeling.expanded_ffn import ExpandedFFN

# The names that configurations have for the number of a mixture's experts that a token takes.
_ACTIVE = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
    "expert_num_selected",
)  # fmt: skip


def idle_in_mixture(block: Any, config: Any) -> int:
    """Weights of a mixture of experts of the backbone's own, or of an `ExpandedFFN` around one, that a token does not
    use. 0 where the configuration does not say how many experts a token takes."""
    mixture = block.experts[0] if isinstance(block, ExpandedFFN) else block
    active = next((count for name in _ACTIVE if isinstance(count := getattr(config, name, None), int)), None)
    fused = [parameter for parameter in mixture.parameters() if parameter.dim() > 2]
    if active is None:
        return 0
    return sum(p.numel() // p.shape[0] * max(0, p.shape[0] - active) for p in fused)
