"""DMoEConfig: what a DMoE checkpoint's config.json holds."""

from .expanded_config import ExpandedConfig


class DMoEConfig(ExpandedConfig):
    """Configuration of a model expanded by DMoE: in the expanded layers one expert for each group of languages.

    See `ExpandedConfig` for the other fields.

    Args:
        language_groups: the languages of each expert: `language_groups[e]` has expert `e` of every expanded layer.

    Raises:
        ValueError: an expanded layer has another number of experts than there are groups.
    """

    model_type = "dmoe"
    language_groups: list[list[str]] | None = None

    def _check_expansion(self) -> None:
        super()._check_expansion()
        if self.conditional_routing:
            raise ValueError("conditional_routing shares expert 0 among all tokens; DMoE's is a language group's own.")
        groups = self.language_groups or []
        for layer, count in enumerate(self.num_experts_per_layer or []):
            if groups and count not in (1, len(groups)):
                raise ValueError(
                    f"num_experts_per_layer[{layer}] is {count}, but language_groups has {len(groups)} groups: an "
                    "expanded layer has one expert a group."
                )


DMoEConfig.register_for_auto_class()
