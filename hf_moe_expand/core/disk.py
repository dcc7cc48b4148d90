"""The bytes that a training or a run will write, against the room on its disk."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.filesize import decimal

from .errors import InputError, library_errors_at

DEFAULT_SHARD_SIZE = "5GB"


def peak(steps: Sequence[tuple[Path, int, int]]) -> int:
    """The most bytes that a run adds to its disk; steps up to the last one whose output exists are done. `steps` are of
    each checkpoint the folder, its bytes, and the most bytes beside it that the step removes at its end."""
    done = max((number for number, (output, *_) in enumerate(steps, start=1) if output.exists()), default=0)
    total = most = 0
    for output, size, beside in steps[done:]:
        total += size
        there = folder_bytes(output.with_name(f"{output.name}.training"))
        most = max(most, total + max(beside - there, 0))
    return most


def readable_size(size: float) -> str:
    """A number of bytes in a suitable unit: `93.4 MB`."""
    return decimal(int(size))


def free_bytes(path: Path) -> int:
    """Free bytes of the disk on which `path` is, or will be."""
    with library_errors_at(path, OSError):
        place = next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))
        return shutil.disk_usage(place).free


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder; 0 if there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def check_room(path: Path, needed: int, training: str = "") -> None:
    """Refuses work that would fill the disk; `training` says what a training needs the bytes for."""
    if needed > (free := free_bytes(path)):
        what, missing = training and f" for {training}", readable_size(needed - free)
        raise InputError(f"{path}: needs {readable_size(needed)}{what}, {missing} more than the disk has free.")
