"""Files of text: which of a source are text, and their rows, from lines of JSON or text, compressed or not, or from
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
from glob import glob, has_magic
from io import TextIOWrapper
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
from pyarrow.parquet import ParquetFile

from ..core.errors import InputError, is_unicode, library_errors_at
from .places import BUFFER, files_elsewhere, is_elsewhere, opened_file
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


def text_files(source: str) -> tuple[dict[str, int | None], dict[str, list[str]]]:
    """The files of a source, here or elsewhere, that hold text, in order, each once, with their sizes in bytes; and the
    names of all others, by the reason for which they are left out. A folder is read with the folders in it."""
    is_here = not is_elsewhere(source)
    found, folder = _files_here(Path(source)) if is_here else files_elsewhere(source)
    files: dict[str, int | None] = {}
    left_out: dict[str, list[str]] = {}
    read = set()
    for path, size in found.items():
        inside = os.path.relpath(path, folder) if folder else ""
        place = os.path.realpath(path) if is_here else path
        reason = _no_text(path, size, inside, is_here) or ("another name of a file that is read" * (place in read))
        if reason:
            left_out.setdefault(reason, []).append(f"{inside or path}{'/' * os.path.isdir(path)}")
        else:
            files[path] = size
            read.add(place)
    return files, left_out


def _files_here(place: Path) -> tuple[dict[str, int | None], str]:
    """As `files_elsewhere`, with the folders that are not read; None is the size of what is no file."""
    paths = [] if place.is_dir() else [place]
    if place.is_dir():
        for at, inner, names in os.walk(place, onerror=lambda error: paths.append(Path(error.filename))):
            not_read = [name for name in inner if name.startswith(".") or Path(at, name).is_symlink()]
            inner[:] = [name for name in inner if name not in not_read]
            paths.extend(Path(at, name) for name in (*names, *not_read))
    elif has_magic(str(place)) and not place.exists():
        paths = [Path(path) for path in glob(str(place), recursive=True) if not os.path.isdir(path)]
    sizes = {str(path): path.stat().st_size if path.is_file() else None for path in sorted(paths)}
    return sizes, str(place) if place.is_dir() else ""


def _no_text(path: str, size: int | None, inside: str, is_here: bool) -> str:
    """Why a file is none of text; of a folder's files, hidden ones and those about the data are not read."""
    kind, name = format_of(path), Path(path).name
    is_about = inside and kind == ".txt" and _ABOUT.fullmatch(name.lower().partition(".txt")[0])
    reasons = {
        "hidden": any(part.startswith(".") for part in Path(inside).parts),  # it belongs to an editor or a file manager
        "a link to a folder": os.path.isdir(path) and os.path.islink(path),
        "a folder that cannot be read": os.path.isdir(path),
        "of another kind": kind is None,
        "about the data, by its name": is_about,
        "with a name that is not Unicode": not is_unicode(name),
        "no file, or a link to none": size is None and is_here,
        "empty": size == 0,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


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
            where = f"{path}:{number}"
            with library_errors_at(f"{where}: not UTF-8 text", UnicodeDecodeError):
                line.encode(errors="surrogateescape").decode()
            with library_errors_at(f"{where}: not JSON", ValueError, RecursionError):
                content = json.loads(text) if is_json else {"text": text.rstrip("\n")}
            yield Row(number, content, read)


def count_lines(path: Path) -> int:
    """The number of a file's lines, blank ones too; 0 for Parquet."""
    return 0 if format_of(path) == ".parquet" else sum(1 for _ in _raw_lines(str(path)))


def _raw_lines(path: str) -> Iterator[tuple[int, str, float]]:
    """Number and text of each line, and the share of the file that is read."""
    with (
        library_errors_at(f"{path}: cannot be read", *_BROKEN),
        opened_file(path) as (raw, size),
        _OPENS[_compression(path.lower())](raw) as stream,
    ):
        # A line that is not UTF-8 is found where it stands: a strict decoder reads ahead.
        for number, line in enumerate(TextIOWrapper(stream, "utf-8", "surrogateescape"), start=1):
            yield number, line, min(raw.tell() / max(size, 1), 1.0)


def _only_member(file: BinaryIO) -> Any:
    archive = zipfile.ZipFile(file)
    members = [name for name in archive.namelist() if not name.endswith("/")]
    if len(members) != 1:
        raise OSError(f"it holds {len(members)} files, of which one alone would be read: unpack it into a folder")
    return archive.open(members[0])


def _parquet_rows(path: str, after: int) -> Iterator[Row]:
    # Without a buffer, the whole column of a row group is read at once.
    with (
        library_errors_at(f"{path}: cannot be read as a Parquet file", *_BROKEN),
        opened_file(path) as (raw, _),
        ParquetFile(raw, buffer_size=BUFFER) as file,
    ):
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


def version(path: str | os.PathLike) -> tuple[int, int, int]:
    """What tells an edited file from the one before."""
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
