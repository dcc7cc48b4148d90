"""LayerMoEConfig: what a LayerMoE (or MoE-LPR) checkpoint's config.json holds."""

from .expanded_config import ExpandedConfig


class LayerMoEConfig(ExpandedConfig):
    """Configuration of a model expanded by MoE-LPR or LayerMoE, which differ in numbers only.

    MoE-LPR has one expert count for all layers and no classifier; LayerMoE has a count for each layer and a
    classifier in some of them. See `ExpandedConfig` for the fields.
    """

    model_type = "layer_moe"


LayerMoEConfig.register_for_auto_class()
