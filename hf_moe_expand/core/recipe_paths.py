"""Paths in a recipe: environment variables are filled in, and paths of this machine are shortened for publication."""

import os
import re
from pathlib import PureWindowsPath
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo

from .errors import InputError
from .schema import Text

# What a run keeps of its recipe: the file as it was, and all values, with those that it inherits.
RECIPE, SETTINGS = "recipe.yaml", "settings.json"
_SEPARATORS = r"\s\"'`,;:\[\]{}()<>#"
_PATH = re.compile(rf"(?<![\w.$}}/\\~:-])(?:~|file:|[A-Za-z]:(?=[\\/]))?[\\/][^{_SEPARATORS}]*")


def unset_variable(text: str) -> str | None:
    """The first environment variable in `text` that is not set."""
    unset = re.search(r"\$\{?\w+\}?", os.path.expandvars(text))
    return unset.group() if unset else None


def filled_in(source: Any, unset_ok: bool = False) -> str:
    """A path or source, its variables filled in; refuses what is no text and, unless `unset_ok`, unset variables."""
    if not isinstance(source, str):
        raise InputError(f"{source!r} is not a file, a folder or hub:NAME.")
    if not unset_ok and (unset := unset_variable(source)):
        raise InputError(f"the environment variable {unset} is not set; set it, or write the path itself.")
    return os.path.expandvars(source)


def _from_file(value: Any, info: ValidationInfo) -> Any:
    """Variables are filled in where a recipe's file is read: the context has the arguments of `filled_in`."""
    return value if info.context is None else filled_in(value, **info.context)


# The type of a path or source in settings classes, which may hold `$VARIABLES` in a file.
Located = Annotated[Text, BeforeValidator(_from_file)]


def without_paths(text: str) -> str:
    """Reduces each absolute path in a YAML text to its last part, in values (with spaces too) and comments."""
    from .yamlfile import scalars  # slow to import, and not needed for `--help`

    for node in sorted(scalars(text), key=lambda node: -node.start_mark.index):
        begin, end = node.start_mark.index, node.end_mark.index
        written = text[begin:end]
        if node.style in (None, "'", '"') and _PATH.match(node.value):
            text = text[:begin] + written.replace(node.value, PureWindowsPath(node.value).name) + text[end:]
    return _PATH.sub(lambda match: PureWindowsPath(match.group()).name or match.group(), text)
