"""LayerMoEConfig: the configuration in a LayerMoE (or MoE-LPR) checkpoint's config.json."""

from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import Any

from .expanded_config import ExpandedConfig, ExpertKind, kind_of_settings


class LayerMoEConfig(ExpandedConfig):
    """Configuration of a model expanded by MoE-LPR or LayerMoE, which differ only in numbers.

    MoE-LPR has one number of experts for all layers and no classifier; LayerMoE has a number for each layer and
    classifiers in some layers. See `ExpandedConfig` for the other fields.

    Args:
        earlier_experts_per_layer: `num_experts_per_layer` after each expansion before the last; empty with one
            expansion. Expansion g added the languages of the classifiers' class g.
        packs: number of expansions of each language pack that the model joins; None if it joins none. The first
            expansions are those of the packs, in order.
        updates_of_packs: settings of each pack's experts: rank and alpha of LoRA experts, the width of added ones, None
            for FFNs; None where `expert_kind` holds for all packs.

    Raises:
        ValueError: a layer has fewer experts than after an earlier expansion, or the gate another number of classes.
    """

    model_type = "layer_moe"
    earlier_experts_per_layer: list[list[int]] | None = None
    packs: list[int] | None = None
    updates_of_packs: list[list[float] | None] | None = None

    def _check_expansion(self) -> None:
        super()._check_expansion()
        history = self._history
        for number, (before, after) in enumerate(pairwise(history), start=1):
            if len(before) != len(after) or any(a > b for a, b in zip(before, after, strict=True)):
                raise ValueError(
                    f"earlier_experts_per_layer: the layers had {before} experts after expansion {number}, and later "
                    f"{after}: a layer must not lose experts."
                )
        self._check_packs(len(history))
        if self.language_gate is not None and len(self.language_gate["languages"]) != len(history) + 1:
            raise ValueError(
                f"language_gate: languages has {len(self.language_gate['languages'])} classes, but the model has "
                f"{len(history) + 1}: the base's languages, and those of each expansion."
            )

    @property
    def _history(self) -> list[list[int]]:
        """The experts of each layer after each expansion."""
        return [*(self.earlier_experts_per_layer or []), self.num_experts_per_layer or []]

    def _check_packs(self, expansions: int) -> None:
        packs = self.packs
        if packs is not None and (not packs or min(packs) < 1 or sum(packs) > expansions):
            raise ValueError(
                f"packs is {packs}: must give the number of expansions of each language pack, of {expansions} in all."
            )
        if packs is not None and not self.exclusive_experts:
            raise ValueError(
                "packs: the checkpoint joins packs whose routers choose among all experts, of an earlier version: "
                "expand the base with exclusive experts for each language, and join those packs."
            )
        updates = self.updates_of_packs
        if updates is None:
            return
        if packs is None or len(updates) != len(packs) or sum(packs) != expansions:
            raise ValueError(
                f"updates_of_packs is {updates}: must give the settings of the experts of each of the packs {packs}."
            )
        try:
            names = {kind.name for kind in self.expert_kinds}
        except (TypeError, ValueError) as error:
            raise ValueError(f"updates_of_packs is {updates}: {error}") from None
        if "added" in names and len(names) > 1:
            raise ValueError(f"updates_of_packs is {updates}: added experts stand beside added experts alone.")

    def kind_of(self, layer: int, expert: int) -> ExpertKind:
        if self.updates_of_packs is None or expert == 0:
            return super().kind_of(layer, expert)
        ends = [self._history[end - 1][layer] for end in accumulate(self.packs or [])]
        return self.expert_kinds[bisect_right(ends, expert)]

    @property
    def expert_kinds(self) -> list[ExpertKind]:
        return (
            super().expert_kinds if self.updates_of_packs is None else [*map(kind_of_settings, self.updates_of_packs)]
        )


def joins_packs(config: Any) -> bool:
    """Whether a model joins language packs and was not expanded further since."""
    packs, earlier = getattr(config, "packs", None), getattr(config, "earlier_experts_per_layer", None)
    return packs is not None and sum(packs) == len(earlier or []) + 1


LayerMoEConfig.register_for_auto_class()
