"""A folder for files that a step needs only while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.scratch import remove_work_folder, work_folder


@contextmanager
def scratch_folder(path: Path, makes: bool) -> Iterator[Path]:
    """An empty folder that is removed at the end; one that a killed process left is emptied first.

    Args:
        makes: this process, of several ranks, makes and removes it.

    Raises:
        InputError: something else lies there.
    """
    if makes:
        remove_work_folder(path)
        work_folder(path)
    try:
        yield path
    finally:
        if makes:
            remove_work_folder(path)
