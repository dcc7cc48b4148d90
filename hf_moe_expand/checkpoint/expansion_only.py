"""Writes a checkpoint that holds only the tensors added by an expansion, and a reference to its base model."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from transformers.core_model_loading import dot_natural_key

from ..core.errors import InputError
from ..core.jsonfile import read_json
from ..core.progress import Bar
from ..core.schema import checked
from ..modeling.part_expansion_only import ADDED, RECORD
from .facts import set_part
from .reader import StoredTensor
from .records import History
from .source import load_expanded_config, name_and_commit, resolve_checkpoint
from .stored import StoredModel
from .table import Copy, opened, rewrite
from .writer import DEFAULT_SHARD_SIZE


@dataclass(frozen=True)
class SavedExpansion:
    """Result of `save_expansion`: the bytes of the tensors in the folder, and of those left to the base; and the
    tensors of the base that training changed, which the folder holds too."""

    out: Path
    added: int
    in_base: int
    changed: list[str]


@checked
def save_expansion(
    model: str | os.PathLike,
    out: str | os.PathLike,
    base: str | os.PathLike | None = None,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> SavedExpansion:
    """Writes only new experts, routers and classifiers, with code, configuration and tokenizer.

    `AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)` fetches the base model, refuses it if a tensor
    differs from its recorded hash, and assembles the whole model; the model's `save_pretrained` writes an ordinary
    checkpoint. If the base is a local folder, loading needs `base_model=FOLDER` too.

    Args:
        base: folder or hub id of the base model; by default the hub id that config.json records.
    """
    (expanded,) = opened([model], out, overwrite, load_expanded_config)
    folder, config = expanded.folder, expanded.config
    first = History.of(config).first
    if base is None and first.base_revision is None:
        raise InputError(f"{folder}: was expanded from {first.base_model}, a local folder: give `base`.")
    origin = base or str(first.base_model)
    base_folder = resolve_checkpoint(origin, first.base_revision if base is None else None)
    name, revision = name_and_commit(origin, base_folder)
    reference = {"base_model": name if revision else None, "revision": revision}
    record, left, changed = _compare(expanded, StoredModel(base_folder))
    size = sum(expanded[key].nbytes for key in expanded.tensors if key not in left)
    in_base = sum(expanded[key].nbytes for key in left)
    if in_base <= sum(tensor.nbytes for tensor in changed):
        such = f", such as {changed[0].name}" if changed else ""
        raise InputError(f"{folder}: lacks most tensors of {origin}{such}: give the base model that was expanded.")
    fields = read_json(folder / "config.json", "a configuration")
    set_part(config, "expansion_only", reference)
    contents = {"config.json": {**fields, "parts": config.parts}, RECORD: record}
    files = {name: (json.dumps(it, indent=2, ensure_ascii=False) + "\n").encode() for name, it in contents.items()}
    rewrite(
        [expanded], config, lambda place: None if place.key in left else Copy(place.key), out, files=files, stem=ADDED,
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip
    return SavedExpansion(Path(out), size, in_base, [tensor.name for tensor in changed])


def _compare(
    expanded: StoredModel, dense: StoredModel
) -> tuple[dict[str, dict[str, str]], set[str], list[StoredTensor]]:
    """The record: base's name and hash of each tensor that is the same there; their places; and the changed tensors."""
    record: dict[str, dict[str, str]] = {}
    left, changed = set(), []
    ordered = sorted(expanded.tensors, key=dot_natural_key)
    for key in Bar(ordered, desc="compare with the base", unit="tensor", leave=False):
        place, own = expanded.places[key], expanded.in_files(key)
        homes = dense.in_files(place.dense) if place.dense and place.dense in dense and not place.expert else []
        if not own or len(own) != len(homes):
            continue
        pairs = list(zip(own, homes, strict=True))
        if all(stored.same_bytes(original) for stored, original in pairs):
            left.add(key)
            record |= {stored.name: {"name": home.name, "sha256": sha256_of(home)} for stored, home in pairs}
        else:
            changed += own
    return record, left, changed


def sha256_of(tensor: StoredTensor) -> str:
    digest = hashlib.sha256()
    for piece in tensor.chunks():
        digest.update(piece)
    return digest.hexdigest()
