"""Reads the text of a language, documents or translations, from files, folders and the hub as a `datasets.Dataset`."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import langcodes
import pyarrow
from datasets import Dataset, Features, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from pyarrow.parquet import ParquetFile

from ..errors import InputError, first_line
from ..extra import import_extra
from ..hub_access import hub_problem, patiently
from ..hub_answers import is_of_hub, refusal, without_secrets
from ..languages import check_old_and_new, is_language_code

Pair = tuple[str, str]

SUFFIXES = (".jsonl", ".txt", ".parquet")
_TEXT = Features({"text": Value("string")})
_PAIR = Features(dict.fromkeys(("source", "target", "source_language", "target_language"), Value("string")))


@dataclass(frozen=True)
class LanguageText:
    """The source of one language's text.

    Attributes:
        language: a language code such as `el`.
        source: a `.jsonl` (`text`, optional `language`), `.txt` (one document a line) or `.parquet` file, a folder of
            them, or `hub:dataset[:config][:split]`, streamed (`hub:name:el:train[:1000]` takes 1000 rows). Instead of
            `text` a row may have `translation`, sentences by language, which gives a document
            `English: ... → Greek: ...` for each direction to and from `language`.
    """

    language: str
    source: str

    @classmethod
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
        else:
            # The cache's key tells apart an edited file, one put in its place, and one of the same name elsewhere.
            stamps = {path: (str(path.resolve()), *_version(path)) for path in self.files()}
            dataset = concatenate_datasets([
                _generated(read_file, path=str(path), stamp=stamp, **of_kind) for path, stamp in stamps.items()
            ])  # fmt: skip
        if not len(dataset):
            raise self._no_text(as_pairs)
        return dataset

    def load_pairs(self) -> Dataset:
        """`load(as_pairs=True)`."""
        return self.load(as_pairs=True)

    def check(self) -> None:
        """Refuses local text that `load` would refuse, as far as the first document shows; does not use the hub.

        Raises:
            InputError: see `load`.
        """
        if self.files() and next(self.documents(), None) is None:
            raise self._no_text()

    def first_pair(self) -> dict[str, str] | None:
        """The first sentence pair of the local files, for an encoder-decoder; None for text on the hub.

        Raises:
            InputError: see `load`.
        """
        files = self.files()
        pair = next(self._rows(as_pairs=True), None)
        if files and pair is None:
            raise self._no_text(as_pairs=True)
        return pair

    def digests(self) -> list[str]:
        """SHA-256 of each local file."""
        return [_digest(path, *_version(path)) for path in self.files()]

    def contents(self) -> list[str]:
        """Its source and the hashes of its files, for a fingerprint."""
        return [self.source, *self.digests()]

    def documents(self) -> Iterator[str]:
        """Yields the documents of the local files one by one; none for text on the hub.

        Raises:
            InputError: see `load`.
        """
        return (row["text"] for row in self._rows())

    def count(self, most: int) -> int:
        """The number of documents, counted up to `most`; text on the hub is taken to be enough."""
        return sum(1 for _ in islice(self.documents(), most)) if self.files() else most

    def _rows(self, as_pairs: bool = False) -> Iterator[dict[str, str]]:
        for path in self.files():
            yield from read_file(str(path), self.language, as_pairs=as_pairs)

    def _no_text(self, as_pairs: bool = False) -> InputError:
        what, wanted = ("sentence pair", "it and another language") if as_pairs else ("text", "it")
        return InputError(
            f"{self.source}: no {what} in language {self.language!r}: where rows have a `language`, it must be this "
            f"one; a `translation` must hold {wanted}."
        )

    def files(self) -> list[Path]:
        """The local files of this source; empty for the hub.

        Raises:
            InputError: the file is missing, empty or of an unknown kind, or a folder holds none of a known kind.
        """
        if self.source.startswith("hub:"):
            return []
        try:
            path = Path(self.source).expanduser()
        except RuntimeError:  # no such user
            path = Path(self.source)
        if path.is_dir():
            candidates = (file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            # Hidden files belong to editors, notebooks and file managers.
            files = sorted(f for f in candidates if not any(part.startswith(".") for part in f.relative_to(path).parts))
            if not files:
                raise InputError(f"{path}: the folder holds no file of a known kind; known: {', '.join(SUFFIXES)}.")
            return files
        if not path.is_file():
            raise InputError(f"{path}: no such file (text for language {self.language!r}).")
        if path.suffix not in SUFFIXES:
            raise InputError(f"{path}: unknown kind of file; known: {', '.join(SUFFIXES)}, and folders of them.")
        if path.stat().st_size == 0:
            raise InputError(f"{path}: the file is empty; give one with text.")
        return [path]


def _generated(rows: Callable[..., Iterator[dict[str, str]]], **arguments: Any) -> Dataset:
    """A cached dataset of the rows of `rows(**arguments)`."""
    features = _PAIR if arguments["as_pairs"] else _TEXT
    if next(rows(**arguments), None) is None:
        # The library's error for an empty one is unclear.
        return Dataset.from_dict({name: [] for name in features}, features=features)
    try:
        return Dataset.from_generator(rows, features=features, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise


def read_hub(source: str, language: str, as_pairs: bool = False) -> Iterator[dict[str, str]]:
    """Streams the documents or pairs of `hub:dataset[:config][:split]`; the split `train[:1000]` has 1000 rows."""
    for number, row in enumerate(_hub_rows(source)):
        if not (isinstance(row.get("text"), str) or _is_translation(row)):
            raise InputError(
                f"{source}: row {number} has no string under `text`, nor strings by language under `translation` "
                f"(columns: {', '.join(row)})."
            )
        yield from _of_language(row, language, f"{source}: row {number}", as_pairs)


def _hub_rows(source: str) -> Iterator[dict[str, Any]]:
    name, *rest = source.removeprefix("hub:").split(":", 2)
    config, split = (rest[0] or None) if rest else None, rest[1] if len(rest) > 1 else "train"
    slice_of = re.fullmatch(r"(\w+)\[:(\d+)\]", split)
    split, limit = (slice_of[1], int(slice_of[2])) if slice_of else (split, None)
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not Path(name).exists() and (reason := hub_problem()):
        raise InputError(f"{source}: the hub cannot be reached ({reason}).")
    with _hub_errors(source, "the hub gives no dataset of that name"):
        stream = patiently(load_dataset, name, config, split=split, streaming=True)
    with _hub_errors(source, "the dataset cannot be read"):
        yield from islice(stream, limit)


@contextmanager
def _hub_errors(source: str, otherwise: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub, what stands before it, and the dataset's own files raise many types
        if is_of_hub(error) and not isinstance(error, DatasetNotFoundError):
            raise InputError(f"{source}: {refusal(error)}.") from None
        raise InputError(f"{source}: {otherwise} ({without_secrets(first_line(error))}).") from None


def _of_language(row: Mapping[str, Any], language: str, where: str, as_pairs: bool) -> Iterator[dict[str, str]]:
    """A row's documents, or sentence pairs, in a language; none if the row is tagged with another language."""
    if row.get("language") is not None and not names_language(row["language"], language):
        return
    if as_pairs:
        yield from row_pairs(row, language, where)
    elif row.get("text") is None:
        yield from ({"text": translation_line(codes, *both)} for codes, both in _directions(row, language))
    elif row["text"].strip():
        yield {"text": row["text"]}


def row_pairs(row: Mapping[str, Any], language: str, where: str) -> Iterator[dict[str, str]]:
    """A row's sentence pairs to and from a language; refuses a row with `text` in place of `translation`."""
    if not _is_translation(row):
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
    own = next((code for code in sentences if names_language(code, language)), None)
    if own is None or not sentences[own]:
        return
    for other in sentences:
        if other != own and sentences[other]:
            for source, target in ((other, own), (own, other)):
                yield (source, target), (sentences[source], sentences[target])


def _is_translation(row: Mapping[str, Any]) -> bool:
    sentences = row.get("translation")
    return isinstance(sentences, dict) and all(isinstance(text, str | None) for text in sentences.values())


def names_language(tag: Any, language: str) -> bool:
    """Whether a document's tag is `language` or its code in another standard: `hun` is `hu`, `cmn` is `zh`."""
    return tag == language or (isinstance(tag, str) and _standard(tag) == _standard(language))


@cache
def _standard(tag: str) -> str:
    try:
        return langcodes.standardize_tag(tag, macro=True)
    except langcodes.LanguageTagError:
        return tag


def read_file(
    path: str, language: str, stamp: Any = None, lines: int | None = None, as_pairs: bool = False
) -> Iterator[dict[str, str]]:
    """The documents or pairs of a `.jsonl`, `.txt` or `.parquet` file, without rows tagged with another language.

    Args:
        stamp: tells versions of the file apart.
        lines: how many lines to read, of a file that is no Parquet; all by default.
    """
    rows = _parquet_rows(path) if path.endswith(".parquet") else _lines(path, lines)
    for number, row in enumerate(rows, start=1):
        yield from _of_language(row, language, f"{path}:{number}", as_pairs)


def _lines(path: str, most: int | None = None) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(islice(file, most), start=1):
                if line.strip():
                    yield _json_row(path, number, line) if path.endswith(".jsonl") else {"text": line.rstrip("\n")}
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text near line {number + 1} ({error.reason}).") from None


def _parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    try:
        with ParquetFile(path) as file:
            columns = file.schema_arrow.names
            column = next((name for name in ("text", "translation") if name in columns), None)
            if column is None:
                raise InputError(f"{path}: no column `text` or `translation` (columns: {', '.join(columns)}).")
            kind = file.schema_arrow.field(column).type
            kinds = [field.type for field in kind] if pyarrow.types.is_struct(kind) else [kind]
            strings = all(pyarrow.types.is_string(one) or pyarrow.types.is_large_string(one) for one in kinds)
            if not strings or pyarrow.types.is_struct(kind) != (column == "translation"):
                wanted = "strings by language" if column == "translation" else "strings"
                raise InputError(f"{path}: the column `{column}` holds {kind}; it must hold {wanted}.")
            needed = [name for name in (column, "language") if name in columns]
            for batch in file.iter_batches(batch_size=256, columns=needed):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a Parquet file ({first_line(error)}).") from None


def _version(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


@cache
def _digest(path: Path, *version: int) -> str:
    """SHA-256 of a file; `version` tells an edited file from the one that was read before."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json_row(path: str, number: int, line: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{number}: not a JSON object ({error.msg}).") from None
    except RecursionError:
        raise InputError(f"{path}:{number}: not a readable JSON object (nested too deep).") from None
    except ValueError:
        raise InputError(f"{path}:{number}: not a readable JSON object (thousands of digits).") from None
    if not isinstance(row, dict) or not (isinstance(row.get("text"), str) or _is_translation(row)):
        actual = f"keys: {', '.join(row)}" if isinstance(row, dict) else f"found a {type(row).__name__}"
        raise InputError(
            f'{path}:{number}: needs an object with a string under "text", or strings by language under "translation" '
            f"({actual})."
        )
    try:
        for text in [row["text"]] if isinstance(row.get("text"), str) else row["translation"].values():
            (text or "").encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{path}:{number}: not Unicode text ({error.reason}).") from None
    return row


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
