"""Reads YAML 1.2 strictly, and writes it: every error is one sentence, with the line's number where it is known."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import CollectionNode, Node, ScalarNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter

from .errors import InputError, in_one_line
from .jsonfile import read_text

# No file written by hand comes near this number. Aliases can make a file of a few lines arbitrarily large.
MOST_VALUES = 1_000_000


class _Constructor(SafeConstructor):
    """Dates stay text: JSON has none."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


class _Representer(SafeRepresenter):
    """Floats are numbers for readers of YAML 1.1, too: `5.0e-05`."""

    def represent_float(self, data: float) -> ScalarNode:
        node = super().represent_float(data)
        node.value = re.sub(r"^(-?\d+)e", r"\1.0e", node.value)
        return node


_Representer.add_representer(float, _Representer.represent_float)


def _yaml() -> YAML:
    made: Any = YAML(typ="safe", pure=True)
    made.Constructor, made.Representer = _Constructor, _Representer
    made.default_flow_style = False
    made.sort_base_mapping_type_on_output = False
    made.width = 120
    return made


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping, loaded safely."""
    return parse_mapping(read_text(path), path)


def parse_mapping(text: str, where: str | Path) -> dict[str, Any]:
    """As `read_yaml`, from a text; messages call it `where`."""
    value = parse_yaml(text, where)
    if not isinstance(value, dict):
        kind = "nothing" if value is None else type(value).__name__
        raise InputError(f"{where}: must hold `key: value` lines, found {kind}.")
    return value


def parse_yaml(text: str, where: str | Path) -> Any:
    """The value of a YAML text; messages call it `where`."""
    try:
        value = _yaml().load(text)
        if _size(value, {}) > MOST_VALUES:
            raise ValueError(f"aliases that stand for over {MOST_VALUES:,} values")
        json.dumps(value, ensure_ascii=False, default=str).encode()  # what no file of ours could hold
        return value
    except (YAMLError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = (
            mark.line + 1 if mark else text.count("\n", 0, error.position) + 1 if isinstance(error, ReaderError) else 0
        )
        words = getattr(error, "problem", None) or getattr(error, "context", None) or in_one_line(error)
        problem = f"line {line}: {words}" if line else words
    raise InputError(f"{where}: not YAML: {problem}.") from None


def _size(value: Any, sizes: dict[int, int]) -> int:
    """The number of values after the aliases are filled in; too large a one for a value inside itself."""
    if not isinstance(value, list | dict | set):
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = MOST_VALUES
        parts = (*value, *value.values()) if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(value)]


def to_yaml(value: Any) -> str:
    """A value as YAML, in blocks, keys in their order."""
    out = io.StringIO()
    _yaml().dump(value, out)
    return out.getvalue()


def scalars(text: str) -> Iterator[ScalarNode]:
    """The keys and values of a YAML text that are no collections, with their places in it; none where it is no YAML."""
    try:
        nodes: list[Node] = [_yaml().compose(text)]
    except YAMLError:
        return
    while nodes:
        node = nodes.pop()
        if isinstance(node, ScalarNode):
            yield node
        elif isinstance(node, CollectionNode):
            nodes += [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
