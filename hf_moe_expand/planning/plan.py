"""The plan: a small JSON file that says which layer gets what."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..jsonfile import read_json, write_json
from ..schema import read
from .grouping import check_groups


@dataclass(frozen=True)
class Plan:
    """What `expand` is to do.

    Attributes:
        method: `layer-moe`, `uniform`, `mola`, `random` or `dmoe`.
        experts_per_layer: experts of each layer, expert 0 counted; 1 = the layer stays dense.
        classifier_layers: layers with a routing classifier.
        top_k: active experts a token.
        old, new: the languages.
        settings: what the counts were made from (total, seed, shape, similarities).
        groups: `dmoe` only: expert `e` of every expanded layer belongs to the languages of group `e`.
        grows_from: `experts_per_layer` of the model that a further expansion grows; empty for a dense one.
    """

    method: str
    experts_per_layer: list[int]
    classifier_layers: list[int] = field(default_factory=list)
    top_k: int = 2
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    grows_from: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.experts_per_layer or min(self.experts_per_layer) < 1:
            raise InputError("experts_per_layer must give every layer at least 1 expert.")
        if max(self.experts_per_layer) < 2:
            raise InputError("experts_per_layer is 1 everywhere: no layer would be expanded.")
        for layer in self.classifier_layers:
            if not 0 <= layer < len(self.experts_per_layer) or self.experts_per_layer[layer] < 2:
                raise InputError(f"classifier_layers names layer {layer}, which has no router in this plan.")
        if self.grows_from and (
            len(self.grows_from) != len(self.experts_per_layer)
            or any(a > b for a, b in zip(self.grows_from, self.experts_per_layer, strict=True))
        ):
            raise InputError("grows_from: a layer of experts_per_layer has fewer experts than the model that it grows.")
        if (self.method == "dmoe") != bool(self.groups):
            raise InputError("groups: a dmoe plan names the languages of each expert; no other plan has groups.")
        if self.groups:
            self._check_groups()

    def _check_groups(self) -> None:
        check_groups(self.groups)
        for layer, count in enumerate(self.experts_per_layer):
            if count not in (1, len(self.groups)):
                raise InputError(
                    f"experts_per_layer gives layer {layer} {count} experts, but there are {len(self.groups)} groups: "
                    "an expanded layer has one expert a group."
                )
        if self.classifier_layers:
            raise InputError("classifier_layers: a dmoe plan has no classifiers; its routers learn the groups.")

    @property
    def total_experts(self) -> int:
        """Experts of all layers, expert 0 counted."""
        return sum(self.experts_per_layer)

    def save(self, path: str | Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads `plan.json`.

        Raises:
            InputError: the file is missing, is not a plan, or contradicts itself.
        """
        value = read_json(path, "a plan")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(value) - known):
            raise InputError(f"{path}: unknown keys {', '.join(unknown)}; a plan has {', '.join(sorted(known))}.")
        if missing := sorted({"method", "experts_per_layer"} - set(value)):
            raise InputError(f"{path}: not a plan: {', '.join(missing)} is missing.")
        return read(cls, value, str(path))
