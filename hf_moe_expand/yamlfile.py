"""Reads YAML files strictly: every error is one sentence with the line's number."""

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from .errors import InputError, first_line

# No file written by hand comes near these bounds. Aliases can make a file of a few lines arbitrarily large.
MOST_NODES = 1_000_000
MOST_LEVELS = 100
MOST_DIGITS = 100

_PREFIX = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*$|0o[0-7]+$|0x[0-9a-fA-F]+$")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's numbers (`3e-4` is one; `010` is ten; `1:30` and `2026-01-31` are text),
    without duplicate keys, and with bounds."""

    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.level == MOST_LEVELS:
            raise ComposerError(None, None, f"nested deeper than {MOST_LEVELS} levels", self.peek_event().start_mark)
        self.level += 1
        node = super().compose_node(parent, index)
        self.level -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)  # not yet merged with other mappings
        seen = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode) and key.tag != f"{_PREFIX}merge":
                if key.value in seen:
                    raise ComposerError(None, None, f"duplicate key `{key.value}`", key.start_mark)
                seen.add(key.value)
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _measure(node, {})
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            kind = node.tag.removeprefix(_PREFIX)
            raise ConstructorError(None, None, f"not a valid {kind} ({first_line(error)})", node.start_mark) from error

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict:
        for key, _ in node.value:
            if key.tag == f"{_PREFIX}bool":  # `no` is Norwegian
                key.tag = f"{_PREFIX}str"
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: ScalarNode) -> int:
        digits = self.construct_scalar(node).replace("_", "")
        if len(digits) > MOST_DIGITS:
            raise ValueError(f"{len(digits):,} digits")
        return int(digits, 0 if digits[:2] in ("0o", "0x") else 10)


def _measure(node: Node, sizes: dict[Node, int]) -> int:
    """The number of nodes in a node after its aliases are filled in; checks texts too."""
    if node in sizes:
        if not sizes[node]:
            raise ComposerError(None, None, "an alias inside the value that it names", node.start_mark)
        return sizes[node]
    sizes[node] = 0
    size = 1
    if isinstance(node, ScalarNode):
        try:
            node.value.encode()
        except UnicodeEncodeError:
            raise ComposerError(None, None, "half of a surrogate pair, which is not text", node.start_mark) from None
    elif isinstance(node, CollectionNode):
        for child in node.value:
            parts = child if isinstance(child, tuple) else (child,)
            size += sum(_measure(part, sizes) for part in parts)
            if size > MOST_NODES:
                problem = f"aliases that stand for over {MOST_NODES:,} values"
                raise ComposerError(None, None, problem, parts[0].start_mark)
    sizes[node] = size
    return size


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_PREFIX) not in ("int", "float", "timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_PREFIX}int", _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_PREFIX}float", _FLOAT, list("-+0123456789."))
_Loader.add_constructor(f"{_PREFIX}int", _Loader.construct_yaml_int)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping, loaded safely. Numbers are those of YAML 1.2.

    Raises:
        InputError: the file cannot be read, is not YAML or too large (the message gives the line), or holds no mapping.
    """
    return parse_mapping(read_text(path), path)


def parse_mapping(text: str, where: str | Path) -> dict[str, Any]:
    """As `read_yaml`, from a text; messages call it `where`."""
    value = parse_yaml(text, where)
    if not isinstance(value, dict):
        kind = "nothing" if value is None else type(value).__name__
        raise InputError(f"{where}: must hold `key: value` lines, found {kind}.")
    return value


def read_text(path: str | Path) -> str:
    """The text of a YAML file.

    Raises:
        InputError: the file cannot be read, or is not UTF-8 (with the line).
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}: not YAML: line {line}: not UTF-8 text ({error.reason}).") from None


def parse_yaml(text: str, where: str | Path) -> Any:
    """The value of a YAML text; messages call it `where`.

    Raises:
        InputError: the text is not YAML or too large; the message gives the line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        _refuse(where, line, f"the character #x{ord(text[error.position]):04x} is not allowed")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _refuse(where, mark.line + 1 if mark else 1, error.problem or error.context or "not understood")


def _refuse(where: str | Path, line: int, problem: str) -> NoReturn:
    raise InputError(f"{where}: not YAML: line {line}: {problem}.") from None
