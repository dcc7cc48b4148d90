"""Registers our model types with the Auto classes, without importing transformers before the user does."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_CONFIGS = "transformers.models.auto.configuration_auto"
_OURS = f"{__package__}.modeling"  # registers the classes when it is imported


def register_when_loaded() -> None:
    """Imports our classes once transformers has its Auto classes: now, or when that module is imported."""
    if _CONFIGS in sys.modules:
        importlib.import_module(_OURS)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds modules of transformers as all other finders do, and imports ours once the Auto classes are loaded.

    It waits for the end of the outermost import: before it, modules of transformers that ours need may be unfinished.
    """

    def __init__(self) -> None:
        self.finding = False
        self.depth = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.finding or not fullname.startswith("transformers."):
            return None
        self.finding = True
        try:
            spec = find_spec(fullname)
        finally:
            self.finding = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Watched(spec.loader, self)
        return spec

    def end(self) -> None:
        """Called at the end of an outermost import."""
        if _CONFIGS in sys.modules:
            sys.meta_path.remove(self)
            importlib.import_module(_OURS)


class _Watched(Loader):
    def __init__(self, loader: Any, watch: _Watch) -> None:
        self.loader, self.watch = loader, watch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.watch.depth += 1
        try:
            self.loader.exec_module(module)
        finally:
            self.watch.depth -= 1
        if not self.watch.depth and self.watch in sys.meta_path:
            self.watch.end()
