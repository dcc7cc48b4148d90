"""A folder for files that a step needs only while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.scratch import remove_work_folder, work_folder


@contextmanager
def scratch_folder(path: Path, makes: bool) -> Iterator[Path]:
    """Yields an empty folder that is removed at the end; a folder left by a killed process is emptied first.

    Args:
        makes: whether this process, of several ranks, creates and removes the folder.

    Raises:
        InputError: `path` exists and is not a work folder.
    """
    if makes:
        remove_work_folder(path)
        work_folder(path)
    try:
        yield path
    finally:
        if makes:
            remove_work_folder(path)
