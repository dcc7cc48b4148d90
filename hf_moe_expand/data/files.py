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
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow
from pyarrow import types
from pyarrow.parquet import ParquetFile

from ..core.errors import InputError, first_line, is_unicode
from ..core.saying import say_once
from .places import BUFFER, opened

KINDS = (".jsonl", ".txt", ".parquet")
# Each kind of compression and what opens it. Parquet compresses by itself.
_OPENS: dict[str, Any] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda file: pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd"),
    ".zip": lambda file: _only_member(file),
}
KNOWN = f"{', '.join(KINDS)} (.jsonl and .txt also with {', '.join(_OPENS)})"
GIANT = 1 << 20  # characters of a line of text that may be a whole file without line ends
# Texts that publishers put beside their data.
_ABOUT = re.compile(
    r"(read[-_ ]?me|licen[cs]e|copying|copyright|notice|changelog|changes|citation|authors|contributors|contributing"
    r"|attribution|credits|disclaimer|terms[-_ ]of[-_ ]use|sources|manifest|checksums?|(md5|sha\d+)(sums?)?"
    r"|requirements)([-_. ].*)?",
    re.IGNORECASE,
)
# How files begin that are no UTF-8.
_SIGNS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip, whose files are named .gz"}
_BROKEN = (
    OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError, pyarrow.ArrowException
)  # fmt: skip


class Row(NamedTuple):
    """One row of a file.

    Attributes:
        number: its place, from 1; the number of its line where it is one.
        content: its columns.
        read: the share of the file that is read, as far as is known.
    """

    number: int
    content: dict[str, Any]
    read: float


def kind_of(path: str | os.PathLike) -> str | None:
    """The kind of a file by its name, `.jsonl` of `a.jsonl.gz` too; None for one that holds no text for us."""
    name = Path(path).name.lower()
    stem = name.removesuffix(_compression(name))
    kind = next((kind for kind in KINDS if stem.endswith(kind)), None)
    return None if kind == ".parquet" and stem != name else kind


def _compression(name: str) -> str:
    return next((suffix for suffix in _OPENS if name.endswith(suffix)), "")


def text_files(folder: Path) -> tuple[list[Path], dict[str, list[str]]]:
    """The files of a folder and of those in it that hold text, in order; and the names of all others, by the reason for
    which they are left out."""
    files: list[Path] = []
    left_out: dict[str, list[str]] = {}

    def leave_out(path: Path, reason: str) -> None:
        left_out.setdefault(reason, []).append(str(path.relative_to(folder)) + ("/" if path.is_dir() else ""))

    def unreadable(error: OSError) -> None:
        leave_out(Path(error.filename), f"cannot be read: {error.strerror}")

    for at, inner, names in os.walk(folder, onerror=unreadable):
        for name in sorted(inner):
            path = Path(at, name)
            if name.startswith(".") or path.is_symlink():
                leave_out(path, "hidden" if name.startswith(".") else "a link to a folder")
                inner.remove(name)
        for path in (Path(at, name) for name in sorted(names)):
            if reason := _left_out(path):
                leave_out(path, reason)
            else:
                files.append(path)
    return sorted(files), left_out


def _left_out(path: Path) -> str | None:
    """Why a file of a folder is not read; None for one that is."""
    kind = kind_of(path)
    if path.name.startswith("."):
        return "hidden"  # which belongs to an editor, a notebook or a file manager
    if kind is None:
        return "of another kind"
    if not is_unicode(path.name):
        return "with a name that is not Unicode"
    if not path.is_file():
        return "no file, or a link to none"
    if path.stat().st_size == 0:
        return "empty"
    about = kind == ".txt" and _ABOUT.fullmatch(path.name.lower().removesuffix(_compression(path.name.lower()))[:-4])
    return "about the data, by its name" if about else None


def read_rows(path: str | os.PathLike, after: int = 0) -> Iterator[Row]:
    """The rows of a file, as they are there.

    Args:
        path: a file of this machine, or an address (`places.opened`).
        after: the number of the row after which to begin.

    Raises:
        InputError: the file is damaged or not UTF-8, a row has no text, or the place does not answer.
    """
    yield from _parquet_rows(str(path), after) if kind_of(path) == ".parquet" else _lines(str(path), after)


def is_translation(row: Mapping[str, Any]) -> bool:
    """Whether a row holds sentences by language."""
    sentences = row.get("translation")
    return isinstance(sentences, dict) and all(isinstance(text, str | None) for text in sentences.values())


def has_text(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column of text, or of translations, be its value missing."""
    if row.get("text") is None and row.get("translation") is None:
        return "text" in row or "translation" in row
    return isinstance(row["text"], str) if row.get("text") is not None else is_translation(row)


def _lines(path: str, after: int) -> Iterator[Row]:
    is_json = kind_of(path) == ".jsonl"
    for number, line, read in islice(_raw_lines(path), after, None):
        text = line.lstrip("\ufeff")  # byte-order marks: of the file, or of files that were put together
        if text.strip():
            _check_utf8(line, path, number)
            if not is_json and len(text) > GIANT:
                say_once(
                    f"{path}:{number}: the line has {len(text):,} characters, and is one document: put each document "
                    "on a line of its own, or give .jsonl."
                )
            yield Row(number, _json_row(path, number, text) if is_json else {"text": text.rstrip("\n")}, read)


def count_lines(path: Path) -> int:
    """The number of a file's lines, blank ones too; 0 for Parquet."""
    return 0 if kind_of(path) == ".parquet" else sum(1 for _ in _raw_lines(str(path)))


def _raw_lines(path: str) -> Iterator[tuple[int, str, float]]:
    """Number and text of each line, and the share of the file that is read."""
    number = 0
    try:
        with opened(path) as (raw, size), _decompressed(raw, path) as stream:
            # A line that is not UTF-8 is found where it stands: a strict decoder reads ahead.
            for number, line in enumerate(TextIOWrapper(stream, "utf-8", "surrogateescape"), start=1):
                yield number, line, min(raw.tell() / max(size, 1), 1.0)
    except _BROKEN as error:
        after = f" after line {number}" if number else ""
        raise InputError(f"{path}: cannot be read{after} ({first_line(error)}).") from None


def _decompressed(raw: BinaryIO, path: str) -> Any:
    opens = _OPENS.get(_compression(path.lower()))
    return raw if opens is None else opens(raw)


def _only_member(file: BinaryIO) -> Any:
    archive = zipfile.ZipFile(file)
    members = [name for name in archive.namelist() if not name.endswith("/")]
    if len(members) != 1:
        raise InputError(
            f"{file.name}: holds {len(members)} files, of which one alone would be read: unpack it into a folder."
        )
    if archive.getinfo(members[0]).flag_bits & 1:
        raise InputError(f"{file.name}: is encrypted: unpack it.")
    return archive.open(members[0])


def _check_utf8(line: str, path: str, number: int) -> None:
    try:
        line.encode("utf-8")
    except UnicodeEncodeError:
        content = line.encode("utf-8", "surrogateescape")
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            signs = [f"; it looks like {kind}" for start, kind in _SIGNS.items() if content.startswith(start)]
            looks = signs[0] if signs and number == 1 else ""
            wrong = content[error.start : error.end].hex(" ")
            raise InputError(f"{path}:{number}: not UTF-8 text ({error.reason} {wrong}){looks}.") from None


def _json_row(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{number}: not a JSON object ({error.msg}).") from None
    except RecursionError:
        raise InputError(f"{path}:{number}: not a readable JSON object (nested too deep).") from None
    except ValueError:
        raise InputError(f"{path}:{number}: not a readable JSON object (thousands of digits).") from None
    if not isinstance(row, dict) or not has_text(row):
        actual = f"keys: {', '.join(row)}" if isinstance(row, dict) else f"found a {type(row).__name__}"
        raise InputError(
            f'{path}:{number}: needs an object with a string under "text", or strings by language under "translation" '
            f"({actual})."
        )
    try:
        for text in (row.get("text"), *chain.from_iterable(row["translation"].items() if is_translation(row) else ())):
            (text or "").encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{path}:{number}: not Unicode text ({error.reason}).") from None
    return row


def _parquet_rows(path: str, after: int) -> Iterator[Row]:
    try:
        # Without a buffer, the whole column of a row group is read at once.
        with opened(path) as (raw, _), ParquetFile(raw, buffer_size=BUFFER) as file:
            schema = file.schema_arrow
            columns = [name for name in ("text", "translation") if name in schema.names]
            if not columns:
                raise InputError(f"{path}: no column `text` or `translation` (columns: {', '.join(schema.names)}).")
            if twice := [name for name in (*columns, "language") if schema.names.count(name) > 1]:
                raise InputError(f"{path}: two columns are named `{twice[0]}`; keep one.")
            wrong = [name for name in columns if not _holds_text(schema.field(name).type, name)]
            if columns[0] in wrong:
                wanted = "strings" if columns[0] == "text" else "strings by language"
                kind = schema.field(columns[0]).type
                raise InputError(f"{path}: the column `{columns[0]}` holds {kind}; it must hold {wanted}.")
            needed = [name for name in (*columns, "language") if name in schema.names and name not in wrong]
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            ends = list(accumulate(sizes))
            groups = [group for group, end in enumerate(ends) if end > after]
            first = ends[groups[0]] - sizes[groups[0]] if groups else 0
            batches = file.iter_batches(batch_size=256, row_groups=groups, columns=needed)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, content in enumerate(islice(rows, max(after - first, 0), None), start=max(first, after) + 1):
                yield Row(number, content, number / ends[-1])
    except (*_BROKEN, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a Parquet file ({first_line(error)}).") from None


def _holds_text(kind: pyarrow.DataType, column: str) -> bool:
    """Whether a column's values are strings, or strings by language, or all missing."""
    if column == "translation" and not types.is_null(kind):
        return types.is_struct(kind) and all(_holds_text(field.type, "text") for field in kind)
    kind = kind.value_type if types.is_dictionary(kind) else kind
    strings = (types.is_null, types.is_string, types.is_large_string, types.is_string_view)
    return any(is_kind(kind) for is_kind in strings)


def version(path: Path) -> tuple[int, int, int]:
    """What tells an edited file from the one before."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
