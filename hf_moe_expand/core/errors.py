"""The exception for wrong input, and what puts a library's words on one line behind a file, a key or a verb."""

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Access tokens, and passwords in addresses.
TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|sk-[A-Za-z0-9_-]{20,}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,})"
)
PASSWORD = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s:@\"'<>,$]*:([^/\s:@\"'<>,$]+)@", re.IGNORECASE)


class InputError(ValueError):
    """Wrong input. The command line prints its message, always one line, without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))  # names that a user gave may hold line ends, and what a terminal obeys


class DivergedError(InputError):
    """A training whose loss, gradient or weights are not finite. A search for a learning rate goes on after it."""


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Inside, an InputError gets `where` in front of its message: the file or the key that it is about."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{where}: {error}" if where else str(error)) from None


@contextmanager
def library_errors_at(
    where: Any, *kinds: type[Exception], secrets: Sequence[str | None] | None = None
) -> Iterator[None]:
    """Inside, a library's error of these kinds, or of any, becomes an InputError: `where`, and the library's words,
    without `secrets`; with any, the library's own error is not shown behind it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if kinds and not isinstance(error, kinds):
            raise
        said = in_one_line(error, *(secrets or ())) + file_of(error, where)
        raise InputError(f"{where}: {said}.") from (error if secrets is None else None)


@contextmanager
def named_as(temporary: Any, name: Any) -> Iterator[None]:
    """Inside, an InputError that names a temporary path, which is gone when the user reads it, names another one."""
    try:
        yield
    except InputError as error:
        if str(temporary) not in str(error):
            raise
        raise type(error)(str(error).replace(str(temporary), str(name))) from None


@contextmanager
def goes_on(where: Callable[[], str]) -> Iterator[None]:
    """Inside, an interrupt gets a note that says where the same command goes on, if `where` returns any words."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if words := where():
            stop.add_note(words)
        raise


def printable(text: str) -> str:
    """The text in one line, in which characters that no terminal shows are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_unicode(name: str) -> bool:
    """Whether the name of a file is Unicode, without which no JSON holds it and no terminal prints it."""
    return name.encode(errors="replace").decode() == name


def is_full_disk(error: BaseException) -> bool:
    """Whether an error says that a disk, a quota or the largest size of a file was exceeded."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    return any(f"(os error {number})" in str(error) for number in numbers)  # as libraries written in Rust say it


def in_one_line(error: BaseException, *secrets: str | None) -> str:
    """A library's error and those behind it in one line, without access tokens and passwords."""
    from huggingface_hub import get_token  # slow to import, and seldom needed

    text, cause = "", error
    while cause is not None:
        words = _words(cause)
        text += f" {words}" if words not in text else ""  # an error may say what it was raised from
        cause = cause.__cause__  # type: ignore[assignment]
    text = text.strip()[:500].rstrip(".") or type(error).__name__
    for secret in (*secrets, get_token(), *TOKEN.findall(text), *PASSWORD.findall(text)):
        text = text.replace(secret, "***") if secret else text
    return text


def _words(error: BaseException) -> str:
    words = " ".join(str(getattr(error, "strerror", None) or error).split())
    # The messages of these classes make no sense without the class's name.
    return f"{type(error).__name__}: {words}" if isinstance(error, LookupError | TypeError | AttributeError) else words


def file_of(error: BaseException, where: Any = "") -> str:
    """The file that an error is about, behind a colon, if `where` does not name it."""
    file = getattr(error, "filename", None)
    return f": {file}" if file is not None and str(file) not in str(where) else ""
