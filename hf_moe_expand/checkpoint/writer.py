"""Writes checkpoints as a stream, one piece of one tensor in memory, and folders whole or not at all."""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub.serialization import split_state_dict_into_shards_factory
from transformers.core_model_loading import dot_natural_key
from transformers.dynamic_module_utils import custom_object_save

from ..core.disk import DEFAULT_SHARD_SIZE as DEFAULT_SHARD_SIZE
from ..core.disk import check_room, readable_size
from ..core.errors import InputError, is_full_disk, library_errors_at, named_as
from ..core.jsonfile import read_json, write_json
from ..core.progress import Bar
from ..core.scratch import named, remove_leftovers, sibling
from ..modeling import ExpandedConfig, model_class
from ..modeling.part_expansion_only import RECORD
from .facts import set_part
from .reader import ALONE, ITEM_BITS, TORCH_DTYPES, Bytes, Sized, StoredTensor
from .source import ADAPTER, CODE, TOKENIZER_FILES, check_inside
from .tokenizer import keep_tokenizer

# What this package, transformers and the hub's client put into a checkpoint folder.
_BELONGS = (
    "config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json",
    *TOKENIZER_FILES, *CODE, RECORD, "preprocessor_config.json", "processor_config.json", "README.md", ".gitattributes",
    "base_check.json", "plan.json", "recipe.yaml", "settings.json", "analysis.json", "evaluation.json",
    "validation.json", "steps.json", "trainer_state.json", "training_args.bin", "optimizer.pt", "scheduler.pt",
    "scaler.pt", "rng_state*.pth", ADAPTER, "__pycache__/*.pyc",
)  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class OutputTensor(Sized):
    """A tensor to write; `data()` is called when the tensor is written, and gives its bytes in pieces. `stored` is the
    tensor of which it is a copy."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Iterable[Bytes]]
    stored: StoredTensor | None = None

    @classmethod
    def copy_of(cls, tensor: StoredTensor, name: str | None = None) -> "OutputTensor":
        """A byte-for-byte copy of a tensor, under its own name or another one."""
        return cls(name or tensor.name, tensor.dtype, tensor.shape, tensor.finite_chunks, tensor)


def _write_weights(
    folder: Path, tensors: Sequence[OutputTensor], stem: str, what: str | None, max_shard_size: str | int
) -> None:
    """Writes `STEM.safetensors`, or shards and their index if the weights exceed `max_shard_size`."""
    by_name = {tensor.name: tensor for tensor in tensors}
    with library_errors_at(f"max_shard_size is {max_shard_size!r}"):
        split = split_state_dict_into_shards_factory(
            by_name,
            get_storage_size=lambda tensor: tensor.nbytes,
            get_storage_id=lambda tensor: None,
            filename_pattern=f"{stem}{{suffix}}.safetensors",
            max_shard_size=max_shard_size,
        )
    with Bar(total=len(tensors), desc=what, unit="tensor", disable=what is None or ALONE.get()) as bar:
        for filename, names in split.filename_to_tensors.items():
            write_tensors(folder / filename, [by_name[name] for name in names], bar)
    if split.is_sharded:
        # The keys and their order are those of `save_pretrained`.
        metadata = {"total_parameters": sum(t.numel for t in tensors), "total_size": sum(t.nbytes for t in tensors)}
        text = json.dumps({"metadata": metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True)
        (folder / f"{stem}.safetensors.index.json").write_text(f"{text}\n", encoding="utf-8")


def write_tensors(path: Path, tensors: Iterable[OutputTensor], bar: Any) -> None:
    """Writes a safetensors file as a stream."""
    # Widest type first, then by name: the order of the safetensors library, which keeps every tensor aligned.
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BITS[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in ordered:
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        if ALONE.get():
            file.truncate(file.tell() + offset)
            return
        for tensor in ordered:
            written = sum(file.write(piece) for piece in tensor.data())
            if written != tensor.nbytes:
                raise RuntimeError(f"{tensor.name}: wrote {written} bytes instead of {tensor.nbytes}")
            bar.update()


def name_code(config: Any, is_whole: bool) -> None:
    """Lets a configuration name the code of an expanded model, or none; `is_whole`: its checkpoint has all tensors."""
    for name in ("auto_map", "custom_pipelines"):  # the base's own code
        vars(config).pop(name, None)
    if isinstance(config, ExpandedConfig):
        if is_whole:
            set_part(config, "expansion_only", None)
        static = model_class(config)
        config.architectures, config.auto_map = [static.__name__], static.auto_map(config)


def write_checkpoint(
    out: str | os.PathLike,
    config: Any,
    tensors: Iterable[OutputTensor],
    companions: Path | None,
    what: str | None,
    max_shard_size: str | int,
    overwrite: bool,
    files: Mapping[str, bytes] | None = None,
    stem: str = "model",
) -> Path:
    """Writes a checkpoint folder, whole or not at all; with code, if the model is an expanded one.

    Args:
        companions: folder whose tokenizer, templates and generation config are copied.
        what: name of the progress bar; None shows none.
        files: further files to write: content by name.
        stem: name of the weight files, without their ending.
    """
    ordered = sorted(tensors, key=lambda tensor: dot_natural_key(tensor.name))  # the library's order, hence its shards
    needed = 0 if ALONE.get() else sum(tensor.nbytes for tensor in ordered)
    with new_folder(out, overwrite, needed_bytes=needed) as partial:
        if isinstance(config, ExpandedConfig):
            custom_object_save(model_class(config), partial)
        config.save_pretrained(partial)
        if companions is not None:
            copy_companions(companions, partial, TOKENIZER_FILES)
            keep_tokenizer(companions, partial)
        for name, content in (files or {}).items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        _write_weights(partial, ordered, stem, what, max_shard_size)
    return Path(out)


def copy_companions(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copies tokenizer, generation config and chat template, without references to code (`auto_map`): loading a
    checkpoint of this package runs no other code."""
    for file in (file for pattern in patterns for file in source.glob(pattern)):
        check_inside(source, file)
        destination = target / file.relative_to(source)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, destination)
        if file.suffix == ".json" and b'"auto_map"' in file.read_bytes():
            fields = read_json(file, "a JSON file")
            write_json(destination, {name: value for name, value in fields.items() if name != "auto_map"})


def check_output(out: str | os.PathLike, overwrite: bool, *inputs: str | os.PathLike) -> Path:
    """Checks that `out` may become an output folder. First removes what dead processes left beside it, and
    restores `out` if one died while replacing it."""
    with _errors_at(out):
        out = named(Path(out))
        remove_leftovers(out)
        check_apart(out, *inputs)
        sibling(out, "partial").exists()  # an OSError if the name is too long
        if os.path.lexists(out):
            _check_replaceable(out, overwrite)
        check_writable(out)
    return out


def _errors_at(out: str | os.PathLike) -> Any:
    return library_errors_at(f"{out}: cannot be written", OSError, RuntimeError)  # the second: a loop of links


def check_writable(out: Path) -> None:
    """Refuses an output below a file, or below a folder that is not writable."""
    with _errors_at(out):
        place = next(parent for parent in out.absolute().parents if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        raise InputError(f"{out}: cannot be written, as {place} is no folder, or not writable.")


def check_apart(out: Path, *inputs: str | os.PathLike) -> None:
    """Refuses an output folder that is one of the inputs, holds one or lies in one."""
    there = out.resolve()
    for path in (Path(path).resolve() for path in inputs):
        if there == path or there in path.parents or path in there.parents:
            raise InputError(f"{out}: is, holds or lies in the input folder {path}; give another output folder.")


def _check_replaceable(out: Path, overwrite: bool) -> None:
    if not overwrite:
        raise InputError(f"{out}: exists already; choose another folder or pass --overwrite.")
    if not out.is_dir() or out.is_symlink():
        raise InputError(f"{out}: is a file or a link, not a folder, so it is not overwritten.")
    if any(out.iterdir()) and not any((out / name).is_file() for name in ("config.json", ADAPTER)):
        raise InputError(f"{out}: is not a checkpoint (no config.json), so it is not overwritten; delete it first.")
    if (foreign := foreign_file(out)) is not None:
        raise InputError(f"{out}: holds {foreign}, which is not part of a checkpoint, so it is not overwritten.")


def foreign_file(folder: Path) -> str | None:
    """The first file of a checkpoint folder, by name, that neither this package nor transformers writes."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.is_dir() and not file.is_symlink():
            belongs = str(name) in ("additional_chat_templates", "__pycache__")
        else:
            depth = len(name.parts) - 1
            belongs = any(fnmatchcase(str(name), one) and one.count("/") == depth for one in _BELONGS)
        if not belongs:
            return str(name)
    return None


@contextmanager
def new_folder(out: str | os.PathLike, overwrite: bool = False, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields a folder beside `out` to write into, which is renamed to `out` on success and removed on failure. Folders
    that killed processes left beside `out` are removed first."""
    out = check_output(out, overwrite)
    partial, replaced = sibling(out, "partial"), sibling(out, "replaced")
    with _errors_at(out):
        check_room(out, needed_bytes)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    try:
        with named_as(partial, out):
            yield partial
        _give_usual_modes(partial)
        if os.path.lexists(out):  # perhaps since a moment ago, by another process
            _check_replaceable(out, overwrite)
            os.rename(out, replaced)
        os.rename(partial, out)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:
        needed = max(needed_bytes, sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()))
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.is_dir() and not os.path.lexists(out):
            os.rename(replaced, out)
        if is_full_disk(error):
            raise InputError(f"{out}: the disk is full; at least {readable_size(needed)} are needed.") from error
        raise


def _give_usual_modes(folder: Path) -> None:
    """Of files that a library made for their owner alone."""
    probe = folder / ".mode"
    probe.touch()
    usual = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600:
            file.chmod(usual)
