"""Reads safetensors checkpoints tensor by tensor, a few megabytes in memory at a time."""

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors.torch import load as load_safetensors

from ..errors import InputError
from ..jsonfile import read_json
from ..modeling.expansion_only import ADDED, RECORD
from .source import resolve_checkpoint

ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4,
}  # fmt: skip
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_CHUNK = 16 << 20
_PIECE = 1 << 18
_SAMPLE = 1 << 12


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's type and shape as its safetensors header gives them, and where its bytes lie."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        return prod(self.shape)


class CheckpointReader:
    """The tensors of a checkpoint folder, in one file or in shards (`files`). One that holds only what an expansion
    added gets the others from its base model.

    Raises:
        InputError: the folder holds no safetensors weights, or a file is broken.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, TensorInfo] = {}
        self.files = self._files()
        for file in self.files:
            self.tensors.update(_read_header(file))
        if (self.folder / RECORD).is_file():
            self.tensors.update(self._base_tensors())

    def _base_tensors(self) -> dict[str, TensorInfo]:
        base = read_json(self.folder / "config.json", "a configuration")["expansion_base"]
        if base["base_model"] is None:
            raise InputError(
                f"{self.folder}: holds only what an expansion added to a model that was a local folder: load it with "
                "from_pretrained(..., base_model=FOLDER), and save it with save_pretrained."
            )
        tensors = CheckpointReader(resolve_checkpoint(base["base_model"], base["revision"])).tensors
        record = read_json(self.folder / RECORD, "the record of a base model")
        return {name: tensors[entry["name"]] for name, entry in record.items()}

    def _files(self) -> list[Path]:
        stem = ADDED if (self.folder / RECORD).is_file() else "model"
        weights, index = self.folder / f"{stem}.safetensors", self.folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            where = read_json(index, "the index of a checkpoint's shards").get("weight_map")
            if not isinstance(where, dict):
                raise InputError(f"{index}: not the index of a checkpoint's shards: weight_map is missing.")
            names = sorted(set(where.values()))
            files = [self.folder / name for name in names]
            if missing := [file.name for file in files if not file.is_file()]:
                raise InputError(f"{self.folder}: the index names {', '.join(missing)}, which is not there.")
            return files
        if weights.is_file():
            return [weights]
        pickled = [path.name for path in self.folder.glob("pytorch_model*.bin")]
        hint = (
            " It holds pickled weights, which are not read: save it once more with save_pretrained." if pickled else ""
        )
        raise InputError(f"{self.folder}: no {weights.name} and no {index.name}: not a safetensors checkpoint.{hint}")

    def fingerprint(self) -> str:
        """Of config.json, and of each tensor's name, type, shape and first elements: another checkpoint has another."""
        found = hashlib.sha256((self.folder / "config.json").read_bytes())
        for name, info in sorted(self.tensors.items()):
            found.update(f"{name} {info.dtype} {info.shape}".encode())
            with open(info.file, "rb") as file:
                file.seek(info.start)
                found.update(file.read(min(_SAMPLE, info.nbytes)))
        return found.hexdigest()

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor, in pieces."""
        info = self.tensors[name]
        with open(info.file, "rb") as file:
            file.seek(info.start)
            left = info.nbytes
            while left:
                piece = file.read(min(_CHUNK, left))
                if not piece:
                    raise InputError(f"{info.file}: ends in the middle of tensor {name!r}: the file is incomplete.")
                left -= len(piece)
                yield piece

    def pieces(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """Elements `start` to `stop` of a floating-point tensor, flattened, in pieces that fit a cache.

        The same elements of tensors of different types come in the same pieces.

        Raises:
            InputError: it is of another type (a quantised checkpoint).
        """
        info = self.tensors[name]
        if info.dtype not in TORCH_DTYPES:
            raise InputError(
                f"{self.folder}: tensor {name!r} is stored as {info.dtype}; use the unquantised checkpoint."
            )
        size = ITEM_BITS[info.dtype] // 8
        stop = info.numel if stop is None else stop
        with open(info.file, "rb") as file:
            file.seek(info.start + start * size)
            for place in range(start, stop, _PIECE):
                data = bytearray(file.read(min(_PIECE, stop - place) * size))
                if len(data) < min(_PIECE, stop - place) * size:
                    raise InputError(f"{info.file}: ends in the middle of tensor {name!r}: the file is incomplete.")
                yield torch.frombuffer(data, dtype=TORCH_DTYPES[info.dtype])

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU."""
        info = self.tensors[name]
        header = json.dumps(
            {name: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [0, info.nbytes]}}
        ).encode()
        return load_safetensors(struct.pack("<Q", len(header)) + header + b"".join(self.chunks(name)))[name]


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with open(file, "rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            size = file.stat().st_size
            if length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(handle.read(length))
    except (struct.error, ValueError) as error:
        raise InputError(f"{file}: not a safetensors file ({error}).") from None
    base = 8 + length
    found = {
        name: TensorInfo(
            entry["dtype"],
            tuple(entry["shape"]),
            file,
            base + entry["data_offsets"][0],
            base + entry["data_offsets"][1],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
    if found and max(info.end for info in found.values()) > size:
        raise InputError(f"{file}: {size:,} bytes, fewer than its header says: the file is incomplete.")
    return found
