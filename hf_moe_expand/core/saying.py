"""Tells the user on the screen what happens beside a result."""

import os
import sys
from functools import cache

from tqdm.auto import tqdm

from .errors import printable


@cache
def say_once(line: str) -> None:
    """Prints a line once to the error stream, between progress bars; under a launcher, the first rank does."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(printable(line), file=sys.stderr)
