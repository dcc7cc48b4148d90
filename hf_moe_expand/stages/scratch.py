"""A folder of ours for what a step needs only while it runs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import InputError

MARKER = ".hf-moe-expand"


@contextmanager
def scratch_folder(path: Path, makes: bool) -> Iterator[Path]:
    """A folder that is removed at the end; what an earlier process left there is removed first.

    Args:
        makes: this process, of several ranks, makes and removes it.

    Raises:
        InputError: the folder exists, and is not one that this function made.
    """
    if makes:
        if path.exists() and not (path / MARKER).is_file():
            raise InputError(f"{path}: exists, but is needed as a folder for temporary files: move or delete it.")
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        (path / MARKER).touch()
    try:
        yield path
    finally:
        if makes:
            shutil.rmtree(path, ignore_errors=True)
