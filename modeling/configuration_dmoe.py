"""DMoEConfig: the configuration in a DMoE checkpoint's config.json."""

from .expanded_config import ExpandedConfig

REFUSED = {("dmoe", "conditional"): "conditional_routing shares expert 0, which in DMoE belongs to a group"}


class DMoEConfig(ExpandedConfig):
    """Configuration of a model expanded by DMoE, with one expert for each group of languages in the expanded layers.

    See `ExpandedConfig` for the other fields.

    Args:
        language_groups: the languages of each expert: `language_groups[e]` owns expert `e` of every expanded layer.

    Raises:
        ValueError: the number of experts in an expanded layer is not the number of groups.
    """

    model_type = "dmoe"
    language_groups: list[list[str]] | None = None

    def _check_expansion(self) -> None:
        super()._check_expansion()
        if self.conditional_routing:
            raise ValueError(f"{REFUSED['dmoe', 'conditional']}: leave it out.")
        if self.is_encoder_decoder:
            raise ValueError(
                "A DMoE is made of a decoder: each of its experts learns the text of one language group, but a pair of "
                "sentences has two languages, and so may have two groups. Expand an encoder-decoder by another method."
            )
        if self.language_gate is not None or self.exclusive_experts:
            raise ValueError(
                "language_gate and exclusive_experts: all experts of a DMoE train, so that nothing can be sent home: "
                "leave them out."
            )
        groups = self.language_groups or []
        for layer, count in enumerate(self.num_experts_per_layer or []):
            if groups and count not in (1, len(groups)):
                raise ValueError(
                    f"num_experts_per_layer[{layer}] is {count}, but language_groups has {len(groups)} groups: an "
                    "expanded layer needs one expert for each group."
                )


DMoEConfig.register_for_auto_class()
