"""Makes a checkpoint of a GGUF file, the format of llama.cpp."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..errors import InputError, first_line
from ..extra import import_extra
from .gguf_tokenizer import keep_gguf_tokenizer
from .writer import new_folder

# What a model that was read from quantised weights still says of itself, though its weights are float32 by then.
_TRACES = ("hf_quantizer", "is_quantized", "quantization_method", "_is_quantized_training_enabled")
# Types of tensors that are not quantised.
_WHOLE = {"F64", "F32", "F16", "BF16"}


def checkpoint_from_gguf(file: str | os.PathLike, out: str | os.PathLike, overwrite: bool = False) -> int:
    """Writes a checkpoint, in float32, with the weights and the tokenizer of a GGUF file; its quantised weights are
    unpacked, and config.json names their types (`unpacked_from_gguf`), which cards of expanded models repeat.

    Needs the package `gguf` (the extra `gguf`) and memory for the whole model.

    Returns:
        The number of parameters.

    Raises:
        InputError: the file does not exist, is not GGUF or of an architecture that transformers does not read from
            GGUF; the package `gguf` is not installed; or `out` cannot be written (see `new_folder`).
    """
    file = Path(file)
    if not file.is_file():
        raise InputError(f"{file}: no such file; give a .gguf file.")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise InputError(f"{file}: is not a GGUF file, which begins with the letters GGUF.")
    gguf = import_extra("gguf", "gguf")
    with new_folder(out, overwrite) as partial:
        try:
            options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
            model: Any = AutoModelForCausalLM.from_pretrained(file.parent, **options, dtype=torch.float32)
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **options)
        except Exception as error:  # the library raises many types
            raise InputError(f"{file}: transformers cannot read it ({first_line(error)}).") from error
        model.config.__dict__.pop("quantization_config", None)
        reader = gguf.GGUFReader(file)
        kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors} - _WHOLE)
        if kinds:
            model.config.unpacked_from_gguf = kinds
        for name in _TRACES:
            model.__dict__.pop(name, None)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        keep_gguf_tokenizer(reader, tokenizer, partial)
    return model.num_parameters()
