"""The models that the benchmark scripts measure: Qwen2 shapes with random weights, and their plans."""

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from hf_moe_expand import Plan


def add_model_options(options: argparse.ArgumentParser, hidden: int, vocabulary: int) -> None:
    """Adds the options of a Qwen2 shape and its expansion."""
    options.add_argument("--hidden", type=int, default=hidden, help="hidden size (%(default)s)")
    options.add_argument("--vocabulary", type=int, default=vocabulary, help="vocabulary size (%(default)s)")
    options.add_argument("--experts", type=int, default=3, help="experts of each layer, expert 0 counted (%(default)s)")
    options.add_argument("--ffn", type=int, help="width of the FFN (2.75 h)")
    options.add_argument("--key-value-heads", type=int, help="heads of keys and values (as many as of queries)")


def ffn_size(hidden: int) -> int:
    """2.75 h, rounded to a multiple of 64."""
    return max(64, round(2.75 * hidden / 64) * 64)


def dense_config(options: argparse.Namespace, layers: int, ffn_widths: int = 1) -> Qwen2Config:
    """A configuration with heads of 64, or 4 heads in a smaller model, tied embeddings, and an FFN `ffn_widths` times
    as wide."""
    heads = max(4, options.hidden // 64)
    return Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=ffn_widths * (options.ffn or ffn_size(options.hidden)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=options.key_value_heads or heads,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def dense_model(config: Qwen2Config, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A dense model with random weights."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def uniform_plan(layers: int, experts: int, classifiers: int = 0) -> Plan:
    """The same number of experts in each layer, classifiers in the last `classifiers` layers."""
    classified = list(range(layers - classifiers, layers))
    return Plan("moe-lpr", [experts] * layers, classifier_layers=classified, old=["en"], new=["el"])
