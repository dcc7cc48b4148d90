"""Reads the text of a language, documents or translations, from files, folders and the hub as a `datasets.Dataset`."""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from glob import has_magic
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy
from datasets import Dataset, Features, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.errors import HTTPError

from ..core.errors import InputError, in_one_line, is_unicode
from ..core.languages import check_old_and_new
from ..core.saying import say_once
from ..core.schema import checked
from .files import KNOWN, read_rows, text_files, version
from .places import UnreachableError, check_address, is_elsewhere
from .rows import PAIR, TEXT, Document, LeftOut, Row, counted, judged

_LEFT_OUT = "left_out"  # the column that says why a row is left out
_MOST_FILES = 30  # in a line
BEGINNING = 1 << 20  # bytes of a file
_ROWS = 256  # of a dataset on the hub, read at once
LARGE = 1 << 30  # bytes of a source from which parts of its files stand for them in a fingerprint


@dataclass(frozen=True)
class Beginning:
    """The documents (`text`) or pairs at the beginning of a shard, the rows that are left out, and the share of the
    shard that was `read`, about."""

    rows: list[Document]
    left_out: LeftOut
    read: float


def all_left_out(beginnings: Iterable[Beginning]) -> LeftOut:
    """What is left out of several shards."""
    return LeftOut(chain.from_iterable(one.left_out.elements() for one in beginnings))


@dataclass(frozen=True)
class Shard:
    """A part of a source: its file or address, its bytes (None where they are not known), and its rows after that of a
    number."""

    name: str
    size: int | None
    rows: Callable[[int], Iterator[Row]]

    def documents(self, language: str, as_pairs: bool = False) -> Iterator[tuple[Row, list[Document], str]]:
        """Each row and its documents, or pairs; of one without, the reason."""
        for row in self.rows(0):
            yield row, *judged(row.content, language, f"{self.name}:{row.number}", as_pairs)


@checked
@dataclass(frozen=True)
class LanguageText:
    """The source of one language's text.

    Attributes:
        language: a language code such as `el`.
        source: a `.jsonl` (`text`, optional `language`), `.txt` (one document a line) or `.parquet` file, the first two
            also compressed, a folder or a pattern (`data/el/*.parquet`) of them, these at any place that `fsspec`
            reaches (`s3://bucket/el/*.parquet`), or `hub:dataset[:config][:split]`, streamed
            (`hub:name:el:train[:1000]` takes 1000 rows). Instead of `text` a row may have `translation`, sentences by
            language, which gives a document `English: ... → Greek: ...` for each direction to and from `language`.

    Rows without text, and rows whose `language` is another one (`names_language`), are left out, counted and said.

    Raises:
        InputError: the source is an address that holds credentials.
    """

    language: str
    source: str

    def __post_init__(self) -> None:
        check_address(self.source)

    @classmethod
    @checked
    def parse(cls, argument: str) -> "LanguageText":
        """`el=FILE` from a command line."""
        language, separator, source = argument.partition("=")
        if not (separator and language and source):
            raise InputError(f"{argument!r} is not LANGUAGE=FILE, e.g. el=data/el.jsonl.")
        return cls(language, source)

    @property
    def _is_here(self) -> bool:
        return not (self.source.startswith("hub:") or is_elsewhere(self.source))

    def load(self, as_pairs: bool = False) -> Dataset:
        """The documents, in order, as a dataset with the column `text`; for an encoder-decoder (`as_pairs`) the
        sentence pairs to and from the language: `source`, `target`, `source_language`, `target_language`.

        Raises:
            InputError: the source is missing, empty or not UTF-8, or a line is malformed.
        """
        # The cache's key tells apart an edited file, one put in its place, and one of the same name elsewhere.
        stamps: Any = {str(path): (str(path.resolve()), *version(path)) for path in self.files()}
        if is_elsewhere(self.source):
            stamps = self._listed()[0]
        features = Features({**(PAIR if as_pairs else TEXT), _LEFT_OUT: Value("string")})
        arguments: dict[str, Any] = {"text": self, "stamps": stamps, "as_pairs": as_pairs}
        if next(read_documents(**arguments), None) is None:  # the library's error for an empty one is unclear
            raise self.no_text(LeftOut(), as_pairs)
        try:
            dataset = Dataset.from_generator(read_documents, features=features, gen_kwargs=arguments)
        except DatasetGenerationError as error:
            raise error.__cause__ if isinstance(error.__cause__, InputError) else error from None
        reasons = dataset.data.column(_LEFT_OUT)
        left_out = LeftOut(reasons.drop_null().to_pylist())
        if left_out:
            dataset = dataset.select(numpy.flatnonzero(reasons.is_null().to_numpy()))
        if not len(dataset):
            raise self.no_text(left_out, as_pairs)
        self._say(len(dataset), "kept", left_out)
        return dataset.remove_columns(_LEFT_OUT)

    def load_pairs(self) -> Dataset:
        """`load(as_pairs=True)`."""
        return self.load(as_pairs=True)

    def check(self, as_pairs: bool = False) -> Document | None:
        """The first document, or pair, of the local files; None for text on the hub, which is not asked."""
        left_out = LeftOut()
        first = next(self._documents(left_out, as_pairs), None)
        if self._is_here and first is None:
            raise self.no_text(left_out, as_pairs)
        return first

    def contents(self) -> list[str]:
        """Its source, and SHA-256 of each local file, or of parts of it where all together have `LARGE` bytes; of files
        elsewhere, addresses and sizes. For a fingerprint."""
        if is_elsewhere(self.source):
            return [self.source, *(f"{path} {size}" for path, size in self._listed()[0].items())]
        files = self.files()
        whole = sum(path.stat().st_size for path in files) < LARGE
        return [self.source, *(_digest(path, whole, *version(path)) for path in files)]

    def shards(self) -> list[Shard]:
        """Its shards: files, here or elsewhere, or those of a dataset on the hub."""
        if self.source.startswith("hub:"):
            stream, limit = _hub_stream(self.source)
            rows = partial(_hub_rows, self.source, stream, limit)
            if limit is not None:  # the first rows of all shards
                return [Shard(self.source, None, partial(rows, None))]
            parts = range(stream.num_shards)
            return [Shard(f"{self.source}, shard {part}", None, partial(rows, part)) for part in parts]
        files, left_out = self._listed()
        if left_out:
            say_once(f"{self.source}: {left_out}")
        return _shards(files)

    def documents(self, say: bool = False) -> Iterator[str]:
        """Yields the documents of the local files one by one, none for text on the hub; may `say` which rows were left
        out."""
        left_out, kept = LeftOut(), 0
        try:
            for row in self._documents(left_out):
                kept += 1
                yield row["text"]
        finally:
            if say:
                self._say(kept, "read", left_out)

    def _say(self, number: int, verb: str, left_out: LeftOut) -> None:
        if left_out:
            say_once(f"{self.source}, language {self.language!r}: {counted(number, 'document')} {verb}, {left_out}")

    def pairs(self) -> Iterator[Document]:
        """Yields the sentence pairs of the local files one by one, as `load_pairs` has them."""
        return self._documents(LeftOut(), as_pairs=True)

    def count(self, most: int) -> int:
        """The number of documents, counted up to `most`; text on the hub is taken to be enough."""
        return sum(1 for _ in islice(self.documents(), min(most, sys.maxsize))) if self._is_here else most

    def beginnings(self, as_pairs: bool = False) -> Iterator[Beginning]:
        """The beginning of each local file: about `BEGINNING` bytes of text, or less of many files."""
        shards = _shards(self._listed()[0]) if self._is_here else []
        size = max(16 * BEGINNING // max(len(shards), 16), BEGINNING >> 6)
        return (beginning(shard, self.language, as_pairs, size) for shard in shards)

    def _documents(self, left_out: LeftOut, as_pairs: bool = False) -> Iterator[Document]:
        """The documents or pairs of the local files; counts in `left_out` the rows without."""
        for shard in _shards(self._listed()[0]) if self._is_here else ():
            for _, found, reason in shard.documents(self.language, as_pairs):
                left_out.update([reason] * (not found))
                yield from found

    def no_text(self, left_out: LeftOut, as_pairs: bool = False) -> InputError:
        what, wanted = ("sentence pair", "it and another language") if as_pairs else ("text", "it")
        found = f" ({left_out})" if left_out else ""
        return InputError(
            f"{self.source}: no {what} in language {self.language!r}: where rows have a `language`, it must be this "
            f"one; a `translation` must hold {wanted}{found}."
        )

    def files_left_out(self) -> str:
        """The files of a local folder or a pattern that are not read, by the reason, in words; empty if all are."""
        return self._listed()[1] if self._is_here else ""

    def files(self) -> list[Path]:
        """The local files of this source; empty for the hub and other places."""
        return [Path(path) for path in self._listed()[0]] if self._is_here else []

    def _listed(self) -> tuple[dict[str, int | None], str]:
        """The files here or elsewhere, with their sizes, and in words those that are left out."""
        if not is_unicode(self.source):  # no record could name it
            raise InputError(f"{self.source!r}: the name is not Unicode; rename it.")
        source = os.path.expanduser(self.source) if self._is_here else self.source
        if self._is_here and not has_magic(source) and not os.path.exists(source):
            raise InputError(f"{source}: no such file (text for language {self.language!r}).")
        files, left_out = text_files(source)
        parts = []
        for reason, names in left_out.items():
            more = f" and {len(names) - _MOST_FILES:,} others" if len(names) > _MOST_FILES else ""
            parts.append(f"{', '.join(names[:_MOST_FILES])}{more} ({reason})")
        words = f"files left out: {'; '.join(parts)}" if parts else ""
        if not files:
            raise InputError(f"{source}: holds no text; known: {KNOWN}, and folders of them{words and f'; {words}'}.")
        return files, words


def _shards(files: Mapping[str, int | None]) -> list[Shard]:
    return [Shard(path, size, partial(read_rows, path)) for path, size in files.items()]


def read_documents(text: LanguageText, stamps: Any, as_pairs: bool) -> Iterator[Document]:
    """The documents or pairs of a text; of each row without any, why it is left out. `stamps` tell its versions
    apart."""
    for shard in text.shards():
        for _, found, reason in shard.documents(text.language, as_pairs):
            yield from found or [{_LEFT_OUT: reason}]


def beginning(shard: Shard, language: str, as_pairs: bool, size: int, skips: bool = False) -> Beginning:
    """The documents of a shard up to about `size` characters of text, or with `skips` up to what cannot be read."""
    kept: list[Document] = []
    left_out, seen, share = LeftOut(), 0, 0.0
    try:
        for row, found, reason in shard.documents(language, as_pairs):
            kept += found
            left_out.update([reason] * (not found))
            seen, share = seen + len(row.content.get("text") or str(row.content.get("translation") or "")), row.read
            if seen >= size:
                break
    except InputError as error:
        if not skips or isinstance(error, UnreachableError):
            raise
    return Beginning(kept, left_out, share)


def _hub_rows(source: str, stream: Any, limit: int | None, part: int | None, after: int) -> Iterator[Row]:
    """The rows of a dataset on the hub, or of one of its shards, after that of a number."""
    with _hub_errors(source):
        shard = stream if part is None else stream.shard(stream.num_shards, part)
        shard = shard if limit is None else shard.take(limit)
        # `iter(dataset)` in a worker would give its share of the shards.
        batches = (shard.skip(after) if after else shard).iter(batch_size=_ROWS)
        rows = (
            dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True)
        )
        for number, content in enumerate(rows, start=after + 1):
            yield Row(number, content, 0.0)


def _hub_stream(source: str) -> tuple[Any, int | None]:
    """The dataset that a source names, and how many of its rows."""
    name, config, split = (*source.removeprefix("hub:").split(":", 2), "", "")[:3]
    slice_of = re.fullmatch(r"(\w+)\[:(\d{1,18})\]", split)  # more rows than 18 digits tell, nothing has
    split, limit = (slice_of[1], int(slice_of[2])) if slice_of else (split or "train", None)
    with _hub_errors(source):
        return load_dataset(name, config or None, split=split, streaming=True), limit


@contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    """Inside, a library's error becomes one of a place that does not answer, or else of the dataset."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # the hub and the dataset's own files raise many types
        kind = UnreachableError if isinstance(error, HTTPError | ConnectionError | TimeoutError) else InputError
        raise kind(f"{source}: the dataset cannot be read: {in_one_line(error)}.") from None


@cache
def _digest(path: Path, whole: bool, *version: int) -> str:
    """SHA-256 of a file, or of its size, beginning, middle and end; `version` tells an edited file from the one that
    was read before."""
    with open(path, "rb") as file:
        if whole:
            return hashlib.file_digest(file, "sha256").hexdigest()
        size, found = path.stat().st_size, hashlib.sha256()
        found.update(str(size).encode())
        for place in (0, size // 2, max(size - BEGINNING, 0)):
            file.seek(place)
            found.update(file.read(BEGINNING))
        return found.hexdigest()


def check_languages(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuses a language given both as old and as new, and an expansion without new languages."""
    check_old_and_new(old, new)
    if not new:
        raise InputError("No new language was given: an expansion needs at least one.")


def contents(sources: Mapping[str, LanguageText]) -> dict[str, list[str]]:
    """The fingerprint of each language's text."""
    return {code: text.contents() for code, text in sources.items()}
