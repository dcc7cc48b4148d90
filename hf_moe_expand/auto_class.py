"""The Auto class of transformers for a language model, by its configuration."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)


def auto_class(config: Any) -> Any:
    """`AutoModelForSeq2SeqLM` for an encoder-decoder, else `AutoModelForCausalLM`."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def language_models(config: Any) -> Any:
    """transformers' mapping from configuration classes to the classes of such language models."""
    return MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING
