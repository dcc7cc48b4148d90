"""Writes a whole checkpoint folder: configuration, code, companions and, as a stream, the weights."""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import AutoTokenizer
from transformers.core_model_loading import dot_natural_key
from transformers.dynamic_module_utils import custom_object_save
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from ..errors import InputError
from ..jsonfile import read_json, write_json
from ..modeling import ExpandedConfig, model_class
from .local import EXPANDED
from .source import COMPANIONS, lies_inside
from .writer import OutputTensor, new_folder, write_weights

_CODE_OF_THE_BASE = ("auto_map", "custom_pipelines")


def write_checkpoint(
    out: str | os.PathLike,
    config: Any,
    tensors: Iterable[OutputTensor],
    companions: Sequence[tuple[Path, Sequence[str]]],
    what: str,
    max_shard_size: str | int,
    overwrite: bool,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes a checkpoint folder, whole or not at all.

    Args:
        config: configuration of the model, dense or expanded; code is written for an expanded one.
        tensors: the tensors, in any order.
        companions: folders and the file patterns to copy from each.
        what: name of the progress bar.
        files: further files to write: content by name.
    """
    ordered = sorted(tensors, key=lambda tensor: dot_natural_key(tensor.name))  # the library's order, hence its shards
    with new_folder(out, overwrite, needed_bytes=sum(tensor.nbytes for tensor in ordered)) as partial:
        if isinstance(config, ExpandedConfig):
            static = model_class(config)
            config.architectures = [static.__name__]
            config.auto_map = static.auto_map(config)
            for name in ("expansion_base", "custom_pipelines"):  # the whole model is written, and no other code
                vars(config).pop(name, None)
            custom_object_save(static, partial)
        else:
            for name in _CODE_OF_THE_BASE:
                vars(config).pop(name, None)
        config.save_pretrained(partial)
        for folder, patterns in companions:
            copy_companions(folder, partial, patterns)
            if isinstance(config, ExpandedConfig) and "tokenizer_config.json" in patterns:
                _keep_tokenizer_class(folder, partial)
        for name, content in (files or {}).items():
            (partial / name).write_bytes(content)
        with tqdm(total=len(ordered), desc=what, unit="tensor") as bar:
            write_weights(partial, [_counted(tensor, bar) for tensor in ordered], max_shard_size)
    return Path(out)


def copy_companions(source: Path, target: Path, patterns: Sequence[str] = COMPANIONS) -> None:
    """Copies tokenizer, generation config and chat template, without references to code (`auto_map`): loading a
    checkpoint of this package runs no other code."""
    for pattern in patterns:
        for file in source.glob(pattern):
            _check_companion(source, file)
            destination = target / file.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, destination)
            if file.suffix == ".json" and b'"auto_map"' in file.read_bytes():
                fields = read_json(file, "a JSON file")
                write_json(destination, {name: value for name, value in fields.items() if name != "auto_map"})


def _check_companion(folder: Path, file: Path) -> None:
    """Refuses a link out of a checkpoint's folder, which could lead a file of the user's into what is published, and a
    folder, pipe or device, whose reading may never end."""
    if not lies_inside(folder, file):
        raise InputError(f"{file}: is a link that leads out of the folder; put the file itself there.")
    if not file.is_file():
        raise InputError(f"{file}: is not a file; a checkpoint's parts are files.")


def _counted(tensor: OutputTensor, bar: Any) -> OutputTensor:
    def data() -> Iterable[bytes]:
        yield from tensor.data()
        bar.update()

    return replace(tensor, data=data)


def _keep_tokenizer_class(source: Path, target: Path) -> None:
    """Writes the class of a dense checkpoint's tokenizer into the copied `tokenizer_config.json` if it says another.

    For some model types the library overrules the class in this file (it loads every tokenizer of a Qwen2 model as
    `Qwen2Tokenizer`, which cuts words in its own way). It does not know the model types of expanded models, so that
    their text would be cut in another way than the base's.
    """
    file = target / "tokenizer_config.json"
    if not file.is_file():
        return
    model_type = read_json(source / "config.json", "a configuration").get("model_type")
    fields = read_json(file, "a JSON file")
    told = str(fields.get("tokenizer_class"))
    registered = TOKENIZER_MAPPING_NAMES.get(str(model_type))
    if model_type in EXPANDED or registered is None or _plain(registered) == _plain(told):
        return
    try:
        actual = type(AutoTokenizer.from_pretrained(source, trust_remote_code=False)).__name__
    except Exception:  # the library raises many types; who loads the tokenizer will see which
        return
    if _plain(actual) != _plain(told):
        write_json(file, {**fields, "tokenizer_class": actual})


def _plain(name: str) -> str:
    return name.removesuffix("Fast")
