"""What a training costs: memory of its activations and logits, arithmetic, and the tokens of a text; estimates."""

import time
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from .data.sources import LanguageText, read_file
from .modeling import decoder_ffns
from .modeling.expanded_ffn import ExpandedFFN

# Float32 master weights, their gradients, and AdamW's two moments.
WEIGHT, GRADIENT, MOMENTS = 4, 4, 8
# Elements that a layer keeps for the backward pass, for each token: of the hidden size, the same for each active
# expert, and of an active expert's inner size. Fitted to what torch saves for Llama's layers (tests/test_costs.py).
_HIDDEN, _HIDDEN_EXPERT, _INNER = 6.0, 2.0, 4.5
# A training that would compute more logits at once than the first, 256 MB in float32, computes as many at a time as the
# second says (trainers/pieces.py).
LARGE, PIECE = 1 << 26, 1 << 24
# The logits, their log-softmax and their gradient, in float32.
_LOGITS = 3
# The share of float32's bytes under mixed precision.
_HALF = 0.55
# The share of a matrix product's speed that a training reaches.
_EFFICIENCY = 0.4
_SAMPLE = 1 << 20

# The names that configurations have for the number of a mixture's experts that a token takes.
_ACTIVE = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
    "expert_num_selected",
)  # fmt: skip


def weights_bytes(total: int, trained: int) -> int:
    """Bytes of float32 weights, and of gradients and AdamW's moments of those that train."""
    return WEIGHT * total + (GRADIENT + MOMENTS) * trained


def activation_bytes(network: Any, tokens: int, half: bool = False, checkpointing: bool = False) -> int:
    """Bytes of the activations and logits of a decoder's training step, at the end of its forward pass.

    Args:
        network: the model, dense or expanded; on the meta device too.
        tokens: tokens of a step on one device, padding counted.
        half: mixed precision.
        checkpointing: gradient checkpointing, which keeps each layer's input and one layer's activations.
    """
    hidden = network.config.hidden_size
    layers = []
    for ffn in decoder_ffns(network):
        block: Any = ffn.module
        expanded = isinstance(block, ExpandedFFN)
        one = size_of(block.experts[0] if expanded else block)
        one -= idle_in_mixture(block, network.config) if ffn.is_mixture else 0
        # Expert 0 and K added ones, or K of a size.
        active = [one] * (block.top_k if expanded else 1)
        if expanded and block.is_added:
            active = [one, *[size_of(block.experts[1])] * min(block.top_k, len(block.experts) - 1)]
        # Two thirds of the inner size for an FFN that is not gated, which keeps fewer tensors.
        inner = sum(active) / (3 * hidden)
        layers.append((_HIDDEN + len(active) * _HIDDEN_EXPERT) * hidden + _INNER * inner)
    per_token = max(layers) + len(layers) * hidden if checkpointing else sum(layers)
    vocabulary = network.get_input_embeddings().weight.shape[0]
    logits = tokens * vocabulary if tokens * vocabulary <= LARGE else PIECE
    return int(4 * (tokens * per_token * (_HALF if half else 1.0) + _LOGITS * logits))


def training_flops(network: Any, one_expert_runs: bool = False) -> float:
    """Operations for a token, forward and backward, of the parameters that are set to train, without attention's share
    that grows with the sequence: 2 for each active weight in the forward pass, 2 for the gradient of the activations,
    and 2 for the gradient of each active weight that trains, under even routing."""
    config, idle = network.config, 0
    # The share of the tokens that meet a parameter, where it is not 1. Embeddings are looked up, which is no product.
    tied = getattr(config, "tie_word_embeddings", False)
    shares = {} if tied else {id(network.get_input_embeddings().weight): 0.0}
    for ffn in decoder_ffns(network):
        block: Any = ffn.module
        if ffn.is_mixture:
            idle += idle_in_mixture(block, config)
        if isinstance(block, ExpandedFFN):
            conditional = block.conditional_gate is not None
            # Each token meets a shared expert 0, and one whose output the other experts change.
            meets_expert_0 = conditional or not any(kind.has_ffn for kind in config.expert_kinds)
            share = (1 if one_expert_runs else block.top_k) / (len(block.experts) - conditional)
            chosen = list(block.experts)[int(meets_expert_0) :]
            shares |= {id(parameter): share for expert in chosen for parameter in expert.parameters()}

    def met(parameters: Iterable[Any]) -> float:
        return sum(shares.get(id(parameter), 1.0) * parameter.numel() for parameter in parameters)

    parameters = list(network.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    active = met(parameters) - idle
    # Unless all parameters train, mixtures of the backbone's own are frozen.
    return 4.0 * active + 2.0 * (active if len(trained) == len(parameters) else met(trained))


def size_of(module: Any) -> int:
    """The number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


@cache
def training_speed(dtype: torch.dtype = torch.float32) -> float:
    """Operations a second of a training on this machine's device: 40 % of those of a matrix product, timed once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 4096 if device == "cuda" else 768
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        product = matrix @ matrix
        float(product[0, 0])  # waits for the device
        seconds.append(time.perf_counter() - started)
    return _EFFICIENCY * 2 * size**3 / min(seconds)


def tokens_at_hand(source: LanguageText, tokenizer: Any) -> int | None:
    """About how many tokens a language's text has, by each file's first megabyte; None on the hub and for parquet."""
    files = source.files()
    if not files or any(file.suffix not in (".jsonl", ".txt") for file in files):
        return None
    total = 0.0
    for file in files:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            begun = opened.read(_SAMPLE)
        whole = len(begun) if len(begun) == size else begun.rfind(b"\n") + 1
        if not whole:
            return None
        lines = begun[:whole].count(b"\n") + (whole == size)
        texts = [row["text"] for row in read_file(str(file), source.language, lines=lines)]
        if texts:
            ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
            total += sum(map(len, ids)) * size / whole
    return int(total)


def idle_in_mixture(block: Any, config: Any) -> int:
    """Weights of a mixture of experts of the backbone's own, or of an `ExpandedFFN` around one, that a token does not
    use. 0 where the configuration does not say how many experts a token takes."""
    mixture = block.experts[0] if isinstance(block, ExpandedFFN) else block
    active = next((count for name in _ACTIVE if isinstance(count := getattr(config, name, None), int)), None)
    fused = [parameter for parameter in mixture.parameters() if parameter.dim() > 2]
    if active is None:
        return 0
    return sum(p.numel() // p.shape[0] * max(0, p.shape[0] - active) for p in fused)
