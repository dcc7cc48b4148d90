"""Reads safetensors checkpoints tensor by tensor, a few megabytes in memory at a time."""

import hashlib
import json
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load as load_safetensors

from ..core.errors import InputError, library_errors_at
from ..core.jsonfile import read_json
from ..core.progress import Bar
from ..modeling.part_expansion_only import ADDED, RECORD
from .source import check_inside, load_expanded_config, resolve_checkpoint

ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8,
    "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
Bytes = bytes | bytearray | memoryview
TORCH_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64,
}  # fmt: skip
# The least bits of each type, shifted by the sign, that are infinite or NaN.
_BITS = {
    torch.float32: (torch.uint32, 0xFF << 24), torch.bfloat16: (torch.uint16, 0xFF << 8),
    torch.float16: (torch.uint16, 0x1F << 11), torch.float64: (torch.uint64, 0x7FF << 53),
}  # fmt: skip
_CHUNK = 4 << 20
_PIECE = 1 << 18
_SAMPLE = 1 << 12

ALONE = ContextVar("ALONE", default=False)  # whether the caller is inside `headers_alone`


@contextmanager
def headers_alone() -> Iterator[None]:
    """Inside, checkpoints are written without their tensors: headers, and files of the whole size that are a hole. Nor
    is a tensor read: those of one type and shape are the same."""
    before = ALONE.set(True)
    try:
        yield
    finally:
        ALONE.reset(before)


class Sized:
    """A tensor of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BITS[self.dtype] // 8


@dataclass(eq=False)
class StoredTensor(Sized):
    """A tensor of a checkpoint, and the place of its bytes.

    Attributes:
        name: its name in the files.
        parts: the stored tensors, by their names in the model, of which transformers makes this one when it loads the
            checkpoint; none of a tensor that is stored whole.
        compute: makes it of its parts.
        held: the tensor itself, of a loaded model.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int = 0
    parts: Mapping[str, "StoredTensor"] = field(default_factory=dict)
    compute: Callable[[], torch.Tensor] | None = None
    held: torch.Tensor | None = None
    _is_finite: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type, which is a floating-point type; an InputError refuses a quantised one."""
        if self.dtype not in TORCH_DTYPES:
            raise InputError(f"{self.file.parent}: tensor {self.name!r} is stored as {self.dtype}, a quantised type.")
        return TORCH_DTYPES[self.dtype]

    def load(self) -> torch.Tensor:
        """The tensor, on the CPU."""
        if self.compute is not None:
            return self.compute()
        entry = {self.name: {"dtype": self.dtype, "shape": list(self.shape), "data_offsets": [0, self.nbytes]}}
        header = json.dumps(entry).encode()
        return load_safetensors(struct.pack("<Q", len(header)) + header + b"".join(self.chunks()))[self.name]

    def chunks(self) -> Iterator[Bytes]:
        """Its bytes, in pieces."""
        yield from self._read(0, self.nbytes, _CHUNK)

    def same_bytes(self, other: "StoredTensor") -> bool:
        """Whether another tensor has the same type, shape and bytes."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        if (self.file, self.start) == (other.file, other.start) and self.compute is None and other.compute is None:
            return True
        return all(x == y for x, y in zip(self.chunks(), other.chunks(), strict=True))

    def finite_chunks(self) -> Iterator[Bytes]:
        """`chunks`; refuses NaN and infinite values, for which a tensor is looked at once, however often it is
        copied."""
        dtype = None if self._is_finite else TORCH_DTYPES.get(self.dtype)
        for chunk in self.chunks():
            if dtype is not None and not is_finite(torch.frombuffer(chunk, dtype=dtype)):
                raise InputError(f"{self.file.parent}: tensor {self.name!r} holds NaN or infinite values.")
            yield chunk
        self._is_finite = True

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """Elements `start` to `stop` of a floating-point tensor, flattened, in pieces that fit a cache; the same
        elements of tensors of different types come in the same pieces."""
        dtype, size = self.torch_dtype, ITEM_BITS[self.dtype] // 8
        stop = self.numel if stop is None else stop
        for piece in self._read(start * size, stop * size, _PIECE * size):
            yield torch.frombuffer(piece, dtype=dtype)

    def _read(self, start: int, stop: int, most: int) -> Iterator[Bytes]:
        if ALONE.get():
            return
        if self.compute is not None:
            whole = tensor_bytes(self.compute())
            # Bytes of their own, as views are compared one element after the other.
            yield from (bytearray(whole[place : min(place + most, stop)]) for place in range(start, stop, most))
            return
        with open(self.file, "rb") as file:
            file.seek(self.start + start)
            for place in range(start, stop, most):
                piece = bytearray(min(most, stop - place))
                if file.readinto(piece) < len(piece):
                    raise InputError(f"{self.file}: ends in the middle of tensor {self.name!r}.")
                yield piece


class CheckpointReader:
    """The tensors of a checkpoint folder, in the `files` that transformers would load; those of an expansion alone, and
    the others from its base. `absent` are names that the index of the shards has and no file holds, such as those of
    layers that predict further tokens.

    Raises:
        InputError: the folder holds no safetensors weights, a file is broken, or the index names one outside it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self.files, named = self._files()
        for file in self.files:
            tensors = tensors_of_file(file)
            if twice := sorted(set(tensors) & set(self.tensors)):
                raise InputError(f"{file}: tensor {twice[0]!r} is in {self.tensors[twice[0]].file.name} too.")
            self.tensors.update(tensors)
        self.absent = sorted(set(named) - set(self.tensors))
        if (self.folder / RECORD).is_file():
            self.tensors.update(self._base_tensors())

    def _base_tensors(self) -> dict[str, StoredTensor]:
        base = load_expanded_config(self.folder).parts.get("expansion_only") or {}
        if not base.get("base_model"):
            what = "holds only what an expansion added to a local folder's model"
            raise InputError(f"{self.folder}: {what}: load it with from_pretrained(..., base_model=FOLDER).")
        tensors = CheckpointReader(resolve_checkpoint(base["base_model"], base["revision"])).tensors
        with library_errors_at(f"{self.folder / RECORD}: the base model has other tensors"):
            record = read_json(self.folder / RECORD, "the record of a base model").items()
            return {name: replace(tensors[entry["name"]], name=name) for name, entry in record}

    def _files(self) -> tuple[list[Path], dict[str, str]]:
        """The files to read and, if there is an index, the file of each tensor that it names."""
        stem = ADDED if (self.folder / RECORD).is_file() else "model"
        weights, index = self.folder / f"{stem}.safetensors", self.folder / f"{stem}.safetensors.index.json"
        if weights.is_file():  # transformers reads this file even if the folder has an index
            return [weights], {}
        if index.is_file():
            where = _read_index(index)
            return [self.folder / name for name in sorted(set(where.values()))], where
        raise InputError(f"{self.folder}: no {weights.name} and no {index.name}: pickled weights are not read.")

    def fingerprint(self) -> str:
        """A hash to identify the checkpoint: of config.json and tensors' names, types, shapes and first elements."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            digest.update(b"".join(tensor._read(0, min(_SAMPLE, tensor.nbytes), _SAMPLE)))
        return digest.hexdigest()

    def check_finite(self) -> None:
        """Reads every tensor and refuses NaN and infinite values."""
        for tensor in Bar(self.tensors.values(), desc="check the weights", unit="tensor", leave=False):
            deque(tensor.finite_chunks(), maxlen=0)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU."""
        return self.tensors[name].load()


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes as safetensors stores them."""
    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


def is_finite(piece: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite, by its bits: many times as fast as `isfinite` on a CPU."""
    bits, least = _BITS[piece.dtype]
    without_sign = piece.detach().cpu().contiguous().view(bits).numpy() << 1
    return not without_sign.size or bool(without_sign.max() < least)


def _read_index(index: Path) -> dict[str, str]:
    """Maps each tensor to its file's name, from the index of a checkpoint's shards."""
    where, folder = read_json(index, "the index of a checkpoint's shards").get("weight_map"), index.parent
    if not isinstance(where, dict) or not where:
        raise InputError(f"{index}: weight_map is missing.")
    for name in sorted(set(map(str, where.values()))):
        if not name.endswith(".safetensors") or {*name} & {*"/\\\0"}:
            raise InputError(f"{index}: names {name[:80]!r}, which is not a safetensors file in this folder.")
        check_inside(folder, folder / name)
    return where


def tensors_of_file(file: Path) -> dict[str, StoredTensor]:
    """A safetensors file's tensors, after the library has checked types, shapes and offsets; reads only the header."""
    # The library maps the file read-only for numpy, which takes no memory for the tensors.
    with (
        library_errors_at(f"{file}: not a whole safetensors file"),
        safe_open(file, "np"),
        open(file, "rb") as handle,
    ):
        (length,) = struct.unpack("<Q", handle.read(8))
        header = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(name, entry["dtype"], tuple(entry["shape"]), file, 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }
