"""Writes a GGUF file as a stream, one piece of one tensor in memory, and the file whole or not at all."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..disk import free_bytes
from ..errors import InputError, is_full_disk
from ..extra import import_extra
from ..scratch import beside, remove_partial_files
from .reader import TORCH_DTYPES, is_finite
from .stored import widened
from .writer import OutputTensor, check_place

# The types that this package writes, and the number of each in `general.file_type`.
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: its name there.
        tensor: the tensor; its type is that of the checkpoint.
        kind: type to write it in, one of `FILE_TYPES`; rows that q8_0 cannot take, whose length 32 does not divide,
            become f16.
    """

    name: str
    tensor: OutputTensor
    kind: str

    @property
    def written(self) -> str:
        """The type in which it is written."""
        return "f16" if self.kind == "q8_0" and self.tensor.shape[-1] % 32 else self.kind


def type_of(dtype: str) -> str:
    """The type of a GGUF file that keeps a checkpoint's tensors as they are."""
    return {"F16": "f16", "BF16": "bf16"}.get(dtype, "f32")


def write_gguf(
    out: Path, architecture: str, fields: Callable[[Any], None], tensors: Sequence[GgufTensor], overwrite: bool
) -> None:
    """Writes a file.

    Args:
        architecture: name of llama.cpp's architecture.
        fields: adds the file's fields to a `gguf.GGUFWriter`.

    Raises:
        InputError: see `new_file`; or a value is not finite in the type that it is to have.
    """
    gguf = import_extra("gguf", "gguf")
    types = [gguf.GGMLQuantizationType[tensor.written.upper()] for tensor in tensors]
    shapes = [gguf.quant_shape_to_byte_shape(t.tensor.shape, kind) for t, kind in zip(tensors, types, strict=True)]
    total = sum(map(prod, shapes))
    with new_file(out, overwrite, total) as partial:
        writer = gguf.GGUFWriter(partial, architecture)
        fields(writer)
        for tensor, shape, kind in zip(tensors, shapes, types, strict=True):
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), prod(shape), kind)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            (file,) = writer.fout
            writer.write_padding(file, file.tell())
            for tensor, shape, kind in zip(tqdm(tensors, desc="export", unit="tensor"), shapes, types, strict=True):
                size = sum(file.write(piece) for piece in _converted(tensor, kind, gguf))
                if size != prod(shape):
                    raise RuntimeError(f"{tensor.name}: wrote {size} bytes instead of {prod(shape)}")
                writer.write_padding(file, size)
        finally:
            writer.close()


def _converted(tensor: GgufTensor, kind: Any, gguf: Any) -> Iterator[bytes]:
    """The bytes of a tensor in the file's type. A row lies in one piece, or its pieces are whole blocks."""
    dtype = tensor.tensor.dtype
    if dtype not in TORCH_DTYPES:
        raise InputError(f"Tensor {tensor.name!r} is stored as {dtype}; use the unquantised checkpoint.")
    for piece in tensor.tensor.data():
        values = torch.frombuffer(bytearray(piece), dtype=TORCH_DTYPES[dtype])
        if tensor.written == "q8_0":
            blocks = widened(values).to(torch.float32).view(-1, 32).numpy()
            yield gguf.quantize(blocks, kind).tobytes()
            continue
        result = values.to(TORCH_DTYPES[tensor.written.upper()])
        if not is_finite(result):
            raise InputError(f"Tensor {tensor.name!r}: a value is not finite in {tensor.written}; use --type bf16.")
        yield result.view(torch.uint8).numpy().tobytes()


def check_file(out: Path, overwrite: bool) -> None:
    """Checks that `out` may become a file.

    Raises:
        InputError: it exists (without `overwrite`) or is a folder, or cannot be made there.
    """
    if out.is_dir():
        raise InputError(f"{out}: is a folder; give the name of the .gguf file to write.")
    if os.path.lexists(out) and not overwrite:
        raise InputError(f"{out}: exists already; choose another file or pass --overwrite.")
    check_place(out)


@contextmanager
def new_file(out: Path, overwrite: bool, needed_bytes: int) -> Iterator[Path]:
    """Yields a file beside `out` to write, which is renamed to `out` on success and removed on failure.

    Raises:
        InputError: see `check_file`; or the disk has too little room (the message gives the needed bytes).
    """
    check_file(out, overwrite)
    if needed_bytes > (free := free_bytes(out)):
        raise InputError(
            f"{out}: needs {needed_bytes:,} bytes, but the disk has {free:,} bytes free; choose another disk."
        )
    partial = beside(out, "partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_partial_files(out)
        yield partial
        os.replace(partial, out)
    except Exception as error:
        if is_full_disk(error):
            raise InputError(
                f"{out}: the disk is full; at least {needed_bytes:,} bytes are needed. The partial output was removed."
            ) from error
        if isinstance(error, OSError):
            raise InputError(f"{out}: cannot be written ({error.strerror}).") from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def in_type(name: str, tensor: OutputTensor, kind: str) -> GgufTensor:
    """A tensor in a file of type `kind`. What is small stays in float32, as llama.cpp expects it: vectors (norms,
    biases) and routers."""
    small = len(tensor.shape) == 1 or "ffn_gate_inp" in name
    return GgufTensor(name, tensor, "f32" if small else kind)
