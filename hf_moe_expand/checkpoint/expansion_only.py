"""Writes a checkpoint that holds only the tensors added by an expansion, and a reference to its base model."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.core_model_loading import dot_natural_key

from ..core.errors import InputError
from ..core.jsonfile import read_json
from ..core.schema import checked
from ..modeling.expansion_only import ADDED, RECORD
from .local import name_and_commit
from .reader import StoredTensor
from .records import History
from .source import TOKENIZER_FILES, load_expanded_config, resolve_checkpoint
from .stored import StoredModel
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, write_checkpoint


@dataclass(frozen=True)
class BaseModel:
    """The dense model inside an expanded one; `hub_id` is None for a model known only as a local folder."""

    name: str
    hub_id: str | None
    revision: str | None


@dataclass(frozen=True)
class SavedExpansion:
    """Result of `save_expansion`.

    Attributes:
        added, in_base: bytes of the tensors in the folder, and of the tensors left to the base.
        changed: tensors of the base that training changed, which the folder holds too.
    """

    out: Path
    added: int
    in_base: int
    changed: list[str]


def base_of(config: Any) -> BaseModel:
    """The base that config.json records."""
    first = History.of(config).first
    name, revision = first.base_model, first.base_revision  # of a model of the hub only
    if name is None:
        raise InputError(
            "config.json does not say which base model was expanded: give its hub id (`push --base HUB_ID`)."
        )
    return BaseModel(name, name if revision else None, revision)


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
        model: folder or hub id of an expanded checkpoint.
        base: folder or hub id of the base model; by default the hub id that config.json records.

    Raises:
        InputError: the base is not known, or `model` did not come from it.
    """
    folder = resolve_checkpoint(model)
    check_output(out, overwrite, folder)
    config = load_expanded_config(folder)
    origin = base_of(config)
    if base is None and origin.hub_id is None:
        raise InputError(
            f"{folder}: was expanded from {origin.name}, a local folder: give `base`, a hub id or, for use on this "
            "machine alone, a folder."
        )
    base_folder = resolve_checkpoint(base or origin.name, origin.revision if base is None else None)
    name, revision = name_and_commit(base or origin.name, base_folder)
    reference = {"base_model": name if revision else None, "revision": revision}
    expanded, dense = StoredModel(folder, config), StoredModel(base_folder)
    record, added, changed = _compare(expanded, dense)
    size = sum(tensor.nbytes for tensor in added)
    in_base = sum(expanded[key].nbytes for key in expanded.tensors) - size
    if in_base <= sum(tensor.nbytes for tensor in changed):
        raise InputError(
            f"{folder}: lacks most tensors of {base or origin.name}, such as {changed[0].name}: give the base model "
            "that was expanded, or publish a model of which all weights were trained without --expansion-only."
        )
    fields = read_json(folder / "config.json", "a configuration")
    contents = {"config.json": {**fields, "expansion_base": reference}, RECORD: record}
    files = {name: (json.dumps(it, indent=2, ensure_ascii=False) + "\n").encode() for name, it in contents.items()}
    write_checkpoint(out, config, added, [(folder, TOKENIZER_FILES)], None, max_shard_size, overwrite, files, ADDED)
    return SavedExpansion(Path(out), size, in_base, [tensor.name for tensor in changed])


def _compare(
    expanded: StoredModel, dense: StoredModel
) -> tuple[dict[str, dict[str, str]], list[OutputTensor], list[StoredTensor]]:
    """Returns, for each tensor that is byte-identical in the base, its name there and its hash; then all other tensors;
    then those of the others that the base has with other values."""
    record, others, changed = {}, [], []
    for key in sorted(expanded.tensors, key=dot_natural_key):
        place = expanded.places[key]
        own = expanded.in_files(key)
        homes = dense.in_files(place.dense) if place.dense and place.dense in dense and not place.expert else []
        if not own or len(own) != len(homes):
            others += expanded.copies(key)
            continue
        for stored, original, copied in zip(own, homes, expanded.copies(key), strict=True):
            hashed = sha256_of(original)
            alike = (stored.dtype, stored.shape) == (original.dtype, original.shape)
            if alike and sha256_of(stored) == hashed:
                record[stored.name] = {"name": original.name, "sha256": hashed}
            else:
                changed.append(stored)
                others.append(copied)
    return record, others, changed


def sha256_of(tensor: StoredTensor) -> str:
    digest = hashlib.sha256()
    for piece in tensor.chunks():
        digest.update(piece)
    return digest.hexdigest()
