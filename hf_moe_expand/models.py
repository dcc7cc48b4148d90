"""Loading models and tokenizers for measuring: dense checkpoints and expanded ones alike."""

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .checkpoint.reader import TORCH_DTYPES, CheckpointReader, is_finite
from .checkpoint.source import load_config, resolve_checkpoint
from .checkpoint.stored import check_complete, check_size
from .errors import InputError, first_line
from .modeling import SUPPORTED_BACKBONES, ExpandedConfig

_POSITIONS = ("max_position_embeddings", "max_seq_len")  # the latter is MPT's


def longest_block(config: Any) -> int | None:
    """How many positions a model takes; None where it sets no limit."""
    return next((found for name in _POSITIONS if (found := getattr(config, name, None)) is not None), None)


def load_for_inference(name: str | os.PathLike, revision: str | None = None) -> tuple[Any, Any]:
    """A model, in its own dtype, and its tokenizer; on the GPU if there is one. Runs no code of the checkpoint.

    Raises:
        InputError: it is not a checkpoint that can be loaded and run, a tensor of the model is missing from it, a
            weight is NaN or infinite, or it has no tokenizer.
    """
    folder = resolve_checkpoint(name, revision)
    config = load_config(folder)
    reader = CheckpointReader(folder)
    # Of other architectures, and of quantised ones, the library alone knows what the files must hold.
    known = isinstance(config, ExpandedConfig) or config.model_type in SUPPORTED_BACKBONES
    if known and getattr(config, "quantization_config", None) is None:
        check_complete(folder, config)
    else:
        check_size(config, reader)
    tokenizer = load_tokenizer(folder, name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # the library raises whatever a wrong value leads to
        raise InputError(f"{name}: the model cannot be loaded ({first_line(error)}).") from error
    model, info = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if found := sorted(map(str, info[kind])):
            raise InputError(f"{name}: the checkpoint does not fit the model: {kind.replace('_', ' ')}: {found[0]}.")
    check_finite(model, name)
    _check_vocabulary(model, tokenizer, name)
    if torch.cuda.is_available():
        model = model.to("cuda")
    _check_runs(model, name)
    return model, tokenizer


def check_finite(model: Any, name: str | os.PathLike) -> None:
    """Refuses a model with a weight that is NaN or infinite.

    Raises:
        InputError: names the first such tensor.
    """
    for key, parameter in model.named_parameters():
        if parameter.dtype in TORCH_DTYPES.values() and parameter.numel() and not is_finite(parameter.detach()):
            raise InputError(f"{name}: tensor {key!r} holds NaN or infinite values; the checkpoint is damaged.")


def _check_vocabulary(model: Any, tokenizer: Any, name: str | os.PathLike) -> None:
    """Refuses a tokenizer of another model. Special tokens may lie outside the model (Gemma 3's for images), but not
    those that documents begin and end with."""
    rows = model.get_input_embeddings().weight.shape[0]
    ends = {tokenizer.eos_token: tokenizer.eos_token_id, tokenizer.bos_token: tokenizer.bos_token_id}
    usual = {token: at for token, at in tokenizer.get_vocab().items() if at not in tokenizer.added_tokens_decoder}
    for token, at in {**usual, **ends}.items():
        if at is not None and at >= rows:
            raise InputError(
                f"{name}: the tokenizer's token {token!r} has number {at}, but the model has {rows} tokens."
            )


def _check_runs(model: Any, name: str | os.PathLike) -> None:
    """Runs a token: settings that contradict each other show here, not hours later."""
    try:
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long, device=model.device))
    except Exception as error:
        raise InputError(f"{name}: the model does not run as configured ({first_line(error)}).") from error


def load_tokenizer(folder: os.PathLike, name: str | os.PathLike) -> Any:
    """The tokenizer in a checkpoint's folder; `name` is what messages call it.

    Raises:
        InputError: there is none.
    """
    reason = ""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # Where there are no files the library may make a tokenizer without a vocabulary.
        if tokenizer("a", add_special_tokens=False).input_ids:
            return tokenizer
    except OSError:
        pass
    except Exception as error:  # broken files raise whatever they lead to
        reason = f" ({first_line(error)})"
    raise InputError(f"{name}: no tokenizer that loads{reason}; put the base model's tokenizer files into the folder.")
