"""Files at any place that `fsspec` reaches (`s3://`, `gs://`, `file://`): they are listed, opened, and opened again
where a connection breaks off. The user's own credentials open them: an address that holds some is refused."""

import glob
import os
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from ..core.errors import InputError
from ..core.private import in_one_line

WAITS = (1, 2, 4, 8, 16)  # seconds before each new try to open or read a file elsewhere
PATIENCE = 60  # seconds; a try may take longer, since some stores' tools try again themselves
BUFFER = 1 << 20  # bytes
_SECRET = re.compile(
    r"://[^/\s:@]+:(?!\d+/)\S*@|[?&][^=/&]*(token|sig|key|secret|password|credential)[^=/&]*=", re.IGNORECASE
)
# Errors that another try does not mend.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ImportError)


class UnreachableError(InputError):
    """A place that does not answer, also after some time."""


def is_elsewhere(source: str) -> bool:
    """Whether a source is an address for `fsspec`."""
    return "://" in source and not source.startswith("hub:")


def check_address(source: str) -> None:
    """Refuses an address with a password or a token, which would reach records and logs, and a chain of addresses."""
    if "::" in source and is_elsewhere(source):
        raise InputError(f"{source}: chains of addresses (`::`) are not read: give the file's own address.")
    if "://" in source and _SECRET.search(source):
        shown = re.split(r"[?&]", re.sub(r"://\S*@", "://***@", source))[0]
        raise InputError(
            f"{shown}: the address holds credentials: leave them out, and give them as its store's own tools read them "
            "(environment variables, or a file in your home folder)."
        )


def has_pattern(source: str) -> bool:
    """Whether a source is a pattern of several files."""
    return glob.has_magic(source)


def files_elsewhere(source: str) -> dict[str, int | None]:
    """The address of each file of a folder, of a pattern, or of the file itself, in order, and its size in bytes.

    Raises:
        InputError: the place cannot be reached, or has no such file.
    """
    found = _retried(lambda: _listed(source), source)
    if not found:
        raise InputError(f"{source}: no such file: check the address.")
    return found


def _listed(source: str) -> dict[str, int | None]:
    files, path = fsspec.core.url_to_fs(source)
    files.invalidate_cache()
    if has_pattern(source):
        found: dict[str, Any] = files.glob(path, detail=True)
    elif files.isdir(path):
        found = files.find(path, detail=True)
    else:
        found = {path: files.info(path)}
    return {
        files.unstrip_protocol(name): info.get("size")
        for name, info in sorted(found.items())
        if info.get("type") != "directory"
    }


@contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO, int]]:
    """An open file, here or elsewhere, and its size in bytes.

    Raises:
        InputError: a file elsewhere cannot be reached.
    """
    if not is_elsewhere(path):
        with open(path, "rb") as file:
            yield file, os.path.getsize(path)
        return
    remote = _Elsewhere(path)
    with BufferedReader(remote, BUFFER) as buffered:
        yield buffered, remote.size  # type: ignore[misc]


class _Elsewhere(RawIOBase):
    """A file that is opened again where a read fails."""

    def __init__(self, path: str) -> None:
        self.path, self.name, self.at = path, path, 0
        self.file = _retried(self._open, path)
        self.size = int(self.file.seek(0, os.SEEK_END))

    def _open(self) -> Any:
        return fsspec.open(self.path, "rb", compression=None).open()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        data = _retried(lambda: self._read(len(buffer)), self.path)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def _read(self, size: int) -> bytes:
        if self.file is None:
            self.file = self._open()
        try:
            self.file.seek(self.at)
            return self.file.read(min(size, max(self.size - self.at, 0)))
        except Exception:
            self.file = None  # the next try opens it again
            raise

    def close(self) -> None:
        if not self.closed and getattr(self, "file", None) is not None:
            self.file.close()
        super().close()


def _retried(call: Any, path: str) -> Any:
    """Calls, again after each wait while the place does not answer."""
    begun = time.monotonic()
    for wait in (*WAITS, None):
        try:
            return call()
        except Exception as error:  # each store has types of its own
            said = in_one_line(error)
            if isinstance(error, FileNotFoundError):
                raise InputError(f"{path}: no such file: check the address.") from None
            if isinstance(error, (*_FINAL, ValueError)) or "redential" in f"{type(error)}{said}":
                raise UnreachableError(
                    f"{path}: cannot be opened ({said}): install what it names, or give your credentials as the "
                    "store's own tools read them."
                ) from None
            waited = time.monotonic() - begun
            if wait is None or waited > PATIENCE:
                raise UnreachableError(
                    f"{path}: does not answer after {waited:.0f} s ({said}): run the same again, which goes on from "
                    "the last training checkpoint."
                ) from None
            if wait == WAITS[0]:
                warnings.warn(f"{path}: does not answer ({said}); tries it again", stacklevel=2)
            time.sleep(wait)
    raise AssertionError


def local_files(pattern: str) -> list[Path]:
    """The files that a pattern of this machine names, in order."""
    return [path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if path.is_file()]
