"""Loading models and tokenizers for measuring: dense checkpoints and expanded ones alike."""

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .checkpoint.reader import CheckpointReader
from .checkpoint.source import load_config, resolve_checkpoint
from .errors import InputError

_POSITIONS = ("max_position_embeddings", "max_seq_len")  # the latter is MPT's


def longest_block(config: Any) -> int | None:
    """How many positions a model takes; None where it sets no limit."""
    return next((found for name in _POSITIONS if (found := getattr(config, name, None)) is not None), None)


def load_for_inference(name: str | os.PathLike, revision: str | None = None) -> tuple[Any, Any]:
    """A model, in its own dtype, and its tokenizer; on the GPU if there is one. Runs no code of the checkpoint.

    Raises:
        InputError: it is not a checkpoint that can be loaded, or it has no tokenizer.
    """
    folder = resolve_checkpoint(name, revision)
    load_config(folder)
    CheckpointReader(folder)  # says more clearly than the loader what is wrong with the weights
    tokenizer = load_tokenizer(folder, name)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    if torch.cuda.is_available():
        model = model.to("cuda")
    return model, tokenizer


def load_tokenizer(folder: os.PathLike, name: str | os.PathLike) -> Any:
    """The tokenizer in a checkpoint's folder; `name` is what messages call it.

    Raises:
        InputError: there is none.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # Where there are no files the library may make a tokenizer without a vocabulary.
        if tokenizer("a", add_special_tokens=False).input_ids:
            return tokenizer
    except (OSError, ValueError):
        pass
    raise InputError(f"{name}: no tokenizer that loads; put the base model's tokenizer files into the folder.")
