"""Loads models and tokenizers, dense or expanded, for inference."""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from ..checkpoint.proven import is_proven
from ..checkpoint.reader import TORCH_DTYPES, CheckpointReader
from ..checkpoint.source import load_config, resolve_checkpoint
from ..checkpoint.stored import StoredModel, base_of, check_size
from ..checkpoint.tokenizer import load_tokenizer
from ..core.errors import InputError, library_errors_at
from ..core.schema import checked
from ..data.pairs import padded
from ..modeling import ExpandedConfig, auto_class

_POSITIONS = ("max_position_embeddings", "max_seq_len")  # the second is MPT's field


def longest_block(config: Any) -> int | None:
    """The number of positions that a model takes; None if it sets no limit."""
    config = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    return next((positions for name in _POSITIONS if (positions := getattr(config, name, None)) is not None), None)


def check_block_size(block_size: int, longest: int | None, where: str = "block_size") -> None:
    """Refuses blocks of more tokens than the `longest` that the model takes (None: it sets no limit)."""
    if longest is not None and block_size > longest:
        raise InputError(f"{where} is {block_size}, but the base takes {longest} positions: lower it.")


def model_name(model: Any) -> str:
    """The name of a loaded model for progress bars: its hub id, the name of its folder, or its class."""
    return base_of(model)[0]


@checked
def load_for_inference(name: str | os.PathLike, revision: str | None = None) -> tuple[Any, Any]:
    """A model in its own dtype, on the GPU if available, and its tokenizer. Runs no code of the checkpoint.

    Raises:
        InputError: the checkpoint cannot be loaded and run, lacks a tensor of the model, has a weight that is NaN or
            infinite, or has no tokenizer.
    """
    folder = resolve_checkpoint(name, revision)
    config = load_config(folder)
    reader = CheckpointReader(folder)
    # For other architectures and quantised checkpoints, only the library knows the tensors that the files must hold.
    known = isinstance(config, ExpandedConfig) or is_proven(config)
    if known and getattr(config, "quantization_config", None) is None:
        StoredModel(folder, config)  # refuses an incomplete checkpoint
    else:
        check_size(config, reader)
    tokenizer = load_tokenizer(folder, name)
    # Some models of images are none of `AutoModelForCausalLM`.
    of_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    loads: Any = AutoModelForImageTextToText if of_images else auto_class(config)
    with library_errors_at(f"{name}: the model cannot be loaded"):
        loaded: Any = loads.from_pretrained(folder, dtype="auto", trust_remote_code=False, output_loading_info=True)
    model, info = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if keys := sorted(map(str, info[kind])):
            raise InputError(f"{name}: the checkpoint does not fit the model: {kind.replace('_', ' ')}: {keys[0]}.")
    check_finite(model, name)
    if torch.cuda.is_available():
        model = model.to("cuda")
    _check_runs(model, name)
    return model, tokenizer


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a text: the tokenizer's, and those of the model's generation settings."""
    own = model.generation_config.eos_token_id
    ends = own if isinstance(own, list) else [own]
    if not all(isinstance(token, int | None) for token in ends):
        raise InputError(f"generation_config.json: eos_token_id is {own!r}: must be a token's number, or a list.")
    return [token for token in dict.fromkeys([tokenizer.eos_token_id, *ends]) if token is not None]


def generated(
    model: Any, tokenizer: Any, rows: Sequence[list[int]], given: Mapping[str, Any] | None = None, **options: Any
) -> list[list[int]]:
    """The tokens that a model writes after each row of tokens, an encoder-decoder of its sources, up to an end of text.

    Args:
        given: further arguments of `generate`.
        options: its settings, in place of the checkpoint's own, such as a penalty of repetition.
    """
    has_encoder, ends = model.config.is_encoder_decoder, end_tokens(model, tokenizer)
    filler = model.config.pad_token_id or 0 if has_encoder else [*ends, 0][0]

    def stacked(rows: Sequence[list[int]], filler: int) -> torch.Tensor:
        """`[batch, longest]`, padded on the right for an encoder, on the left for a decoder."""
        return padded(rows, filler) if has_encoder else padded([row[::-1] for row in rows], filler).flip(1)

    rows_BS = stacked(rows, filler).to(model.device)
    mask_BS = stacked([[1] * len(row) for row in rows], 0).to(model.device)
    own = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=filler, **options)
    try:
        made = model.generate(input_ids=rows_BS, attention_mask=mask_BS, tokenizer=tokenizer, **(given or {}))
    finally:
        model.generation_config = own
    return made[:, 1 if has_encoder else rows_BS.shape[1] :].tolist()


def check_decoder(config: Any, name: str | os.PathLike, what: str) -> None:
    """Refuses an encoder-decoder: `what`, in the plural, are for decoders."""
    if config.is_encoder_decoder:
        raise InputError(f"{name}: is an encoder-decoder, but {what} are for decoders (docs/backbones.md).")


def check_finite(model: Any, name: str | os.PathLike) -> None:
    """Refuses a model with a weight that is NaN or infinite."""
    for key, parameter in model.named_parameters():
        # The least and the largest, which NaN is: on the weights' device, and several times as fast as `isfinite`.
        known = parameter.dtype in TORCH_DTYPES.values() and parameter.numel()
        if known and not all(extreme.isfinite() for extreme in parameter.detach().aminmax()):
            raise InputError(f"{name}: tensor {key!r} holds NaN or infinite values; the checkpoint is damaged.")


def _check_runs(model: Any, name: str | os.PathLike) -> None:
    """Runs one token, so that contradictory settings fail now and not hours later."""
    config = model.config
    stays_home = (
        isinstance(config, ExpandedConfig) and config.declares("stays_home") and "gate" not in (config.parts or {})
    )
    # A model whose untold texts stay home says so of the user's text, not of this token.
    chosen = model.use_expert(0) if stays_home else nullcontext()
    with library_errors_at(f"{name}: the model does not run as configured"), torch.no_grad(), chosen:
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model(token_11, **({"decoder_input_ids": token_11} if config.is_encoder_decoder else {}))
