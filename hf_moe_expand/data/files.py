"""Files of text: which of a folder are text, and their rows, from lines of JSON or text, compressed or not, or from
Parquet."""

import bz2
import gzip
import json
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from glob import glob
from io import TextIOWrapper
from itertools import accumulate, chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
from pyarrow.parquet import ParquetFile

from ..core.errors import InputError, in_one_line, is_unicode
from ..core.saying import say_once
from .places import BUFFER, opened_file
from .rows import Row

KINDS = (".jsonl", ".txt", ".parquet")
# Each kind of compression and what opens it. Parquet compresses by itself.
_OPENS: dict[str, Any] = {
    "": lambda file: file,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda file: pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd"),
    ".zip": lambda file: _only_member(file),
}
KNOWN = f"{', '.join(KINDS)} (.jsonl and .txt also with {', '.join(filter(None, _OPENS))})"
GIANT = 1 << 20  # characters of a line of text that may be a whole file without line ends
# Texts that publishers put beside their data.
_ABOUT = re.compile(
    r"(read[-_ ]?me|licen[cs]e|copying|copyright|notice|changelog|changes|citation|authors|contributors|contributing"
    r"|attribution|credits|disclaimer|terms[-_ ]of[-_ ]use|sources|manifest|checksums?|(md5|sha\d+)(sums?)?"
    r"|requirements)([-_. ].*)?",
    re.IGNORECASE,
)
_BROKEN = (
    OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError, pyarrow.ArrowException,
    UnicodeDecodeError,
)  # fmt: skip


def format_of(path: str | os.PathLike) -> str | None:
    """The kind of a file by its name, `.jsonl` of `a.jsonl.gz` too; None for one that holds no text for us."""
    name = Path(path).name.lower()
    stem = name.removesuffix(_compression(name))
    kind = next((kind for kind in KINDS if stem.endswith(kind)), None)
    return None if kind == ".parquet" and stem != name else kind


def _compression(name: str) -> str:
    return next((suffix for suffix in _OPENS if suffix and name.endswith(suffix)), "")


def text_files(place: Path) -> tuple[list[Path], dict[str, list[str]]]:
    """The files of a folder and of those in it, or of a pattern, that hold text, in order, each once; and the names of
    all others, by the reason for which they are left out."""
    is_folder = place.is_dir()
    files: dict[Path, Path] = {}
    left_out: dict[str, list[str]] = {}
    for path, reason in sorted(_of_folder(place), key=itemgetter(0)) if is_folder else _of_pattern(str(place)):
        if reason is None and files.setdefault(path.resolve(), path) is not path:
            reason = "another name of a file that is read"
        if reason:
            name = path.relative_to(place) if is_folder else path
            left_out.setdefault(reason, []).append(f"{name}{'/' * path.is_dir()}")
    return [*files.values()], left_out


def _of_folder(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Each file, and each folder that is not read; and why not."""
    errors: list[OSError] = []
    for at, inner, names in os.walk(folder, onerror=errors.append):
        for name in [*inner]:
            path = Path(at, name)
            if name.startswith(".") or path.is_symlink():
                yield path, "hidden" if name.startswith(".") else "a link to a folder"
                inner.remove(name)
        for name in names:
            yield Path(at, name), by_its_name(name) or no_text_file(Path(at, name))
    yield from ((Path(error.filename), f"cannot be read: {error.strerror}") for error in errors)


def _of_pattern(pattern: str) -> Iterator[tuple[Path, str | None]]:
    found = map(Path, sorted(glob(pattern, recursive=True)))
    return ((path, no_text_file(path)) for path in found if not path.is_dir())


def by_its_name(path: str) -> str | None:
    """Why a file of a folder is not read, by its path in it alone."""
    if any(part.startswith(".") for part in Path(path).parts):  # it belongs to an editor, a notebook or a file manager
        return "hidden"
    if (kind := format_of(path)) is None:
        return "of another kind"
    is_about = kind == ".txt" and _ABOUT.fullmatch(Path(path).name.lower().partition(".txt")[0])
    return "about the data, by its name" if is_about else None


def no_text_file(path: Path) -> str | None:
    """Why a file is none of text; None for one that is."""
    if format_of(path) is None:
        return "of another kind"
    if not is_unicode(path.name):
        return "with a name that is not Unicode"
    if not path.is_file():
        return "no file, or a link to none"
    return None if path.stat().st_size else "empty"


def read_rows(path: str | os.PathLike, after: int = 0) -> Iterator[Row]:
    """The rows of a file, as they are there.

    Args:
        path: a file of this machine, or an address (`places.opened_file`).
        after: the number of the row after which to begin.

    Raises:
        InputError: the file is damaged or not UTF-8, a line is no JSON, or the place does not answer.
    """
    path = str(path)
    return _parquet_rows(path, after) if format_of(path) == ".parquet" else _lines(path, after)


def _lines(path: str, after: int) -> Iterator[Row]:
    is_json = format_of(path) == ".jsonl"
    for number, line, read in islice(_raw_lines(path), after, None):
        text = line.lstrip("\ufeff")  # byte-order marks: of the file, or of files that were put together
        if text.strip():
            try:
                line.encode(errors="surrogateescape").decode()
            except UnicodeDecodeError as error:
                raise InputError(f"{path}:{number}: not UTF-8 text ({error}).") from None
            content = {"text": text.rstrip("\n")}
            if is_json:
                try:
                    content = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{path}:{number}: not JSON ({in_one_line(error)}).") from None
            elif len(text) > GIANT:
                say_once(
                    f"{path}:{number}: the line has {len(text):,} characters, and is one document: put each document "
                    "on a line of its own, or give .jsonl."
                )
            yield Row(number, content, read)


def count_lines(path: Path) -> int:
    """The number of a file's lines, blank ones too; 0 for Parquet."""
    return 0 if format_of(path) == ".parquet" else sum(1 for _ in _raw_lines(str(path)))


def _raw_lines(path: str) -> Iterator[tuple[int, str, float]]:
    """Number and text of each line, and the share of the file that is read."""
    number = 0
    try:
        with opened_file(path) as (raw, size), _OPENS[_compression(path.lower())](raw) as stream:
            # A line that is not UTF-8 is found where it stands: a strict decoder reads ahead.
            for number, line in enumerate(TextIOWrapper(stream, "utf-8", "surrogateescape"), start=1):
                yield number, line, min(raw.tell() / max(size, 1), 1.0)
    except _BROKEN as error:
        after = f" after line {number}" if number else ""
        raise InputError(f"{path}: cannot be read{after} ({in_one_line(error)}).") from None


def _only_member(file: BinaryIO) -> Any:
    archive = zipfile.ZipFile(file)
    members = [name for name in archive.namelist() if not name.endswith("/")]
    if len(members) != 1:
        raise OSError(f"it holds {len(members)} files, of which one alone would be read: unpack it into a folder")
    return archive.open(members[0])


def _parquet_rows(path: str, after: int) -> Iterator[Row]:
    try:
        # Without a buffer, the whole column of a row group is read at once.
        with opened_file(path) as (raw, _), ParquetFile(raw, buffer_size=BUFFER) as file:
            columns = [name for name in file.schema_arrow.names if name in ("text", "translation", "language")]
            if twice := [name for name in columns if columns.count(name) > 1]:  # one of which would be read
                raise InputError(f"{path}: two columns are named `{twice[0]}`; keep one.")
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            ends = list(accumulate(sizes))
            groups = [group for group, end in enumerate(ends) if end > after]
            first = ends[groups[0]] - sizes[groups[0]] if groups else 0
            batches = file.iter_batches(batch_size=256, row_groups=groups, columns=columns or None)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, content in enumerate(islice(rows, max(after - first, 0), None), start=max(first, after) + 1):
                yield Row(number, content, number / ends[-1])
    except _BROKEN as error:
        raise InputError(f"{path}: cannot be read as a Parquet file ({in_one_line(error)}).") from None


def version(path: Path) -> tuple[int, int, int]:
    """What tells an edited file from the one before."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
