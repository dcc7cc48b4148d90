"""Finds and shortens the paths of this machine in texts that are shown or published."""

import re
from pathlib import PureWindowsPath

from .yamlfile import scalars

_SEPARATORS = r"\s\"'`,;:\[\]{}()<>#"
_PATH = re.compile(rf"(?<![\w.$}}/\\~:-])(?:~|file:|[A-Za-z]:(?=[\\/]))?[\\/][^{_SEPARATORS}]*")


def without_paths(text: str) -> str:
    """Reduces each absolute path in a YAML text to its last part, in values (with spaces too) and comments."""
    for node in sorted(scalars(text), key=lambda node: -node.start_mark.index):
        begin, end = node.start_mark.index, node.end_mark.index
        written = text[begin:end]
        if node.style in (None, "'", '"') and _PATH.match(node.value):
            text = text[:begin] + written.replace(node.value, PureWindowsPath(node.value).name) + text[end:]
    return _PATH.sub(lambda match: PureWindowsPath(match.group()).name or match.group(), text)
