"""Files at any place that `fsspec` reaches (`s3://`, `gs://`, `file://`): they are listed, and read again where a
connection breaks off. The user's own credentials open them."""

import glob
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeVar

import fsspec
from fsspec.spec import AbstractBufferedFile

from ..core.errors import InputError, in_one_line

T = TypeVar("T")

WAITS = (1, 2, 4, 8, 16)  # seconds before each new try to open or read a file elsewhere
PATIENCE = 60  # seconds; a try may take longer, since some stores' tools try again themselves
BUFFER = 1 << 20  # bytes
_SECRET = re.compile(
    r"://[^/\s:@]+:(?!\d+/)\S*@|[?&][^=/&]*(token|sig|key|secret|password|credential)[^=/&]*=", re.IGNORECASE
)
# Errors that another try does not mend.
_FINAL = (
    FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ImportError,
    ValueError,
)  # fmt: skip


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
        raise InputError(f"{shown}: the address holds credentials: leave them out, and give them to its store's tools.")


def files_elsewhere(source: str) -> tuple[dict[str, int | None], str]:
    """The address of each file of a folder, of a pattern, or of the file itself, in order, with its size in bytes; and
    the folder's address, empty where it is none.

    Raises:
        InputError: the place cannot be reached, or has no such file.
    """

    def listed() -> tuple[dict[str, int | None], str]:
        files, path = fsspec.core.url_to_fs(source)
        files.invalidate_cache()
        is_pattern = glob.has_magic(source)
        is_folder = not is_pattern and files.isdir(path)
        if is_folder or is_pattern:
            found: dict[str, Any] = (files.find if is_folder else files.glob)(path, detail=True)
        else:
            found = {path: files.info(path)}
        if not found:
            raise FileNotFoundError
        named = {files.unstrip_protocol(name): info for name, info in sorted(found.items())}
        sizes = {name: info.get("size") for name, info in named.items() if info.get("type") != "directory"}
        return sizes, files.unstrip_protocol(path) if is_folder else ""

    return _retried(listed, source)


@contextmanager
def opened_file(path: str) -> Iterator[tuple[BinaryIO, int]]:
    """An open file, here or elsewhere, and its size in bytes.

    Raises:
        InputError: a file elsewhere cannot be reached.
    """
    if is_elsewhere(path):
        with _retried(lambda: _Elsewhere(*fsspec.core.url_to_fs(path), block_size=4 * BUFFER), path) as file:
            yield file, file.size
    else:
        with open(path, "rb") as file:
            yield file, os.path.getsize(path)


class _Elsewhere(AbstractBufferedFile):
    """A file that is opened again for each of its blocks, and once more where that fails."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        def read() -> bytes:
            with self.fs.open(self.path, "rb", cache_type="none") as file:
                file.seek(start)
                return file.read(end - start)

        return _retried(read, self.full_name)


def _retried(call: Callable[[], T], path: str) -> T:
    """Calls, again after each wait while the place does not answer."""
    begun = time.monotonic()
    for wait in (*WAITS, None):
        try:
            return call()
        except Exception as error:  # each store has types of its own
            # Stores say the address again, some of them twice.
            said = "no such file" if isinstance(error, FileNotFoundError) else in_one_line(error)
            if isinstance(error, _FINAL) or "redential" in f"{type(error)}{said}":
                kind = InputError if isinstance(error, FileNotFoundError) else UnreachableError
                raise kind(f"{path}: cannot be opened: {said}.") from None
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
