"""Loading models and tokenizers for measuring: dense checkpoints and expanded ones alike."""

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .checkpoint.reader import CheckpointReader
from .checkpoint.source import load_config, resolve_checkpoint


def load_for_inference(name: str | os.PathLike, revision: str | None = None) -> tuple[Any, Any]:
    """A model, in its own dtype, and its tokenizer; on the GPU if there is one. Runs no code of the checkpoint.

    Raises:
        InputError: it is not a checkpoint that can be loaded.
    """
    folder = resolve_checkpoint(name, revision)
    load_config(folder)
    CheckpointReader(folder)  # says more clearly than the loader what is wrong with the weights
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    if torch.cuda.is_available():
        model = model.to("cuda")
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
