"""Loads checkpoints with only the tensors added by an expansion: fetches and checks the base model's tensors.

Such a checkpoint has new experts, routers and classifiers in `expansion.safetensors`, and in `expansion_base.json`, for
every other tensor, its name in the base checkpoint and the SHA-256 of its bytes. `config.parts["expansion_only"]` names
the base model.
"""

import copy
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from .part import HUB_OPTIONS, BasePart

ADDED = "expansion"
RECORD = "expansion_base.json"


def load_assembled(load: Any, path: Any, config: Any, arguments: dict[str, Any]) -> Any:
    """Calls `load(None, ...)`, `from_pretrained` of the backbone's class, with the joint state dict of the expansion at
    `path` and its base. `base_model` among the arguments, a folder or hub id, replaces the recorded base; raises
    ValueError where that is not known, or is not the one that was expanded."""
    override = arguments.pop("base_model", None)
    hub = {name: arguments.pop(name) for name in HUB_OPTIONS if arguments.get(name) is not None}
    recorded = config.parts["expansion_only"]
    base, revision = (recorded["base_model"], recorded["revision"]) if override is None else (override, None)
    if base is None:
        name = config.expansions[0]["base_model"]
        raise ValueError(f"{path} holds only what was added to {name}, a local folder: give base_model=FOLDER.")
    base_hub = {name: value for name, value in hub.items() if name not in ("revision", "subfolder", "force_download")}
    base_tensors = _tensors(base, "model", {**base_hub, "revision": revision})
    record_file: Any = cached_file(path, RECORD, **hub)
    with open(record_file, encoding="utf-8") as file:
        record = json.load(file)
    _check(base_tensors, record, base)
    state = _tensors(path, ADDED, hub) | {name: base_tensors[entry["name"]] for name, entry in record.items()}
    if "generation_config" not in arguments:
        with suppress(OSError):  # without a generation config, the model makes one from its configuration
            arguments["generation_config"] = GenerationConfig.from_pretrained(path, **hub)
    config = copy.deepcopy(config)
    del config.parts["expansion_only"]  # the assembled model is complete, and is saved as a whole
    loaded = load(None, config=config, state_dict=state, **arguments)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.name_or_path = model.config.name_or_path = str(path)
    return loaded


def _tensors(path: Any, stem: str, hub: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, mapped into memory without reading them."""
    single: Any = cached_file(path, f"{stem}.safetensors", _raise_exceptions_for_missing_entries=False, **hub)
    files = [single]
    if single is None:
        index = cached_file(path, f"{stem}.safetensors.index.json", **hub)
        files, _ = get_checkpoint_shard_files(path, index, **hub)
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _check(tensors: dict[str, torch.Tensor], record: dict[str, dict[str, str]], base: Any) -> None:
    wanted = list(record.values())
    for entry in wanted:
        if entry["name"] not in tensors:
            raise ValueError(f"{base} is not the base model that was expanded: it has no tensor {entry['name']}.")
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases the GIL
        for entry, digest in zip(wanted, pool.map(lambda e: _sha256(tensors[e["name"]]), wanted), strict=True):
            if digest != entry["sha256"]:
                pool.shutdown(cancel_futures=True)
                raise ValueError(f"{base} is not the base model that was expanded: tensor {entry['name']} differs.")


def _sha256(tensor: torch.Tensor) -> str:
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()


class Part(BasePart):
    name = "expansion_only"
    flat: ClassVar = {"expansion_base": None}
    is_saved = False
    not_served = (
        "{server} reads weight files itself, and this checkpoint holds only the tensors that an expansion added: load "
        "it with from_pretrained, save the whole model with save_pretrained, and serve that."
    )

    def load(self, load: Callable, path: Any, config: Any) -> Callable:
        return lambda _, *__, config, **arguments: load_assembled(load, path, config, arguments)
