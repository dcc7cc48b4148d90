"""Secrets and paths of this machine, which no published file may hold."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from safetensors import safe_open

from .errors import InputError
from .jsonfile import parse_json
from .yamlfile import parse_yaml

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
_TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|sk-[A-Za-z0-9_-]{20,}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,})"
)
_AWS_SECRET = re.compile(r"(?i)aws_?secret_?(?:access_?)?key['\"]?\s*[=:]\s*['\"]?([A-Za-z0-9/+]{40})")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
_PASSWORD = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s:@\"'<>,$]*:([^/\s:@\"'<>,$]+)@", re.IGNORECASE)
_HOME = re.compile(r"(?<![\w.:/-])(?:/(?:home|Users|root|mnt|media|scratch|tmp|var|workspace)|~)/[\w./-]+")
_ABSOLUTE = re.compile(r"/[^/\s]+/\S*|file://.*|[A-Za-z]:[\\/].*|\\\\\w+\\.*")


def in_one_line(error: BaseException, *secrets: str | None) -> str:
    """A library's error and those behind it in one line, without access tokens and passwords."""
    causes: list[BaseException | None] = [error]
    while causes[-1]:
        causes.append(causes[-1].__cause__)
    texts = dict.fromkeys(" ".join(str(one).split()) for one in causes[:-1])
    text = " ".join(filter(None, texts))[:1000].rstrip(".") or type(error).__name__
    for secret in (*secrets, get_token(), *_TOKEN.findall(text), *_PASSWORD.findall(text)):
        text = text.replace(secret, "***") if secret else text
    return text


@contextmanager
def library_errors_at(where: str, *secrets: str | None) -> Iterator[None]:
    """Inside, a library's error becomes an InputError with `where` in front of its message."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # libraries raise many types
        raise InputError(f"{where}: {in_one_line(error, *secrets)}.") from None


def refuse_private(files: dict[str, Path | bytes]) -> None:
    """Checks every file to be published."""
    for name, content in files.items():
        if name.endswith(".safetensors") and isinstance(content, Path):
            with safe_open(content, "np") as weights:
                text = json.dumps(weights.metadata())
        else:
            data = content if isinstance(content, bytes) else content.read_bytes()
            text = data.decode("utf-8", errors="ignore")
        for secret, what in _private(name, text):
            raise InputError(
                f"{name}: holds {what} ({secret}), which must not be published: remove it."
                + (" A variable in its place, such as $DATA/el.jsonl, may stay." if name.endswith(".yaml") else "")
            )


def _private(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Finds secrets and local paths: the part of each that may be shown, and its kind."""
    own = get_token()
    for token in [*_TOKEN.findall(text), *([own] if own and own in text else [])]:
        yield f"{token[:6]}...", "an access token"
    for secret in _AWS_SECRET.findall(text):
        yield f"{secret[:4]}...", "an access token"
    for block in _PRIVATE_KEY.findall(text):
        yield block, "a private key"
    for password in _PASSWORD.findall(text):
        yield f"{password[:1]}...", "a password in an address"
    if Path(name).name in _VOCABULARIES or name.endswith((".model", ".tiktoken")):
        return  # a vocabulary may hold the string /home/
    for value in _strings(_parsed(name, text)):
        for path in _ABSOLUTE.findall(value) if _ABSOLUTE.fullmatch(value) else _HOME.findall(value):
            yield path, "a path of this machine"


def _parsed(name: str, text: str) -> Any:
    try:
        if name.endswith((".json", ".safetensors")):
            return parse_json(text)
    except ValueError as error:
        raise InputError(f"{name}: cannot be read ({error}).") from None
    return parse_yaml(text, name) if name.endswith((".yaml", ".yml")) else text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
