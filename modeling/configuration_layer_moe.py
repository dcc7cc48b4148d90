"""LayerMoEConfig: what a LayerMoE (or MoE-LPR) checkpoint's config.json holds."""

from itertools import pairwise

from .expanded_config import ExpandedConfig


class LayerMoEConfig(ExpandedConfig):
    """Configuration of a model expanded by MoE-LPR or LayerMoE, which differ in numbers only.

    MoE-LPR has one expert count for all layers and no classifier; LayerMoE has a count for each layer and a
    classifier in some of them. See `ExpandedConfig` for the other fields.

    Args:
        earlier_experts_per_layer: `num_experts_per_layer` after each expansion before the last; empty with one
            expansion. Expansion g brought the languages of the classifiers' class g.

    Raises:
        ValueError: a layer had more experts than it has later.
    """

    model_type = "layer_moe"
    earlier_experts_per_layer: list[list[int]] | None = None

    def _check_expansion(self) -> None:
        super()._check_expansion()
        history = [*(self.earlier_experts_per_layer or []), self.num_experts_per_layer or []]
        for number, (before, after) in enumerate(pairwise(history), start=1):
            if len(before) != len(after) or any(a > b for a, b in zip(before, after, strict=True)):
                raise ValueError(
                    f"earlier_experts_per_layer: after expansion {number} there were {before} experts, and later "
                    f"{after}: a layer never loses any."
                )


LayerMoEConfig.register_for_auto_class()
