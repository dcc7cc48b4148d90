"""Paths in a recipe: environment variables are filled in, and paths of this machine are shortened for publication."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PureWindowsPath
from typing import Any

from .errors import InputError
from .yamlfile import scalars

_SEPARATORS = r"\s\"'`,;:\[\]{}()<>#"
_PATH = re.compile(rf"(?<![\w.$}}/\\~:-])(?:~|file:|[A-Za-z]:(?=[\\/]))?[\\/][^{_SEPARATORS}]*")


def unset_variable(text: str) -> str | None:
    """The first environment variable in `text` that is not set."""
    unset = re.search(r"\$\{?\w+\}?", os.path.expandvars(text))
    return unset.group() if unset else None


def filled_in(source: Any, where: str, unset_ok: bool) -> str:
    """A path or source with the values of its variables; refuses what is no text and, unless `unset_ok`, variables that
    are not set."""
    if not isinstance(source, str):
        raise InputError(f"{where}: {source!r} is not a file, a folder or hub:NAME.")
    if not unset_ok and (unset := unset_variable(source)):
        raise InputError(f"{where}: the environment variable {unset} is not set; set it, or write the path itself.")
    return os.path.expandvars(source)


def fill_in(value: Any, place: Sequence[str], where: str, unset_ok: bool) -> Any:
    """A recipe's value with variables filled in at one place, if it has that place.

    Args:
        place: keys, from the outermost; `*` stands for each entry of a list, or for each language of a mapping.
        where: prefix of the messages: the file, and the keys so far.

    Raises:
        InputError: see `filled_in`; or a language's code is not a text.
    """
    if not place:
        return filled_in(value, where, unset_ok)
    key, *rest = place
    if isinstance(value, list) and key == "*":
        return [fill_in(entry, rest, f"{where}[{number}]", unset_ok) for number, entry in enumerate(value)]
    if not isinstance(value, Mapping) or (key != "*" and key not in value):
        return value
    if wrong := [code for code in value if key == "*" and not isinstance(code, str)]:
        raise InputError(f"{where}: {wrong[0]!r} is no language code.")
    if not rest and key != "*" and not isinstance(value[key], str):
        return value  # the check of the recipe says what is wrong
    glue = "." if ": " in where else ": "
    names = value if key == "*" else [key]
    return {**value, **{name: fill_in(value[name], rest, f"{where}{glue}{name}", unset_ok) for name in names}}


def without_paths(text: str) -> str:
    """Reduces each absolute path in a YAML text to its last part, in values (with spaces too) and comments."""
    for node in sorted(scalars(text), key=lambda node: -node.start_mark.index):
        begin, end = node.start_mark.index, node.end_mark.index
        written = text[begin:end]
        if node.style in (None, "'", '"') and _PATH.match(node.value):
            text = text[:begin] + written.replace(node.value, PureWindowsPath(node.value).name) + text[end:]
    return _PATH.sub(lambda match: PureWindowsPath(match.group()).name or match.group(), text)
