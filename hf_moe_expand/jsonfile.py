"""Small JSON files, written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from .errors import InputError


def write_json(path: str | Path, value: Any) -> None:
    """Writes through a temporary file in the same folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_json(path: str | Path, what: str) -> dict:
    """Reads an object.

    Raises:
        InputError: there is no such file, or it holds no JSON object; the message calls it `what`.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file ({what}).") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not {what}: {error}.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not {what}: found a {type(value).__name__}, not an object.")
    return value
