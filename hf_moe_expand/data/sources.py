"""Reads the text of a language, documents or translations, from files, folders and the hub as a `datasets.Dataset`."""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from glob import glob, has_magic
from itertools import chain, islice
from pathlib import Path
from typing import Any

import langcodes
import numpy
from datasets import Dataset, Features, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.errors import HTTPError

from ..core.errors import InputError, in_one_line, is_unicode
from ..core.extra import import_extra
from ..core.languages import check_old_and_new, is_language_code, names_language
from ..core.saying import say_once
from ..core.schema import checked
from .files import KNOWN, Row, check_row, format_of, is_translation, no_text_file, read_rows, text_files, version
from .places import UnreachableError, check_address, files_elsewhere, is_elsewhere

Pair = tuple[str, str]
Document = dict[str, str]  # its `text`; or, of a sentence pair, the columns of `_PAIR`

_TEXT = {"text": Value("string")}
_PAIR = dict.fromkeys(("source", "target", "source_language", "target_language"), Value("string"))
_LEFT_OUT = "left_out"  # the column that says why a row is left out
_MOST_NAMED, _MOST_FILES = 8, 30  # reasons and files in a line
BEGINNING = 1 << 20  # bytes of a file
_ROWS = 256  # of a dataset on the hub, read at once
LARGE = 1 << 30  # bytes of a source from which parts of its files stand for them in a fingerprint


def counted(number: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class LeftOut(Counter[str]):
    """Rows that are left out, by the reason."""

    def __str__(self) -> str:
        named = [f"{count:,} {reason}" for reason, count in self.most_common(_MOST_NAMED)]
        if rest := self.total() - sum(count for _, count in self.most_common(_MOST_NAMED)):
            named.append(f"{rest:,} for other reasons")
        return f"{counted(self.total(), 'row')} left out: {', '.join(named)}"


@dataclass(frozen=True)
class Beginning:
    """The documents or pairs at the beginning of a shard.

    Attributes:
        rows: the documents (`text`) or pairs of the rows that are kept.
        left_out: the rows that are not.
        read: the share of the shard that was read, about.
    """

    rows: list[Document]
    left_out: LeftOut
    read: float


def all_left_out(beginnings: Iterable[Beginning]) -> LeftOut:
    """What is left out of several shards."""
    return LeftOut(chain.from_iterable(one.left_out.elements() for one in beginnings))


@dataclass(frozen=True)
class Shard:
    """A part of a source that is read from its beginning, or from the row after one.

    Attributes:
        name: its file or address, for messages.
        size: its bytes; None where they are not known.
        rows: its rows after that of a number.
    """

    name: str
    size: int | None
    rows: Callable[[int], Iterator[Row]]

    def documents(
        self, language: str, left_out: LeftOut, as_pairs: bool = False
    ) -> Iterator[tuple[Row, list[Document]]]:
        """Each row and its documents, or pairs; counts in `left_out` the rows without."""
        for row in self.rows(0):
            found, reason = judged(row.content, language, f"{self.name}:{row.number}", as_pairs)
            left_out.update([reason] * (not found))
            yield row, found


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

    def load(self, as_pairs: bool = False) -> Dataset:
        """The documents, in order, as a dataset with the column `text`.

        Args:
            as_pairs: for an encoder-decoder, the sentence pairs to and from the language: the columns `source`,
                `target`, `source_language` and `target_language`.

        Raises:
            InputError: the source is missing, empty or not UTF-8, a line is malformed, or has no pairs.
        """
        # The cache's key tells apart an edited file, one put in its place, and one of the same name elsewhere.
        stamps: dict[str, Any] = {str(path): (str(path.resolve()), *version(path)) for path in self.files()}
        if self.source.startswith("hub:"):
            stamps = {self.source: None}
        elif is_elsewhere(self.source):
            stamps = self._elsewhere()
        self._say_files_left_out()
        parts = [_generated(name, self.language, stamp, as_pairs) for name, stamp in stamps.items()]
        dataset = concatenate_datasets(parts)
        reasons = dataset.data.column(_LEFT_OUT)
        left_out = LeftOut(reasons.drop_null().to_pylist())
        if left_out:
            dataset = dataset.select(numpy.flatnonzero(reasons.is_null().to_numpy()))
        if not len(dataset):
            raise self.no_text(left_out, as_pairs)
        if left_out:
            say_once(f"{self.source}, language {self.language!r}: {counted(len(dataset), 'document')} kept, {left_out}")
        return dataset.remove_columns(_LEFT_OUT)

    def load_pairs(self) -> Dataset:
        """`load(as_pairs=True)`."""
        return self.load(as_pairs=True)

    def check(self, as_pairs: bool = False) -> Document | None:
        """The first document, or pair, of the local files; None for text on the hub, which is not asked.

        Raises:
            InputError: see `load`.
        """
        left_out = LeftOut()
        files = self.files()
        first = next(self._documents(left_out, as_pairs), None)
        if files and first is None:
            raise self.no_text(left_out, as_pairs)
        return first

    def digests(self) -> list[str]:
        """SHA-256 of each local file, or of parts of it where all together have `LARGE` bytes; the addresses and sizes
        of files elsewhere."""
        if is_elsewhere(self.source):
            return [f"{path} {size}" for path, size in self._elsewhere().items()]
        files = self.files()
        whole = sum(path.stat().st_size for path in files) < LARGE
        return [_digest(path, whole, *version(path)) for path in files]

    def contents(self) -> list[str]:
        """Its source and the hashes of its files, for a fingerprint."""
        return [self.source, *self.digests()]

    def shards(self) -> list[Shard]:
        """Its shards: files, here or elsewhere, or those of a dataset on the hub.

        Raises:
            InputError: see `load`; or a place does not answer.
        """
        if self.source.startswith("hub:"):
            stream, limit = _hub_stream(self.source)
            rows = partial(_hub_rows, self.source, stream, limit)
            if limit is not None:  # the first rows of all shards
                return [Shard(self.source, None, partial(rows, None))]
            return [
                Shard(f"{self.source}, shard {part}", None, partial(rows, part)) for part in range(stream.num_shards)
            ]
        if is_elsewhere(self.source):
            return [Shard(path, size, partial(read_rows, path)) for path, size in self._elsewhere().items()]
        self._say_files_left_out()
        return self._of_files()

    def _of_files(self) -> list[Shard]:
        return [Shard(str(path), path.stat().st_size, partial(read_rows, str(path))) for path in self.files()]

    def _say_files_left_out(self) -> None:
        if not_read := self.files_left_out():
            say_once(f"{self.source}: {not_read}")

    def _elsewhere(self) -> dict[str, int | None]:
        """The files of an address that are of a known kind, and their sizes; says which are not."""
        found = files_elsewhere(self.source)
        known = {path: size for path, size in found.items() if format_of(path) is not None}
        if not known:
            raise InputError(f"{self.source}: holds no file of a known kind; known: {KNOWN}.")
        if not any(size != 0 for size in known.values()):
            raise InputError(f"{self.source}: holds empty files alone: give one with text.")
        if others := [Path(path).name for path in found if path not in known]:
            say_once(f"{self.source}: files left out: {_first_names(others)} (of another kind)")
        return known

    def documents(self, say: bool = False) -> Iterator[str]:
        """Yields the documents of the local files one by one; none for text on the hub.

        Args:
            say: say in the end which rows were left out.

        Raises:
            InputError: see `load`.
        """
        left_out, kept = LeftOut(), 0
        try:
            for row in self._documents(left_out):
                kept += 1
                yield row["text"]
        finally:
            if say and left_out:
                say_once(f"{self.source}, language {self.language!r}: {counted(kept, 'document')} read, {left_out}")

    def pairs(self) -> Iterator[Document]:
        """Yields the sentence pairs of the local files one by one, as `load_pairs` has them."""
        return self._documents(LeftOut(), as_pairs=True)

    def count(self, most: int) -> int:
        """The number of documents, counted up to `most`; text on the hub is taken to be enough."""
        return sum(1 for _ in islice(self.documents(), min(most, sys.maxsize))) if self.files() else most

    def beginnings(self, as_pairs: bool = False) -> Iterator[Beginning]:
        """The beginning of each local file: about `BEGINNING` bytes of text, or less of many files.

        Raises:
            InputError: see `load`.
        """
        shards = self._of_files()
        size = max(16 * BEGINNING // max(len(shards), 16), BEGINNING >> 6)
        for shard in shards:
            yield beginning(shard, self.language, as_pairs, size, lambda row: sum(map(len, map(str, row.values()))))

    def _documents(self, left_out: LeftOut, as_pairs: bool = False) -> Iterator[Document]:
        """The documents or pairs of the local files; counts in `left_out` the rows without."""
        for shard in self._of_files():
            for _, found in shard.documents(self.language, left_out, as_pairs):
                yield from found

    def no_text(self, left_out: LeftOut, as_pairs: bool = False) -> InputError:
        what, wanted = ("sentence pair", "it and another language") if as_pairs else ("text", "it")
        found = f" ({left_out})" if left_out else ""
        return InputError(
            f"{self.source}: no {what} in language {self.language!r}: where rows have a `language`, it must be this "
            f"one; a `translation` must hold {wanted}{found}."
        )

    def files_left_out(self) -> str:
        """The files of a folder that are not read, by the reason, in words; empty if all are."""
        folder = self._path()
        if folder is None or not folder.is_dir():
            return ""
        parts = [f"{_first_names(names)} ({reason})" for reason, names in text_files(folder)[1].items()]
        return f"files left out: {'; '.join(parts)}" if parts else ""

    def files(self) -> list[Path]:
        """The local files of this source; empty for the hub and other places.

        Raises:
            InputError: the file is missing, empty or of an unknown kind, or a folder holds none of a known kind.
        """
        path = self._path()
        if path is None:
            return []
        if not is_unicode(self.source):  # no record could name it
            raise InputError(f"{self.source!r}: the name is not Unicode; rename it.")
        why: str | None
        if path.is_dir():
            files, why = text_files(path)[0], "the folder holds no file of a known kind"
        elif has_magic(self.source) and not path.exists():
            found = map(Path, sorted(glob(str(path), recursive=True)))
            files = [file for file in found if format_of(file) and file.is_file() and file.stat().st_size]
            why = "no file of a known kind has such a name"
        elif not path.exists():
            raise InputError(f"{path}: no such file (text for language {self.language!r}).")
        else:
            why = no_text_file(path)
            files = [] if why else [path]
        if not files:
            left_out = self.files_left_out()
            raise InputError(f"{path}: {why}; known: {KNOWN}, and folders of them{left_out and f'; {left_out}'}.")
        return files

    def _path(self) -> Path | None:
        """The local file, folder or pattern; None for the hub and other places."""
        if self.source.startswith("hub:") or is_elsewhere(self.source):
            return None
        try:
            return Path(self.source).expanduser()
        except RuntimeError:  # no such user
            return Path(self.source)


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:_MOST_FILES]) + (f" and {n:,} others" if (n := len(names) - _MOST_FILES) > 0 else "")


def _generated(name: str, language: str, stamp: Any, as_pairs: bool) -> Dataset:
    """A cached dataset of `read_documents`."""
    features = Features({**(_PAIR if as_pairs else _TEXT), _LEFT_OUT: Value("string")})
    arguments = {"name": name, "language": language, "stamp": stamp, "as_pairs": as_pairs}
    if next(read_documents(**arguments), None) is None:
        # The library's error for an empty one is unclear.
        return Dataset.from_dict({column: [] for column in features}, features=features)
    try:
        return Dataset.from_generator(read_documents, features=features, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise


def read_documents(name: str, language: str, stamp: Any, as_pairs: bool) -> Iterator[Document]:
    """The documents or pairs in a language of a file, an address or `hub:dataset`; of each row without any, why it is
    left out.

    Args:
        stamp: tells versions of a file apart.
    """
    of_hub = name.startswith("hub:")
    for row in _hub_rows(name, *_hub_stream(name)) if of_hub else read_rows(name):
        found, reason = judged(row.content, language, f"{name}:{row.number}", as_pairs)
        yield from found or [{_LEFT_OUT: reason}]


def beginning(
    shard: Shard, language: str, as_pairs: bool, size: int, measure: Callable[[Mapping[str, Any]], int],
    skips: bool = False,
) -> Beginning:  # fmt: skip
    """The documents of a shard up to the row with which the sum of `measure` over the rows reaches `size`, or with
    `skips` up to what cannot be read."""
    kept: list[Document] = []
    left_out, seen, share = LeftOut(), 0, 0.0
    try:
        for row, found in shard.documents(language, left_out, as_pairs):
            kept.extend(found)
            seen, share = seen + measure(row.content), row.read
            if seen >= size:
                break
    except InputError as error:
        if not skips or isinstance(error, UnreachableError):
            raise
    return Beginning(kept, left_out, share)


def _hub_rows(
    source: str, stream: Any, limit: int | None = None, part: int | None = None, after: int = 0
) -> Iterator[Row]:
    """The rows of a dataset on the hub, or of one of its shards."""
    with _hub_errors(source):
        shard = stream if part is None else stream.shard(stream.num_shards, part)
        shard = shard if limit is None else shard.take(limit)
        # `iter(dataset)` in a worker would give its share of the shards.
        batches = (shard.skip(after) if after else shard).iter(batch_size=_ROWS)
        rows = (
            dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True)
        )
        for number, content in enumerate(rows, start=after + 1):
            check_row(content, f"{source}: row {number}")
            yield Row(number, content, 0.0)


def _hub_stream(source: str) -> tuple[Any, int | None]:
    """The dataset that a source names, and how many of its rows."""
    name, *rest = source.removeprefix("hub:").split(":", 2)
    config, split = (rest[0] or None) if rest else None, rest[1] if len(rest) > 1 else "train"
    slice_of = re.fullmatch(r"(\w+)\[:(\d{1,18})\]", split)  # more rows than 18 digits tell, nothing has
    split, limit = (slice_of[1], int(slice_of[2])) if slice_of else (split, None)
    with _hub_errors(source):
        return load_dataset(name, config, split=split, streaming=True), limit


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


def judged(row: Mapping[str, Any], language: str, where: str, as_pairs: bool = False) -> tuple[list[Document], str]:
    """The documents or pairs in a language of a row; where it has none, the reason."""
    tag = row.get("language")
    if isinstance(tag, list) and len(tag) == 1:
        tag = tag[0]
    if tag is not None and not names_language(tag, language):
        return [], f"tagged {str(tag)[:40]!r}"
    if row.get("text") is None and row.get("translation") is None:
        return [], "without text"
    if as_pairs:
        return list(row_pairs(row, language, where)), "without a sentence and its translation"
    if row.get("text") is None:
        found = [{"text": translation_line(codes, *both)} for codes, both in _directions(row, language)]
        return found, "without a sentence and its translation"
    return [{"text": row["text"]}] if row["text"].strip() else [], "without text"


def row_pairs(row: Mapping[str, Any], language: str, where: str) -> Iterator[dict[str, str]]:
    """A row's sentence pairs to and from a language; refuses a row with `text` in place of `translation`."""
    if not is_translation(row):
        raise InputError(
            f"{where}: holds `text`, but the model is an encoder-decoder, which learns from sentences and their "
            'translations: give rows such as {"translation": {"en": "A word.", "el": "Μία λέξη."}}.'
        )
    for codes, both in _directions(row, language):
        named = (language if names_language(code, language) else code for code in codes)
        yield dict(zip(_PAIR, (*both, *named), strict=True))


def _directions(row: Mapping[str, Any], language: str) -> Iterator[tuple[Pair, Pair]]:
    """The codes and the sentences of each direction between a language and another one, without missing translations;
    white space in a sentence counts as one space."""
    sentences = {code: " ".join((text or "").split()) for code, text in (row.get("translation") or {}).items()}
    named = (code for code in sentences if names_language(code, language))
    own = language if language in sentences else next(named, None)
    if own is None or not sentences[own]:
        return
    for other in sentences:
        if other != own and sentences[other]:
            for source, target in ((other, own), (own, other)):
                yield (source, target), (sentences[source], sentences[target])


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


def language_name(code: str) -> str:
    """English name of a language: `el` is Greek, `zho_Hans` Chinese (Simplified)."""
    import_extra("language_data")
    if not is_language_code(code):
        raise InputError(f"{code!r} is not a language code of ISO 639, such as el or yue, so a prompt cannot name it.")
    return langcodes.Language.get(code).display_name()


def translation_line(pair: Pair, source: str, target: str) -> str:
    """`English: ... → Greek: ...`"""
    return f"{translation_start(pair, source)} {target}"


def translation_start(pair: Pair, source: str) -> str:
    """The start of `translation_line`, up to the translation."""
    names = [language_name(code) for code in pair]
    return f"{names[0]}: {source} → {names[1]}:"


def contents(sources: Mapping[str, LanguageText]) -> dict[str, list[str]]:
    """The fingerprint of each language's text."""
    return {code: text.contents() for code, text in sources.items()}
