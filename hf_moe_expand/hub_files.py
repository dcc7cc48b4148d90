"""Which files of a checkpoint folder are published, and what must not be in them: access tokens and local paths."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import get_token
from safetensors import safe_open
from transformers.dynamic_module_utils import get_relative_import_files

from .checkpoint.reader import CheckpointReader
from .checkpoint.source import COMPANIONS
from .errors import InputError
from .modeling.expansion_only import RECORD

CARD = "README.md"
EVALUATION = "evaluation.json"
PROVENANCE = ("recipe.yaml", "plan.json", "analysis.json")
# What training leaves in a folder: not published, and not worth a question.
_STAYS_HOME = (
    "training_args.bin", "trainer_state.json", "validation.json", "steps.json", "optimizer.*", "scheduler.pt",
    "scaler.pt", "rng_state*.pth", "checkpoint-*", "runs", "__pycache__", ".*",
)  # fmt: skip
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
_TOKEN = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16})\b")
_HOME = re.compile(r"(?<![\w.:/-])(?:/(?:home|Users|root|mnt|media|scratch|tmp|var|workspace)|~)/[\w./-]+")
_ABSOLUTE = re.compile(r"/[^/\s]+/\S*|file://.*|[A-Za-z]:[\\/].*|\\\\\w+\\.*")


def published_files(folder: Path, include: Sequence[str] = ()) -> dict[str, Path]:
    """Name in the repository to local file: weights, configuration, code, tokenizer and what records the run.

    A checkpoint inside a run folder brings that run's recipe, plan and analysis along.

    Args:
        include: other files of the folder to publish, relative to it.

    Raises:
        InputError: the folder holds files that belong to no checkpoint and are not in `include`, or lacks some of it.
    """
    reader = CheckpointReader(folder)
    names = [file.name for file in reader.files] + ["config.json", *_code(folder)]
    for pattern in (*COMPANIONS, "*.safetensors.index.json", RECORD, CARD, EVALUATION, *PROVENANCE):
        names += [str(file.relative_to(folder)) for file in folder.glob(pattern)]
    for name in include:
        if ".." in Path(name).parts or not (folder / name).is_file():
            raise InputError(f"{folder}: --include names {name}, but there is no such file in it.")
    found = {name: folder / name for name in [*names, *include]}
    left = {file.name for file in folder.iterdir()} - {Path(name).parts[0] for name in found}
    if foreign := sorted(name for name in left if not any(Path(name).match(pattern) for pattern in _STAYS_HOME)):
        raise InputError(
            f"{folder}: holds what is no part of the checkpoint: {', '.join(foreign)}. Move it away, or publish it too "
            "with --include FILE."
        )
    # The nearest comes last: of a run with several expansions, each has a plan of its own.
    near = [folder.resolve().parent, run_of(folder)]
    made_by = {name: there / name for there in near[::-1] for name in PROVENANCE if there and (there / name).is_file()}
    return dict(sorted({**(made_by if near[1] else {}), **found}.items()))


def run_of(folder: Path) -> Path | None:
    """The folder of the run that made this checkpoint, if it still lies in it."""
    return next((parent for parent in folder.resolve().parents[:2] if (parent / "steps.json").is_file()), None)


def is_weights(name: str) -> bool:
    """Whether a file of a repository holds weights, or says which files do."""
    return name == RECORD or name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"))


def _code(folder: Path) -> list[str]:
    """The `.py` files that config.json names, and those that they import."""
    entries = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map") or {}
    names: set[str] = set()
    for entry in entries.values():
        file = folder / f"{entry.rpartition('--')[2].partition('.')[0]}.py"
        if not file.is_file():
            raise InputError(
                f"{folder}: config.json names {file.name}, which is missing: write the checkpoint with save_pretrained."
            )
        names |= {file.name, *(Path(other).name for other in get_relative_import_files(file))}
    if not names:
        raise InputError(
            f"{folder}: config.json names no code (auto_map), so nobody could load it: write the checkpoint with "
            "save_pretrained."
        )
    return sorted(names)


def refuse_private(files: dict[str, Path | bytes]) -> None:
    """Checks what would be published, file by file.

    Raises:
        InputError: a file holds an access token or a path of this machine; names both.
    """
    for name, content in files.items():
        if name.endswith(".safetensors") and isinstance(content, Path):
            with safe_open(content, "pt") as weights:
                text = json.dumps(weights.metadata())
        else:
            data = content if isinstance(content, bytes) else content.read_bytes()
            text = data.decode("utf-8", errors="ignore")
        for found, what in _private(name, text):
            raise InputError(
                f"{name}: holds {what} ({found}), which must not be published: take it out."
                + (
                    " In a recipe, write a variable for it, such as $DATA/el.jsonl, before `run`."
                    if name.endswith(".yaml")
                    else ""
                )
            )


def _private(name: str, text: str) -> Iterator[tuple[str, str]]:
    """What must not be public: as it may be shown, and what it is."""
    own = get_token()
    for token in [*_TOKEN.findall(text), *([own] if own and own in text else [])]:
        yield f"{token[:6]}...", "an access token"
    if Path(name).name in _VOCABULARIES or name.endswith((".model", ".tiktoken")):
        return  # a vocabulary may well hold the string /home/
    for value in _strings(_parsed(name, text)):
        for path in _ABSOLUTE.findall(value) if _ABSOLUTE.fullmatch(value) else _HOME.findall(value):
            yield path, "a path of this machine"


def _parsed(name: str, text: str) -> Any:
    try:
        if name.endswith((".json", ".safetensors")):
            return json.loads(text)
        return yaml.safe_load(text) if name.endswith((".yaml", ".yml")) else text
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{name}: cannot be read ({str(error).splitlines()[0]}).") from None


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
