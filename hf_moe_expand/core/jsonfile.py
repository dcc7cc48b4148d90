"""Small files, written whole or not at all, and JSON, read strictly."""

import json
from pathlib import Path
from typing import Any, NoReturn

from .errors import InputError, library_errors_at
from .scratch import new_file


def write_json(path: str | Path, value: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    with library_errors_at(path, ValueError):
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file, whole or not at all (see `new_file`)."""
    with new_file(Path(path)) as partial:
        partial.write_text(text, encoding="utf-8")


def read_text(path: str | Path, what: str = "") -> str:
    """The text of a file, as it is."""
    with library_errors_at(path, OSError, UnicodeDecodeError):
        try:
            return Path(path).read_bytes().decode()
        except FileNotFoundError:
            raise InputError(f"{path}: no such file{what and f' ({what})'}.") from None


def read_json(path: str | Path, what: str) -> dict:
    """Reads an object, more strictly than Python's reader: a duplicate key, a number that is not finite and half of a
    surrogate pair are errors."""
    text = read_text(path, what).removeprefix("\ufeff")
    with library_errors_at(f"{path}: not {what}", ValueError):
        value = parse_json(text)
    if not isinstance(value, dict):
        raise InputError(f"{path}: not {what}: found a {type(value).__name__}, not an object.")
    return value


def parse_json(text: str) -> Any:
    """The value of a JSON text, as strictly as `read_json`."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except RecursionError as error:
        raise ValueError(error) from None
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping, keys = dict(pairs), [key for key, _ in pairs]
    if len(mapping) < len(keys):
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return mapping


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _float(digits: str) -> float:
    value = float(digits)
    if value - value != 0:  # 1e999
        raise ValueError(f"the number {digits[:20]} is too large")
    return value
