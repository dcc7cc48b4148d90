"""Writes checkpoints as a stream, one piece of one tensor in memory, and folders whole or not at all."""

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.serialization import split_state_dict_into_shards_factory
from safetensors.torch import save as save_safetensors

from ..errors import InputError
from .reader import ITEM_BITS

DEFAULT_SHARD_SIZE = "5GB"
_ZEROS = 16 << 20


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written; `data()` gives its bytes in pieces, when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Iterable[bytes]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BITS[self.dtype] // 8


def zeros(name: str, dtype: str, shape: tuple[int, ...]) -> OutputTensor:
    """A tensor of zeros."""
    size = prod(shape) * ITEM_BITS[dtype] // 8
    return OutputTensor(name, dtype, shape, lambda: (bytes(min(_ZEROS, size - at)) for at in range(0, size, _ZEROS)))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes as safetensors stores them."""
    stored = save_safetensors({"t": tensor.contiguous()})
    (length,) = struct.unpack("<Q", stored[:8])
    return stored[8 + length :]


def check_shard_size(size: str | int) -> None:
    """Refuses a size that is not one.

    Raises:
        InputError: that.
    """
    try:
        split_state_dict_into_shards_factory(
            {}, get_storage_size=len, filename_pattern="{suffix}", get_storage_id=len, max_shard_size=size
        )
    except ValueError:
        raise InputError(f"max_shard_size is {size!r}: give a size such as 5GB or 500MB.") from None


def write_weights(
    folder: Path, tensors: Sequence[OutputTensor], max_shard_size: str | int = DEFAULT_SHARD_SIZE, stem: str = "model"
) -> None:
    """Writes `model.safetensors`, or shards and their index where it would be larger than `max_shard_size`."""
    check_shard_size(max_shard_size)
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.nbytes,
        get_storage_id=lambda tensor: None,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=max_shard_size,
    )
    for filename, names in split.filename_to_tensors.items():
        _write_file(folder / filename, [by_name[name] for name in names])
    if split.is_sharded:
        # The keys and their order are those of `save_pretrained`.
        metadata = {
            "total_parameters": sum(prod(t.shape) for t in tensors),
            "total_size": sum(t.nbytes for t in tensors),
        }
        index = {"metadata": metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / f"{stem}.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


def _write_file(path: Path, tensors: Iterable[OutputTensor]) -> None:
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
        for tensor in ordered:
            written = sum(file.write(piece) for piece in tensor.data())
            if written != tensor.nbytes:
                raise RuntimeError(f"{tensor.name}: wrote {written} bytes instead of {tensor.nbytes}")


def check_output(out: str | os.PathLike, overwrite: bool, *inputs: str | os.PathLike) -> Path:
    """Refuses an output folder that exists (unless `overwrite`), is one of the inputs or holds one."""
    out = Path(out)
    there = out.resolve()
    for path in (Path(path).resolve() for path in inputs):
        if there == path:
            raise InputError(f"{out}: the output folder is the input folder; nothing is changed in place.")
        if there in path.parents:
            raise InputError(f"{out}: the input folder {path} lies in it; give another output folder.")
    if out.exists() and not overwrite:
        raise InputError(f"{out}: exists already; choose another folder or pass --overwrite.")
    if out.exists() and (not out.is_dir() or out.is_symlink()):
        raise InputError(f"{out}: is a {'link' if out.is_symlink() else 'file'}, not a folder.")
    if out.exists() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise InputError(f"{out}: is no checkpoint (it has no config.json), so it is not overwritten; delete it first.")
    return out


@contextmanager
def new_folder(out: str | os.PathLike, overwrite: bool = False, needed_bytes: int = 0) -> Iterator[Path]:
    """A folder beside `out` to write into, renamed to `out` when all went well and removed when not.

    Raises:
        InputError: the disk has no room.
    """
    out = check_output(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if needed_bytes > free:
        raise InputError(f"{out}: needs {needed_bytes:,} bytes, but the disk has {free:,} free.")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if out.exists():
            replaced = out.with_name(f".{out.name}.replaced-{os.getpid()}")
            os.rename(out, replaced)
            os.rename(partial, out)
            shutil.rmtree(replaced)
        else:
            os.rename(partial, out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"{out}: the disk is full; nothing was left behind.") from error
        raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
