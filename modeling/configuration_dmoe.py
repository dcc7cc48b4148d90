"""DMoEConfig: the configuration in a DMoE checkpoint's config.json."""

from typing import ClassVar

from .expanded_config import ExpandedConfig


class DMoEConfig(ExpandedConfig):
    """Configuration of a model expanded by DMoE, with one expert for each group of languages in the expanded layers."""

    model_type = "dmoe"
    # The languages of each expert: `language_groups[e]` owns expert `e` of every expanded layer.
    language_groups: list[list[str]] | None = None
    not_told: ClassVar[str] = "all experts of a DMoE train, so it keeps no language of its base model"

    def _check_expansion(self) -> None:
        super()._check_expansion()
        if self.exclusive_experts:
            raise ValueError("exclusive_experts: all experts of a DMoE train together: leave it out.")
        groups = self.language_groups or []
        for layer, count in enumerate(self.num_experts_per_layer or []):
            if groups and count not in (1, len(groups)):
                raise ValueError(
                    f"num_experts_per_layer[{layer}] is {count}, but there are {len(groups)} language_groups."
                )


DMoEConfig.register_for_auto_class()
