"""What was done to a checkpoint, written into its configuration."""

from typing import Any

from ..modeling import ExpandedConfig


def record(config: Any, entry: dict[str, Any]) -> None:
    """Adds an entry to the configuration's history: to the stages of an expanded model's last expansion, to the field
    `history` of a dense one. `entry["stage"]` names the step; no local paths."""
    if isinstance(config, ExpandedConfig):
        *earlier, last = config.expansions or [{"stages": []}]
        config.expansions = [*earlier, {**last, "stages": [*last["stages"], entry]}]
    else:
        config.history = [*(getattr(config, "history", None) or []), entry]
