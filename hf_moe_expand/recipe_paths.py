"""Fills environment variables into a recipe's paths."""

import os
import re
from typing import Any

from .errors import InputError


def unset_variable(text: str) -> str | None:
    """The first environment variable in `text` that is not set."""
    unset = re.search(r"\$\{?\w+\}?", os.path.expandvars(text))
    return unset.group() if unset else None


def filled_in(source: Any, where: str, unset_ok: bool) -> str:
    """A path or source with the values of its variables.

    Raises:
        InputError: `source` is not a text, or a variable is not set and `unset_ok` is false.
    """
    if not isinstance(source, str):
        raise InputError(f"{where}: {source!r} is not a file, a folder or hub:NAME.")
    if not unset_ok and (unset := unset_variable(source)):
        raise InputError(f"{where}: the environment variable {unset} is not set; set it, or write the path itself.")
    return os.path.expandvars(source)
