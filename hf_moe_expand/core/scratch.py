"""Temporary folders, what killed processes leave, and the lock of a folder in which one process at a time may work.

`.OUT.partial-PID-HOST` is an output in the making, a folder or a file; `.OUT.replaced-PID-HOST` is the folder that it
replaces, which is set aside between two renames; `.OUT.grown-PID-HOST` is the model that an adaptation trains. A work
folder carries a marker file, so that nothing but a work folder is ever removed.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname

from filelock import FileLock, Timeout
from psutil import pid_exists

from .errors import InputError, library_errors_at

MARKER = ".hf-moe-expand"
LOCK = ".hf-moe-expand.lock"
_KINDS = ("partial", "replaced", "grown", "gated")
_DAY = 24 * 60 * 60


def named(path: Path) -> Path:
    """`path`; the absolute path where its last part is no name (`.`, `..`)."""
    if path.name in ("", ".."):
        path = Path(os.path.abspath(path))
    if not path.name:
        raise InputError(f"{path}: is the root of the file system; give a folder in it.")
    return path


def sibling(out: Path, kind: str) -> Path:
    """The folder of this process beside `out`; `kind` is one of `_KINDS`."""
    out = named(out)
    return out.with_name(f".{out.name}.{kind}-{os.getpid()}-{gethostname()}")


def link(file: str, place: str) -> None:
    """The same file at another place, which is no symbolic link: those are refused in a checkpoint."""
    try:
        os.link(os.path.realpath(file), place)
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, place)


def restore(out: Path) -> None:
    """Puts back a folder that a process set aside if the process died before it replaced the folder."""
    if not os.path.lexists(out):
        for aside in _abandoned(out, "replaced"):
            with suppress(OSError):  # another process was faster
                os.rename(aside, out)
                return


def remove_leftovers(out: Path) -> None:
    """Removes folders that dead processes left beside `out`, after restoring `out` if one died while replacing it."""
    restore(out)
    for folder in (*_abandoned(out), *_abandoned(training_of(out), "partial")):
        shutil.rmtree(folder, ignore_errors=True)


def training_of(out: Path) -> Path:
    """The folder of the training checkpoints of `out`."""
    out = named(out)
    return out.with_name(f"{out.name}.training")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a file beside `path` to write, which is renamed to `path` on success and removed on failure. What killed
    processes left there is removed first."""
    partial = sibling(path, "partial")
    with library_errors_at(path, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in _abandoned(path, "partial"):
            with suppress(OSError):
                file.unlink()
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def last_step(out: Path) -> int:
    """The step of the last training checkpoint of `out`; 0 without one."""
    saved = [path.parent.name.rpartition("-")[2] for path in training_of(out).glob("checkpoint-*/trainer_state.json")]
    return max((int(number) for number in saved if number.isdecimal()), default=0)


def work_folder(path: str | os.PathLike) -> Path:
    """A folder for work in progress, with a marker file: a new one, or one that is ours already."""
    path = Path(path)
    with library_errors_at(path, OSError):
        if not os.path.lexists(path):
            path.mkdir(parents=True, exist_ok=True)
        if not is_work_folder(path):
            raise InputError(f"{path}: exists and is not a work folder of this program; move it away.")
        (path / MARKER).touch()
    return path


def remove_work_folder(path: str | os.PathLike) -> None:
    """Removes a work folder, if it exists."""
    path = Path(path)
    if not os.path.lexists(path):
        return
    if not is_work_folder(path):
        raise InputError(f"{path}: is not a work folder of this program, so it is not removed; move it away.")
    aside = sibling(path, "partial")  # a folder that was removed in part would look whole
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def scratch_folder(path: Path, makes: bool) -> Iterator[Path]:
    """Yields an empty folder (a `sibling`), which the rank that `makes` it removes at the end."""
    if makes:
        shutil.rmtree(path, ignore_errors=True)
        work_folder(path)
    try:
        yield path
    finally:
        if makes:
            shutil.rmtree(path, ignore_errors=True)


def is_work_folder(path: Path) -> bool:
    """Whether a folder carries the marker, or is empty: one that was just made."""
    is_folder = path.is_dir() and not path.is_symlink()
    return is_folder and ((path / MARKER).is_file() or not any(path.iterdir()))


def _abandoned(out: Path, kind: str = "|".join(_KINDS)) -> Iterator[Path]:
    """The folders and files of some kinds beside `out` whose process runs no more, the latest first."""
    out = named(out)
    pattern = re.compile(rf"\.{re.escape(out.name)}\.(?:{kind})-(\d{{1,9}})(?:-(.+))?")
    dated = []
    with suppress(OSError):
        for entry in os.scandir(out.parent):
            name = pattern.fullmatch(entry.name)
            if name and not entry.is_symlink():
                changed = entry.stat(follow_symlinks=False).st_ctime
                here = name[2] in (None, gethostname())
                # Processes of another machine cannot be seen from here.
                if not pid_exists(int(name[1])) if here else time.time() - changed > _DAY:
                    dated.append((changed, Path(entry.path)))
    return (path for _, path in sorted(dated, reverse=True))


class FolderLock:
    """The lock of a folder in which a process does some `work`: a file in it that names the process. The system
    releases it when the process ends, however it ends; a killed launcher may leave its processes at work."""

    def __init__(self, folder: Path, work: str) -> None:
        self.folder, self.work = folder, work
        self._file = folder / LOCK
        self._lock = FileLock(self._file, timeout=0)

    def acquire(self) -> None:
        """Takes the lock of an existing folder."""
        try:
            self._lock.acquire()
        except Timeout:
            owner = ""
            with suppress(OSError, ValueError):
                owner = self._file.read_text(encoding="utf-8").strip()
            raise InputError(
                f"{self.folder}: {owner or 'another process'} {self.work} already. Wait until it is done, or end it: "
                "ending a launcher such as `accelerate launch` may leave its processes at work."
            ) from None
        with suppress(OSError):  # the content is for people
            self._file.write_text(f"process {os.getpid()} on {gethostname()}\n", encoding="utf-8")

    def refuse_if_held(self) -> None:
        """Refuses a folder in which another process works; needs no folder."""
        if self._file.is_file():
            self.acquire()
            self._lock.release()

    def release(self) -> None:
        """Gives the lock back and removes its file, if this process holds it."""
        if self._lock.is_locked:
            self._file.unlink(missing_ok=True)
            self._lock.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, this process alone works in the folder, which is made if it is missing."""
        with library_errors_at(self.folder, OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.acquire()
        try:
            yield
        finally:
            self.release()
