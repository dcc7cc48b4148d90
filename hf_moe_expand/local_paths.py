"""Finds and shortens the paths of this machine in texts that are shown or published."""

import re
from collections.abc import Iterator
from pathlib import PureWindowsPath
from typing import Any

import yaml

_SEPARATORS = r"\s\"'`,;:\[\]{}()<>#"
_PATH = re.compile(rf"(?<![\w.$}}/\\~:-])(?:~|file:|[A-Za-z]:(?=[\\/]))?[\\/][^{_SEPARATORS}]*")


def without_paths(text: str) -> str:
    """Reduces each absolute path in a YAML text to its last part, in values (with spaces too) and comments."""
    try:
        scalars = list(_scalars(yaml.compose(text, yaml.SafeLoader)))
    except yaml.YAMLError:
        scalars = []
    for node in sorted(scalars, key=lambda node: -node.start_mark.index):
        begin, end = node.start_mark.index, node.end_mark.index
        written = text[begin:end]
        if node.style in (None, "'", '"') and _PATH.match(node.value):
            text = text[:begin] + written.replace(node.value, PureWindowsPath(node.value).name) + text[end:]
    return _PATH.sub(lambda match: PureWindowsPath(match.group()).name or match.group(), text)


def _scalars(node: Any) -> Iterator[Any]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item)
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for item in pair:
                yield from _scalars(item)
