"""Secrets and paths of this machine, which no published file may hold."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from safetensors import safe_open

from .errors import PASSWORD, TOKEN, InputError, library_errors_at
from .jsonfile import parse_json
from .yamlfile import parse_yaml

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
_AWS_SECRET = re.compile(r"(?i)aws_?secret_?(?:access_?)?key['\"]?\s*[=:]\s*['\"]?([A-Za-z0-9/+]{40})")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----")
_HOME = re.compile(r"(?<![\w.:/-])(?:/(?:home|Users|root|mnt|media|scratch|tmp|var|workspace)|~)/[\w./-]+")
_ABSOLUTE = re.compile(r"/[^/\s]+/\S*|file://.*|[A-Za-z]:[\\/].*|\\\\\w+\\.*")


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
            raise InputError(f"{name}: holds {what} ({secret}), which must not be published: remove it.")


def _private(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Finds secrets and local paths: the part of each that may be shown, and its kind."""
    own = [token] if (token := get_token()) and token in text else []
    tokens = [*TOKEN.findall(text), *_AWS_SECRET.findall(text), *own]
    found = {"an access token": tokens, "a private key": _PRIVATE_KEY.findall(text),
             "a password in an address": PASSWORD.findall(text)}  # fmt: skip
    for what, secrets in found.items():
        yield from ((f"{secret[: min(6, len(secret) // 4)]}...", what) for secret in secrets)
    if Path(name).name in _VOCABULARIES or name.endswith((".model", ".tiktoken")):
        return  # a vocabulary may hold the string /home/
    for value in _strings(_parsed(name, text)):
        for path in _ABSOLUTE.findall(value) if _ABSOLUTE.fullmatch(value) else _HOME.findall(value):
            yield path, "a path of this machine"


def _parsed(name: str, text: str) -> Any:
    if name.endswith((".json", ".safetensors")):
        with library_errors_at(f"{name}: cannot be read", ValueError):
            return parse_json(text)
    return parse_yaml(text, name) if name.endswith((".yaml", ".yml")) else text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _strings(item)
