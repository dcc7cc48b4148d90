"""A lock on a folder in which one process at a time may work."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import NoReturn

from filelock import FileLock, Timeout

from .errors import InputError

LOCK = ".hf-moe-expand.lock"


class FolderLock:
    """The lock of a folder, a file in it that names the process. The system releases it when the process ends, however
    it ends; a launcher that was killed may leave its processes at work.

    Args:
        folder: the folder.
        work: what the process does there, for the message.
    """

    def __init__(self, folder: Path, work: str) -> None:
        self.folder, self.work = folder, work
        self._file = folder / LOCK
        self._lock = FileLock(self._file, timeout=0)

    def acquire(self) -> None:
        """Takes the lock of an existing folder.

        Raises:
            InputError: another process holds it; the message names the process.
        """
        try:
            self._lock.acquire()
        except Timeout:
            self._refuse()
        # The content is for people: a process that waits never empties the file.
        with suppress(OSError):
            self._file.write_text(f"{os.getpid()} {gethostname()} {' '.join(sys.argv)}\n", encoding="utf-8")

    def refuse_if_held(self) -> None:
        """Refuses a folder in which another process works; needs no folder.

        Raises:
            InputError: see `acquire`.
        """
        if self._file.is_file():
            try:
                self._lock.acquire()
            except Timeout:
                self._refuse()
            self._lock.release()

    def release(self) -> None:
        """Gives the lock back and removes its file, if this process holds it."""
        if self._lock.is_locked:
            self._file.unlink(missing_ok=True)
            self._lock.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, this process alone works in the folder, which is made if it is missing.

        Raises:
            InputError: see `acquire`; or the folder cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.acquire()
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be written ({error.strerror}).") from error
        try:
            yield
        finally:
            self.release()

    def _refuse(self) -> NoReturn:
        words: list[str] = []
        with suppress(OSError, ValueError):
            words = self._file.read_text(encoding="utf-8").split(" ", 2)
        who = f"process {words[0]} on {words[1]}" if len(words) > 1 else "another process"
        ends = f" (`kill {words[0]}`)" if words and words[0].isdecimal() else ""
        raise InputError(
            f"{self.folder}: {who} {self.work} already. Wait until it is done, or end it{ends}: ending a launcher such "
            "as `accelerate launch` may leave its processes at work."
        ) from None
