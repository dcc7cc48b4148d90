"""What a configuration says of its model, dense or expanded: layers, experts, kinds, languages and their classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from ..core.languages import in_words
from ..modeling import count_layers, stack_sizes
from ..modeling.language_gate import GateRule
from ..modeling.part_joined import joins_packs
from .kinds import ExpertKind, kind_of, kinds_of
from .records import History


@dataclass(frozen=True)
class JoinedPack:
    """A language pack of a joined model.

    Attributes:
        name: folder or hub id.
        languages: those that it adds.
        expansions: number of its expansions.
        experts: the kind of its experts, in words.
    """

    name: str
    languages: list[str]
    expansions: int
    experts: str

    def line(self) -> str:
        several = f", {self.expansions} expansions" if self.expansions > 1 else ""
        return f"{self.name}: {', '.join(in_words(self.languages))}; {self.experts}{several}"


@dataclass(frozen=True)
class Facts:
    """What the configuration says; all lists of layers have an encoder's first."""

    config: Any

    @cached_property
    def history(self) -> History:
        """The expansions, in order; none of a dense model."""
        return History.of(self.config)

    @property
    def counts(self) -> list[int]:
        """The experts of each layer, expert 0 counted."""
        return list(getattr(self.config, "num_experts_per_layer", None) or [1] * count_layers(self.config))

    @property
    def grown(self) -> list[int]:
        """The layers with new experts."""
        return [layer for layer, count in enumerate(self.counts) if count > 1]

    @property
    def encoder_layers(self) -> int:
        """Number of the encoder's layers; 0 of a decoder."""
        return stack_sizes(self.config).get("encoder", 0)

    @property
    def classifiers(self) -> list[int]:
        """The layers with a classifier."""
        return list(getattr(self.config, "classifier_layers", None) or [])

    @property
    def exclusive(self) -> bool:
        """Whether tokens of a new language take its experts alone."""
        return bool(getattr(self.config, "exclusive_experts", False))

    @property
    def gate(self) -> GateRule | None:
        """The language gate."""
        return GateRule.of(self.config)

    @property
    def groups(self) -> list[list[str]]:
        """The languages of each expert of a DMoE; none of another model."""
        return getattr(self.config, "language_groups", None) or []

    @property
    def group_of(self) -> dict[str, int]:
        """The group of each language of a DMoE."""
        return {code: number for number, group in enumerate(self.groups) for code in group}

    @property
    def languages(self) -> tuple[list[str], list[str]]:
        """The languages before the last expansion, and those that it added, in the order of a DMoE's groups. The packs
        of a joined model count as one expansion."""
        last = self.history.last
        if joins_packs(self.config):
            old = self.history.first.old_languages
            return old, [code for code in self.history.languages if code not in old]
        new = [code for code in self.group_of if code not in last.old_languages]
        return last.old_languages, new if self.groups else last.new_languages

    @property
    def kinds(self) -> list[ExpertKind]:
        """The kind of the experts of each expansion."""
        return kinds_of(self.config)

    @property
    def has_adapters(self) -> bool:
        """Whether its experts are adapters."""
        return getattr(self.config, "expert_kind", None) == "adapter"

    @property
    def has_updates(self) -> bool:
        """Whether languages have low-rank updates of modules."""
        return any(kind.has_updates for kind in self.kinds)

    @property
    def sizes(self) -> list[int]:
        """Number of expansions of each pack that it joins, and of the growth since; of all where it joins none."""
        joined = list(getattr(self.config, "packs", None) or [])
        grown = len(self.history) - sum(joined)
        return [*joined, grown] if grown else joined

    @property
    def packs(self) -> list[JoinedPack]:
        """The language packs that it joins."""
        sizes: Sequence[int] = getattr(self.config, "packs", None) or []
        sizes, packs = sizes if len(sizes) > 1 else [], []  # one is no join
        for size, end in zip(sizes, accumulate(sizes), strict=True):
            own = self.history.expansions[end - size : end]
            codes = list(dict.fromkeys(code for record in own for code in record.new_languages))
            kind = kind_of(self.config, end - size, end)
            packs.append(JoinedPack(own[0].pack or "", codes, size, kind.words))
        return packs
