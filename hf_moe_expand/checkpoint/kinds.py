"""The kinds of new experts: what an expansion makes, and what a configuration's parts say of them."""

from dataclasses import astuple, dataclass
from typing import Any, ClassVar

from ..modeling.language_modules import maps_of


@dataclass(frozen=True)
class ExpertKind:
    """FFNs of the backbone's class, copies of expert 0 at first.

    Attributes:
        name: `expert_kind`.
        names: arguments of a configuration, one for each field of the kind.
        has_ffn: whether the experts are FFNs of the backbone's own; else they have tensors that no dense model has.
        has_updates: whether some have low-rank updates, whose factors have no mean.
    """

    name: ClassVar[str] = "ffn"
    names: ClassVar[tuple[str, ...]] = ()
    has_ffn: ClassVar[bool] = True

    @property
    def has_updates(self) -> bool:
        return False

    @property
    def fields(self) -> dict[str, Any]:
        """Its arguments of a configuration."""
        return {"expert_kind": self.name, **dict(zip(self.names, astuple(self), strict=True))}

    @property
    def words(self) -> str:
        """The kind of the experts, in words."""
        return "FFNs"


@dataclass(frozen=True)
class LoraKind(ExpertKind):
    """Expert 0 with updates of rank `rank`, which are scaled by `alpha / rank`."""

    rank: int
    alpha: float
    name: ClassVar[str] = "lora"
    names: ClassVar[tuple[str, ...]] = ("lora_rank", "lora_alpha")
    has_ffn: ClassVar[bool] = False

    @property
    def has_updates(self) -> bool:
        return True

    @property
    def words(self) -> str:
        return f"expert 0 with updates of rank {self.rank}, alpha {self.alpha:g}"


@dataclass(frozen=True)
class AddedKind(ExpertKind):
    """Expert 0 and an FFN of width `width` beside it."""

    width: int
    name: ClassVar[str] = "added"
    names: ClassVar[tuple[str, ...]] = ("expert_width",)
    has_ffn: ClassVar[bool] = False

    @property
    def words(self) -> str:
        return f"expert 0 with an added FFN of width {self.width}"


@dataclass(frozen=True)
class AdapterKind(ExpertKind):
    """Low-rank updates of a layer's linear maps, one adapter for each expansion (`modeling/part_languages.py`)."""

    adapters: list[dict]
    name: ClassVar[str] = "adapter"
    names: ClassVar[tuple[str, ...]] = ("adapters",)
    has_ffn: ClassVar[bool] = False

    def maps(self, expansion: int, layer: int) -> dict[str, list | None]:
        """The updates of a layer by an expansion, which are numbered from 0."""
        return maps_of(self.adapters[expansion], layer)

    @property
    def _all(self) -> dict[str, list[list | None]]:
        """The updates, and None for whole modules, by the last part of a module's name."""
        found: dict[str, list[list | None]] = {}
        for entry in self.adapters:
            for maps in (entry["maps"], *entry.get("layers", {}).values(), *map(entry.get, ("outside", "head"))):
                for name, update in (maps or {}).items():
                    found.setdefault(name.rpartition(".")[2], []).append(update)
        return found

    @property
    def has_updates(self) -> bool:
        return any(update is not None for updates in self._all.values() for update in updates)

    @property
    def words(self) -> str:
        found = self._all
        updated = sorted(name for name, updates in found.items() if any(updates))
        whole = sorted(name for name, updates in found.items() if None in updates)
        ranks = sorted({update[0] for updates in found.values() for update in updates if update})
        parts = [f"updates of rank {', '.join(map(str, ranks))} on {', '.join(updated)}"] if updated else []
        return "; ".join([*parts, *([f"own {', '.join(whole)}"] if whole else [])])


KINDS: dict[str, type[ExpertKind]] = {kind.name: kind for kind in (ExpertKind, LoraKind, AddedKind, AdapterKind)}


def kind_of(config: Any, first: int = 0, end: int | None = None) -> ExpertKind:
    """The kind of the experts of the expansions from `first` to `end`, which are numbered from 0."""
    parts = config.parts
    if "languages" in parts:
        return AdapterKind(parts["languages"][first:end])
    for name, made in (("lora", LoraKind), ("added", AddedKind)):
        settings = parts.get(name, {"each": {first: None}})
        one = settings["each"][first] if "each" in settings else settings
        if one is not None:
            return made(**one)
    return ExpertKind()


def kinds_of(config: Any) -> list[ExpertKind]:
    """The kind of the experts of each expansion."""
    return [kind_of(config, number, number + 1) for number in range(len(config.counts_of_expansions))]


def set_part(config: Any, name: str, settings: Any) -> None:
    """Gives a configuration a part's settings; None takes the part away."""
    others = {part: value for part, value in config.parts.items() if part != name}
    config.parts = others if settings is None else {**others, name: settings}


def set_kinds(config: Any, kinds: list[ExpertKind]) -> None:
    """Gives a configuration the kinds of its expansions."""
    for name in ("lora", "added", "languages"):
        set_part(config, name, None)
    if kinds[0].name == "adapter":
        set_part(config, "languages", [one for kind in kinds for one in kind.adapters])  # type: ignore[attr-defined]
        return
    for name, made in (("lora", LoraKind), ("added", AddedKind)):
        each = [vars(kind) if isinstance(kind, made) else None for kind in kinds]
        if any(each):
            set_part(config, name, each[0] if all(one == each[0] for one in each) else {"each": each})
