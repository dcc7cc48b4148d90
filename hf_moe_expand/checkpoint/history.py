"""What was done to a checkpoint, written into its configuration."""

from pathlib import PureWindowsPath
from typing import Any

from ..modeling import ExpandedConfig


def without_folders(value: Any) -> Any:
    """Settings as they may be published: of an absolute path the last part stays."""
    if isinstance(value, dict):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    absolute = isinstance(value, str) and (value.startswith(("/", "~")) or PureWindowsPath(value).is_absolute())
    return PureWindowsPath(value).name if absolute else value


def record(config: Any, entry: dict[str, Any]) -> None:
    """Adds an entry to the configuration's history: to the stages of an expanded model's last expansion, to the field
    `history` of a dense one. `entry["stage"]` names the step; no local paths."""
    if isinstance(config, ExpandedConfig):
        *earlier, last = config.expansions or [{"stages": []}]
        config.expansions = [*earlier, {**last, "stages": [*last["stages"], entry]}]
    else:
        config.history = [*(getattr(config, "history", None) or []), entry]
