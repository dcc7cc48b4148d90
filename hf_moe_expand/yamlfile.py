"""Reads YAML."""

import re
from pathlib import Path
from typing import Any

import yaml

from .errors import InputError


class _Loader(yaml.SafeLoader):
    """Reads 5e-5 as a number, as YAML 1.2 does; PyYAML's YAML 1.1 takes it for text. Refuses a duplicate key."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)  # before other mappings are merged into it
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.composer.ComposerError(None, None, f"duplicate key `{twice[0]}`", node.start_mark)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping, loaded safely.

    Raises:
        InputError: the file is missing, is not YAML (with the line), or holds something else.
    """
    try:
        value = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {error}.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold `key: value` lines, found {type(value).__name__}.")
    return value
