"""Reads safetensors checkpoints tensor by tensor, a few megabytes in memory at a time."""

import hashlib
import json
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_safetensors

from ..errors import InputError
from ..jsonfile import read_json
from ..modeling.expansion_only import ADDED, RECORD
from .source import lies_inside, resolve_checkpoint

ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8,
    "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_CHUNK = 16 << 20
_PIECE = 1 << 18
_SAMPLE = 1 << 12


class Sized:
    """A tensor with the type and the shape that its safetensors header gives."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True)
class TensorInfo(Sized):
    """A tensor of a checkpoint, and the place of its bytes.

    Attributes:
        made: function that makes a tensor whose parts alone are stored; None for a stored tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    made: Callable[[], torch.Tensor] | None = None


class CheckpointReader:
    """The tensors of a checkpoint folder, in one file or in shards (`files`): the files that transformers would load.
    A checkpoint with only the tensors added by an expansion takes the other tensors from its base model.

    Raises:
        InputError: the folder holds no safetensors weights, a file is broken, or the index of the shards names a file
            outside the folder or a tensor that its file lacks.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, TensorInfo] = {}
        # Of each tensor that is put together, its parts' names in the files, by their names in the model.
        self.parts: dict[str, dict[str, str]] = {}
        self._stored_parts: dict[str, TensorInfo] = {}
        self._finite: set[str] = set()
        self.files, wanted = self._files()
        for file in self.files:
            tensors = _read_header(file)
            if twice := sorted(set(tensors) & set(self.tensors)):
                raise InputError(f"{file}: tensor {twice[0]!r} is in {self.tensors[twice[0]].file.name} too.")
            self.tensors.update(tensors)
        for name, place in wanted.items():
            if name not in self.tensors or self.tensors[name].file.name != place:
                raise InputError(f"{self.folder / place}: lacks tensor {name!r}, which the index says it holds.")
        if (self.folder / RECORD).is_file():
            self.tensors.update(self._base_tensors())

    def _base_tensors(self) -> dict[str, TensorInfo]:
        base = read_json(self.folder / "config.json", "a configuration").get("expansion_base")
        if not isinstance(base, dict) or not all(
            isinstance(base.get(key, 0), str | None) for key in ("base_model", "revision")
        ):
            raise InputError(f"{self.folder}: config.json does not say which base model it adds to (expansion_base).")
        if base["base_model"] is None:
            raise InputError(
                f"{self.folder}: holds only the tensors that an expansion added to a local folder's model: load it "
                "with from_pretrained(..., base_model=FOLDER), and save the whole model with save_pretrained."
            )
        tensors = CheckpointReader(resolve_checkpoint(base["base_model"], base["revision"])).tensors
        record = read_json(self.folder / RECORD, "the record of a base model")
        for name, entry in record.items():
            if not isinstance(entry, dict) or entry.get("name") not in tensors:
                raise InputError(f"{self.folder / RECORD}: the base model has no tensor for {name!r}.")
        return {name: tensors[entry["name"]] for name, entry in record.items()}

    def _files(self) -> tuple[list[Path], dict[str, str]]:
        """The files to read and, if there is an index, the file that must hold each tensor."""
        stem = ADDED if (self.folder / RECORD).is_file() else "model"
        weights, index = self.folder / f"{stem}.safetensors", self.folder / f"{stem}.safetensors.index.json"
        if weights.is_file():  # transformers reads this file even if the folder has an index
            return [weights], {}
        if index.is_file():
            where = _read_index(index)
            return [self.folder / name for name in sorted(set(where.values()))], where
        hint = ""
        if any(self.folder.glob("pytorch_model*.bin")):
            hint = " It holds pickled weights, which are not read: load and save it with save_pretrained."
        raise InputError(f"{self.folder}: no {weights.name} and no {index.name}: not a safetensors checkpoint.{hint}")

    def fingerprint(self) -> str:
        """A hash of config.json and of each tensor's name, type, shape and first elements, which identifies the
        checkpoint."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for name, info in sorted(self.tensors.items()):
            digest.update(f"{name} {info.dtype} {info.shape}".encode())
            digest.update(b"".join(_read_bytes(name, info, 0, min(_SAMPLE, info.nbytes), _SAMPLE)))
        return digest.hexdigest()

    def put_together(
        self,
        name: str,
        shape: tuple[int, ...],
        parts: Mapping[str, str],
        made: Callable[[dict[str, torch.Tensor]], Any],
    ) -> None:
        """Replaces stored tensors, by their names in the model, with the one that transformers makes of them (`made`)
        when it loads the checkpoint."""
        stored = {part: self.tensors.pop(part) for part in parts.values()}
        first = next(iter(stored.values()))
        self.parts[name] = dict(parts)
        self._stored_parts |= stored

        def make() -> torch.Tensor:
            return made({part: _load(part, info) for part, info in stored.items()})

        self.tensors[name] = TensorInfo(first.dtype, shape, first.file, 0, make)

    def info(self, name: str) -> TensorInfo:
        """The header of a tensor, or of a part of one that is put together."""
        return self.tensors[name] if name in self.tensors else self._stored_parts[name]

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor, in pieces."""
        return _chunks(name, self.info(name))

    def same_bytes(self, name: str, other: "CheckpointReader", theirs: str) -> bool:
        """Whether another checkpoint's tensor has the same type, shape and bytes."""
        a, b = self.info(name), other.info(theirs)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if (a.file, a.start) == (b.file, b.start) and a.made is None and b.made is None:
            return True
        return all(x == y for x, y in zip(self.chunks(name), other.chunks(theirs), strict=True))

    def finite_chunks(self, name: str) -> Iterator[bytes]:
        """`chunks` of a tensor that is to be copied. Refuses NaN and infinite values, for which a tensor is looked at
        once, however often it is copied."""
        dtype = None if name in self._finite else TORCH_DTYPES.get(self.info(name).dtype)
        for chunk in self.chunks(name):
            if dtype is not None and not is_finite(torch.frombuffer(bytearray(chunk), dtype=dtype)):
                raise InputError(
                    f"{self.folder}: tensor {name!r} holds NaN or infinite values; the checkpoint is damaged."
                )
            yield chunk
        self._finite.add(name)

    def check_finite(self) -> None:
        """Reads every tensor and refuses NaN and infinite values."""
        for name in self.tensors:
            deque(self.finite_chunks(name), maxlen=0)

    def pieces(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """Elements `start` to `stop` of a floating-point tensor, flattened, in pieces that fit a cache.

        The same elements of tensors of different types come in the same pieces.
        """
        info = self.tensors[name]
        if info.dtype not in TORCH_DTYPES:
            raise InputError(
                f"{self.folder}: tensor {name!r} is stored as {info.dtype}; use the unquantised checkpoint."
            )
        size = ITEM_BITS[info.dtype] // 8
        stop = info.numel if stop is None else stop
        if info.made is not None:
            whole = info.made().flatten()
            yield from (whole[place : min(place + _PIECE, stop)] for place in range(start, stop, _PIECE))
            return
        for piece in _read_bytes(name, info, start * size, stop * size, _PIECE * size):
            yield torch.frombuffer(bytearray(piece), dtype=TORCH_DTYPES[info.dtype])

    def rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Rows of a stored floating-point tensor, `[len(rows), h]`, whose last dimension is h; only they are read."""
        info = self.info(name)
        if info.made is not None:
            return self.tensor(name).flatten(0, -2)[list(rows)]
        size = info.shape[-1] * ITEM_BITS[info.dtype] // 8
        pieces = (piece for row in rows for piece in _read_bytes(name, info, row * size, (row + 1) * size, size))
        return torch.frombuffer(bytearray().join(pieces), dtype=TORCH_DTYPES[info.dtype]).view(len(rows), -1)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU."""
        return _load(name, self.info(name))


def _load(name: str, info: TensorInfo) -> torch.Tensor:
    entry = {name: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [0, info.nbytes]}}
    header = json.dumps(entry).encode()
    return load_safetensors(struct.pack("<Q", len(header)) + header + b"".join(_chunks(name, info)))[name]


def _chunks(name: str, info: TensorInfo) -> Iterator[bytes]:
    if info.made is None:
        yield from _read_bytes(name, info, 0, info.nbytes, _CHUNK)
    else:
        whole = info.made().flatten()
        for piece in whole.split(_CHUNK // whole.element_size()):
            yield tensor_bytes(piece)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes as safetensors stores them."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _read_bytes(name: str, info: TensorInfo, start: int, stop: int, most: int) -> Iterator[bytes]:
    """Bytes `start` to `stop` of a stored tensor, in pieces of `most` bytes."""
    with open(info.file, "rb") as file:
        file.seek(info.start + start)
        for place in range(start, stop, most):
            piece = file.read(min(most, stop - place))
            if len(piece) < min(most, stop - place):
                raise InputError(f"{info.file}: ends in the middle of tensor {name!r}: the file is incomplete.")
            yield piece


def is_finite(piece: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. Several times as fast as `isfinite`: NaN is the least and the largest."""
    return all(extreme.isfinite() for extreme in piece.aminmax())


def _read_index(index: Path) -> dict[str, str]:
    """Maps each tensor to its file's name, from the index of a checkpoint's shards."""
    where = read_json(index, "the index of a checkpoint's shards").get("weight_map")
    if not isinstance(where, dict) or not where:
        raise InputError(f"{index}: not the index of a checkpoint's shards: weight_map is missing.")
    folder = index.parent
    for name in sorted(set(map(_plain_name, where.values()))):
        if not name.endswith(".safetensors"):
            raise InputError(f"{index}: names {name!r}, which is not a safetensors file in this folder.")
        if not (folder / name).is_file():
            raise InputError(f"{folder}: the index names {name}, but the file is missing.")
        if not lies_inside(folder, folder / name):
            raise InputError(f"{folder / name}: is a link that leads out of the folder; put the file itself there.")
    return where


def _plain_name(name: Any) -> str:
    """`name` if it is a plain file name, else a word that is not a file name."""
    plain = isinstance(name, str) and len(name) < 256 and not set(name) & set("/\\\0")
    return name if plain else f"{str(name)[:80]}?"


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """The file's tensors, after the library has checked types, shapes and offsets; reads only the header."""
    try:
        # The library maps the file read-only for numpy, which takes no memory for the tensors.
        with safe_open(file, "np"), open(file, "rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length))
    except SafetensorError as error:
        reason = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        if "not fully covered" in reason:
            raise InputError(
                f"{file}: has {file.stat().st_size:,} bytes, fewer than its header says: the file is incomplete."
            ) from None
        raise InputError(f"{file}: not a safetensors file ({reason}).") from None
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise InputError(f"{file}: cannot be read ({error}).") from None
    header.pop("__metadata__", None)
    if unknown := [name for name, entry in header.items() if entry["dtype"] not in ITEM_BITS]:
        kind = header[unknown[0]]["dtype"]
        raise InputError(f"{file}: tensor {unknown[0]!r} is stored as {kind}, a type that this package does not know.")
    return {
        name: TensorInfo(entry["dtype"], tuple(entry["shape"]), file, 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }
