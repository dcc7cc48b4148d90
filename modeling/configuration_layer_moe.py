"""LayerMoEConfig: the configuration in a LayerMoE (or MoE-LPR) checkpoint's config.json."""

from itertools import pairwise

from .expanded_config import ExpandedConfig


class LayerMoEConfig(ExpandedConfig):
    """Configuration of a model expanded by MoE-LPR, with one number of experts for all layers and no classifier, or by
    LayerMoE, with a number for each layer and classifiers in some layers."""

    model_type = "layer_moe"
    # `num_experts_per_layer` after each expansion before the last. The languages of expansion g are the classifiers'
    # class g.
    earlier_experts_per_layer: list[list[int]] | None = None

    def _check_expansion(self) -> None:
        super()._check_expansion()
        for number, (before, after) in enumerate(pairwise(self.counts_of_expansions), start=1):
            if len(before) != len(after) or any(a > b for a, b in zip(before, after, strict=True)):
                raise ValueError(
                    f"earlier_experts_per_layer: the layers had {before} experts after expansion {number}, and later "
                    f"{after}: a layer must not lose experts."
                )


LayerMoEConfig.register_for_auto_class()
