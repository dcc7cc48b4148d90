"""Reads the text of a language, documents or translations, from files, folders and the hub as a `datasets.Dataset`."""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import langcodes
import numpy
from datasets import Dataset, Features, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.errors import HTTPError

from ..core.errors import InputError, is_unicode
from ..core.extra import import_extra
from ..core.languages import check_old_and_new, is_language_code, names_language
from ..core.private import in_one_line
from ..core.saying import say_once
from ..core.schema import checked
from .files import KNOWN, Row, has_text, is_translation, kind_of, read_rows, text_files, version
from .places import UnreachableError, check_address, files_elsewhere, has_pattern, is_elsewhere, local_files

Pair = tuple[str, str]

_TEXT = {"text": Value("string")}
_PAIR = dict.fromkeys(("source", "target", "source_language", "target_language"), Value("string"))
_NO_TEXT = "has no string under `text`, nor strings by language under `translation`"
LEFT_OUT = "left_out"  # the column that says why a row is left out
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
    """The documents or pairs at the beginning of a local file.

    Attributes:
        rows: the documents (`text`) or pairs of the rows that are kept.
        left_out: the rows that are not.
        read: the share of the file that was read, about.
    """

    rows: list[dict[str, str]]
    left_out: LeftOut
    read: float


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
        of_kind: dict[str, Any] = {"language": self.language, "as_pairs": as_pairs}
        if self.source.startswith("hub:"):
            dataset = _generated(read_hub, source=self.source, **of_kind)
        elif is_elsewhere(self.source):
            dataset = concatenate_datasets([
                _generated(read_file, path=path, stamp=size, **of_kind) for path, size in self._elsewhere().items()
            ])  # fmt: skip
        else:
            # The cache's key tells apart an edited file, one put in its place, and one of the same name elsewhere.
            stamps = {path: (str(path.resolve()), *version(path)) for path in self.files()}
            dataset = concatenate_datasets([
                _generated(read_file, path=str(path), stamp=stamp, **of_kind) for path, stamp in stamps.items()
            ])  # fmt: skip
            if not_read := self.files_left_out():
                say_once(f"{self.source}: {not_read}")
        reasons = dataset.data.column(LEFT_OUT)
        left_out = LeftOut(reasons.drop_null().to_pylist())
        if left_out:
            dataset = dataset.select(numpy.flatnonzero(reasons.is_null().to_numpy()))
        if not len(dataset):
            raise self.no_text(left_out, as_pairs)
        if left_out:
            say_once(f"{self.source}, language {self.language!r}: {counted(len(dataset), 'document')} kept, {left_out}")
        return dataset.remove_columns(LEFT_OUT)

    def load_pairs(self) -> Dataset:
        """`load(as_pairs=True)`."""
        return self.load(as_pairs=True)

    def check(self) -> None:
        """Refuses local text that `load` would refuse, as far as the first document shows; does not use the hub.

        Raises:
            InputError: see `load`.
        """
        self._first(as_pairs=False)

    def first_pair(self) -> dict[str, str] | None:
        """The first sentence pair of the local files, for an encoder-decoder; None for text on the hub.

        Raises:
            InputError: see `load`.
        """
        return self._first(as_pairs=True)

    def _first(self, as_pairs: bool) -> dict[str, str] | None:
        """The first document or pair of the local files; refuses files without one."""
        left_out = LeftOut()
        files = self.files()
        first = next(self._rows(as_pairs, left_out), None)
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
            if limit is not None:  # the first rows of all shards
                return [Shard(self.source, None, partial(_shard_rows, self.source, stream.take(limit), None))]
            parts = range(stream.num_shards)
            return [
                Shard(f"{self.source}, shard {part}", None, partial(_shard_rows, self.source, stream, part))
                for part in parts
            ]
        if is_elsewhere(self.source):
            return [Shard(path, size, partial(read_rows, path)) for path, size in self._elsewhere().items()]
        if not_read := self.files_left_out():
            say_once(f"{self.source}: {not_read}")
        return [Shard(str(path), path.stat().st_size, partial(read_rows, str(path))) for path in self.files()]

    def _elsewhere(self) -> dict[str, int | None]:
        """The files of an address that are of a known kind, and their sizes; says which are not."""
        found = files_elsewhere(self.source)
        known = {path: size for path, size in found.items() if kind_of(path) is not None}
        if not known:
            raise InputError(f"{self.source}: holds no file of a known kind; known: {KNOWN}.")
        if not any(size != 0 for size in known.values()):
            raise InputError(f"{self.source}: holds empty files alone: give one with text.")
        if others := [Path(path).name for path in found if path not in known]:
            more = f" and {len(others) - _MOST_FILES:,} others" if len(others) > _MOST_FILES else ""
            say_once(f"{self.source}: files left out: {', '.join(others[:_MOST_FILES])}{more} (of another kind)")
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
            for row in self._rows(False, left_out):
                kept += 1
                yield row["text"]
        finally:
            if say and left_out:
                say_once(f"{self.source}, language {self.language!r}: {counted(kept, 'document')} read, {left_out}")

    def pairs(self) -> Iterator[dict[str, str]]:
        """Yields the sentence pairs of the local files one by one, as `load_pairs` has them."""
        return self._rows(True, LeftOut())

    def count(self, most: int) -> int:
        """The number of documents, counted up to `most`; text on the hub is taken to be enough."""
        return sum(1 for _ in islice(self.documents(), min(most, sys.maxsize))) if self.files() else most

    def beginnings(self, as_pairs: bool = False) -> Iterator[Beginning]:
        """The beginning of each local file: about `BEGINNING` bytes of text, or less of many files.

        Raises:
            InputError: see `load`.
        """
        files = self.files()
        size = max(16 * BEGINNING // max(len(files), 16), BEGINNING >> 6)
        for path in files:
            kept: list[dict[str, str]] = []
            left_out, bytes_read, share = LeftOut(), 0, 0.0
            for row in read_rows(path):
                share = row.read
                for document in judged(row.content, self.language, f"{path}:{row.number}", as_pairs):
                    if reason := document.pop(LEFT_OUT):
                        left_out[reason] += 1
                    else:
                        kept.append(document)
                bytes_read += sum(len(str(value)) for value in row.content.values())
                if bytes_read >= size:
                    break
            yield Beginning(kept, left_out, share)

    def _rows(self, as_pairs: bool, left_out: LeftOut) -> Iterator[dict[str, str]]:
        """The documents or pairs of the local files; counts in `left_out` the rows without."""
        for path in self.files():
            for row in read_file(str(path), self.language, as_pairs=as_pairs):
                if reason := row.pop(LEFT_OUT):
                    left_out[reason] += 1
                else:
                    yield row

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
        parts = []
        for reason, names in text_files(folder)[1].items():
            more = f" and {len(names) - _MOST_FILES:,} others" if len(names) > _MOST_FILES else ""
            parts.append(f"{', '.join(names[:_MOST_FILES])}{more} ({reason})")
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
        if has_pattern(self.source) and not path.exists():
            files = [file for file in local_files(str(path)) if kind_of(file) is not None and file.stat().st_size]
            if not files:
                raise InputError(f"{self.source}: no file of a known kind has such a name; known: {KNOWN}.")
            return files
        if path.is_dir():
            files = text_files(path)[0]
            if not files:
                not_read = self.files_left_out()
                raise InputError(
                    f"{path}: the folder holds no file of a known kind; known: {KNOWN}."
                    + (f" {not_read[:1].upper()}{not_read[1:]}." if not_read else "")
                )
            return files
        if not path.is_file():
            raise InputError(f"{path}: no such file (text for language {self.language!r}).")
        if kind_of(path) is None:
            raise InputError(f"{path}: unknown kind of file; known: {KNOWN}, and folders of them.")
        if path.stat().st_size == 0:
            raise InputError(f"{path}: the file is empty; give one with text.")
        return [path]

    def _path(self) -> Path | None:
        """The local file, folder or pattern; None for the hub and other places."""
        if self.source.startswith("hub:") or is_elsewhere(self.source):
            return None
        try:
            return Path(self.source).expanduser()
        except RuntimeError:  # no such user
            return Path(self.source)


def _generated(rows: Callable[..., Iterator[dict[str, Any]]], **arguments: Any) -> Dataset:
    """A cached dataset of the rows of `rows(**arguments)`."""
    features = Features({**(_PAIR if arguments["as_pairs"] else _TEXT), LEFT_OUT: Value("string")})
    if next(rows(**arguments), None) is None:
        # The library's error for an empty one is unclear.
        return Dataset.from_dict({name: [] for name in features}, features=features)
    try:
        return Dataset.from_generator(rows, features=features, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise


def read_hub(source: str, language: str, as_pairs: bool = False) -> Iterator[dict[str, Any]]:
    """Streams `hub:dataset[:config][:split]`, in rows as `read_file` gives them; the split `train[:1000]` has 1000."""
    for number, row in enumerate(_hub_rows(source)):
        if not has_text(row):
            raise InputError(f"{source}: row {number} {_NO_TEXT} (columns: {', '.join(row)}).")
        yield from judged(row, language, f"{source}: row {number}", as_pairs)


def _hub_rows(source: str) -> Iterator[dict[str, Any]]:
    stream, limit = _hub_stream(source)
    with _hub_errors(source):
        yield from islice(stream, limit)


def _shard_rows(source: str, stream: Any, part: int | None, after: int) -> Iterator[Row]:
    """The rows of a shard of a dataset on the hub; of all of it without `part`."""
    with _hub_errors(source):
        shard = stream if part is None else stream.shard(stream.num_shards, part)
        # `iter(dataset)` in a worker would give its share of the shards.
        batches = (shard.skip(after) if after else shard).iter(batch_size=_ROWS)
        rows = (
            dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True)
        )
        for number, content in enumerate(rows, start=after + 1):
            if not has_text(content):
                raise InputError(f"{source}: row {number} {_NO_TEXT} (columns: {', '.join(content)}).")
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


def read_file(path: str, language: str, stamp: Any = None, as_pairs: bool = False) -> Iterator[dict[str, Any]]:
    """The documents or pairs of a file in a language, in rows with `left_out: None`; for each row of the file without
    any, one in which `left_out` says why.

    Args:
        stamp: tells versions of the file apart.
    """
    for row in read_rows(path):
        yield from judged(row.content, language, f"{path}:{row.number}", as_pairs)


def judged(row: Mapping[str, Any], language: str, where: str, as_pairs: bool) -> Iterator[dict[str, Any]]:
    """The rows of `read_file` for one row of a source."""
    tag = row.get("language")
    if isinstance(tag, list) and len(tag) == 1:
        tag = tag[0]
    found: list[dict[str, str]] = []
    reason = ""
    if tag is not None and not names_language(tag, language):
        reason = f"tagged {str(tag)[:40]!r}"
    elif row.get("text") is None and row.get("translation") is None:
        reason = "without text"
    elif as_pairs:
        found, reason = list(row_pairs(row, language, where)), "without a sentence and its translation"
    elif row.get("text") is None:
        found = [{"text": translation_line(codes, *both)} for codes, both in _directions(row, language)]
        reason = "without a sentence and its translation"
    elif row["text"].strip():
        found = [{"text": row["text"]}]
    else:
        reason = "without text"
    if found:
        yield from ({**document, LEFT_OUT: None} for document in found)
    else:
        yield {**dict.fromkeys(_PAIR if as_pairs else _TEXT), LEFT_OUT: reason}


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
