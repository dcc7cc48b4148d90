"""What a configuration says of its model, dense or expanded: layers, experts, their kinds, languages and classes."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..core.languages import in_words
from ..modeling import count_layers, stack_sizes
from ..modeling.language_gate import GateRule
from ..modeling.part_joined import joins_packs
from ..modeling.parts import PARTS
from .records import History

# The fields of a configuration for each setting of a kind of experts.
_FIELDS = {"rank": "lora_rank", "alpha": "lora_alpha", "width": "expert_width", "adapters": "adapters"}


@dataclass(frozen=True)
class ExpertKind:
    """The kind of the experts of expansions.

    Attributes:
        name: `expert_kind`: `ffn`, FFNs of the backbone's class; `lora`, expert 0 with updates; `added`, expert 0 with
            an FFN beside it; or `adapter`, a language's own modules.
        settings: `rank` and `alpha` of `lora`; the `width` of `added`; `adapters`, the entries of each expansion.
    """

    name: str = "ffn"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """Its arguments of a configuration."""
        return {"expert_kind": self.name, **{_FIELDS[name]: value for name, value in self.settings.items()}}

    @property
    def _updates(self) -> dict[str, list[list | None]]:
        """An adapter's updates, and None for whole modules, by the last part of a module's name."""
        found: dict[str, list[list | None]] = {}
        for entry in self.settings["adapters"]:
            for maps in (entry["maps"], *entry.get("layers", {}).values(), *map(entry.get, ("outside", "head"))):
                for name, update in (maps or {}).items():
                    found.setdefault(name.rpartition(".")[2], []).append(update)
        return found

    @property
    def has_updates(self) -> bool:
        """Whether some have low-rank updates, whose factors have no mean."""
        return self.name == "lora" or (self.name == "adapter" and any(map(any, self._updates.values())))

    @property
    def words(self) -> str:
        """The kind in words."""
        if self.name == "ffn":
            return "FFNs"
        if self.name == "lora":
            return f"expert 0 with updates of rank {self.settings['rank']}, alpha {self.settings['alpha']:g}"
        if self.name == "added":
            return f"expert 0 with an added FFN of width {self.settings['width']}"
        found = self._updates
        updated = sorted(name for name, updates in found.items() if any(updates))
        whole = sorted(name for name, updates in found.items() if None in updates)
        ranks = sorted({update[0] for updates in found.values() for update in updates if update})
        parts = [f"updates of rank {', '.join(map(str, ranks))} on {', '.join(updated)}"] if updated else []
        return "; ".join([*parts, *([f"own {', '.join(whole)}"] if whole else [])])


def kind_of(config: Any, first: int = 0, end: int | None = None) -> ExpertKind:
    """The kind of the experts of the expansions from `first` to `end`, which are numbered from 0."""
    if "languages" in config.parts:
        return ExpertKind("adapter", {"adapters": deepcopy(config.parts["languages"][first:end])})
    for name in ("lora", "added"):
        settings = config.parts.get(name) or {}
        if one := settings["each"][first] if "each" in settings else settings:
            return ExpertKind(name, dict(one))
    return ExpertKind()


def set_part(config: Any, name: str, settings: Any) -> None:
    """Gives a configuration a part's settings, in the order of saved code; None takes the part away."""
    parts = {**config.parts, name: settings}
    config.parts = {part: parts[part] for part in PARTS if parts.get(part) is not None}


def set_kinds(config: Any, kinds: Sequence[ExpertKind]) -> None:
    """Gives a configuration the kinds of its expansions."""
    set_part(config, "languages", [one for kind in kinds for one in kind.settings.get("adapters", ())] or None)
    for name in ("lora", "added"):
        each = [kind.settings if kind.name == name else None for kind in kinds]
        is_one = all(one == each[0] for one in each)
        set_part(config, name, (each[0] if is_one else {"each": each}) if any(each) else None)


@dataclass(frozen=True)
class JoinedPack:
    """A language pack of a joined model: its languages, number of expansions, and kind of experts in words."""

    name: str
    languages: list[str]
    expansions: int
    experts: str

    def line(self) -> str:
        several = f", {self.expansions} expansions" if self.expansions > 1 else ""
        return f"{self.name}: {', '.join(in_words(self.languages))}; {self.experts}{several}"


class Facts:
    """What the configuration says; all lists of layers have an encoder's first.

    Attributes:
        classifiers: the layers with a classifier.
        exclusive: whether tokens of a new language take its experts alone.
        groups: the languages of each expert of a DMoE, none of another model; `group_of` is the group of each language.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.classifiers: list[int] = list(getattr(config, "classifier_layers", None) or [])
        self.exclusive = bool(getattr(config, "exclusive_experts", False))
        self.has_adapters = getattr(config, "expert_kind", None) == "adapter"
        self.groups: list[list[str]] = getattr(config, "language_groups", None) or []
        self.group_of = {code: number for number, group in enumerate(self.groups) for code in group}

    @cached_property
    def history(self) -> History:
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
        return stack_sizes(self.config).get("encoder", 0)

    @property
    def gate(self) -> GateRule | None:
        return GateRule.of(self.config)

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
        return [kind_of(self.config, number, number + 1) for number in range(len(self.config.counts_of_expansions))]

    @property
    def has_updates(self) -> bool:
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
        packs, first = [], 0
        for size in sizes if len(sizes) > 1 else ():  # one is no join
            own = self.history.expansions[first : first + size]
            codes = list(dict.fromkeys(code for record in own for code in record.new_languages))
            packs.append(JoinedPack(own[0].pack or "", codes, size, kind_of(self.config, first, first + size).words))
            first += size
        return packs
