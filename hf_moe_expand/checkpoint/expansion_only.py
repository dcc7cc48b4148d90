"""Writes a checkpoint that holds only the tensors added by an expansion, and a reference to its base model."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from transformers.core_model_loading import dot_natural_key

from ..core.errors import InputError, errors_at
from ..core.jsonfile import read_json
from ..core.private import library_errors_at
from ..core.progress import Bar
from ..core.schema import checked
from ..modeling.part_expansion_only import ADDED, RECORD
from .graft import COMPUTATION
from .kinds import set_part
from .local import name_and_commit
from .reader import StoredTensor
from .records import History
from .source import TOKENIZER_FILES, load_config, load_expanded_config, resolve_checkpoint, text_config
from .stored import StoredModel
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, write_checkpoint

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


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


def base_on_hub(config: Any, hub_id: str, token: str | None = None) -> BaseModel:
    """The base that the hub has under `hub_id`, with its present commit; its configuration must be that of the model
    that was expanded. Without a connection, or without access to a gated model, nothing is compared and the commit
    stays unknown."""
    where = f"--base {hub_id}"
    if Path(hub_id).is_dir():
        raise InputError(f"{where}: is a local folder; give the base model's hub id, which others need.")
    with library_errors_at(where, token):
        try:
            folder = Path(snapshot_download(hub_id, allow_patterns="config.json", token=token))
        except (GatedRepoError, LocalEntryNotFoundError):
            return BaseModel(hub_id, hub_id, None)
    with errors_at(where):
        _compare_configs(config, text_config(load_config(folder)), where)
    return BaseModel(hub_id, hub_id, folder.name)  # the hub's cache names a snapshot's folder by its commit


def _compare_configs(config: Any, base: Any, where: str) -> None:
    ours: dict[str, Any] = {name: getattr(config, name, None) for name in (*_SIZES, *COMPUTATION)}
    ours = {"model_type": config.backbone_model_type, **ours}
    if ours["num_hidden_layers"] is not None:
        ours["num_hidden_layers"] -= len(getattr(config, "new_layers", None) or ())
    if any(stage.changes_everything for stage in History.of(config).stages):
        del ours["vocab_size"]  # a graft may have added tokens
    for name, value in ours.items():
        if (theirs := getattr(base, name, None)) != value:
            raise InputError(
                f"{where}: is not the model that was expanded: its {name} is {theirs!r}, not {value!r}. Give the "
                "base's hub id."
            )


def config_with_base(file: Path, base: BaseModel) -> bytes:
    """A checkpoint's config.json in which every expansion of the first one's base names `base`."""
    fields = read_json(file, "a configuration")
    before = fields["expansions"][0].get("base_model")
    for record in fields["expansions"]:
        if record.get("base_model") == before:
            record |= {"base_model": base.name, "base_revision": base.revision}
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


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
    set_part(config, "expansion_only", reference)
    contents = {"config.json": {**fields, "parts": config.parts}, RECORD: record}
    files = {name: (json.dumps(it, indent=2, ensure_ascii=False) + "\n").encode() for name, it in contents.items()}
    write_checkpoint(out, config, added, [(folder, TOKENIZER_FILES)], None, max_shard_size, overwrite, files, ADDED)
    return SavedExpansion(Path(out), size, in_base, [tensor.name for tensor in changed])


def _compare(
    expanded: StoredModel, dense: StoredModel
) -> tuple[dict[str, dict[str, str]], list[OutputTensor], list[StoredTensor]]:
    """Returns, for each tensor that is byte-identical in the base, its name there and its hash; then all other tensors;
    then those of the others that the base has with other values."""
    record, others, changed = {}, [], []
    ordered = sorted(expanded.tensors, key=dot_natural_key)
    for key in Bar(ordered, desc="compare with the base", unit="tensor", leave=False):
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
