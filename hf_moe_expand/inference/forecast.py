"""Forecasts a training before anything runs: steps, tokens by language, peak memory, disk and rough hours."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..core.disk import readable_size
from ..core.schema import MOST
from ..data.sources import LanguageText
from ..modeling import decoder_ffns
from ..modeling.adapters import AdaptedLayer
from ..modeling.expanded_ffn import ExpandedFFN
from ..trainers.pieces import LARGE, PIECE
from ..trainers.router_losses import CHECKPOINTING

# Bytes of a float32 weight, and of AdamW's two moments of it.
_WEIGHT, _MOMENTS = 4, 8
# The optimizers of transformers that keep both moments in float32; of the others, the state is not counted.
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused")
# Elements that a layer keeps for the backward pass, for each token: of the hidden size, the same for each active
# expert, and of an active expert's inner size. Fitted to what torch saves for Llama's layers (tests/test_forecast.py).
_HIDDEN, _HIDDEN_EXPERT, _INNER = 6.0, 2.0, 4.5
# The logits, their log-softmax and their gradient; the share of float32's bytes under mixed precision.
_LOGITS, _HALF = 3, 0.55
LESS_MEMORY = f"lower per_device_train_batch_size or block_size, or set {CHECKPOINTING}"
# The share of a matrix product's speed that a training reaches.
_EFFICIENCY = 0.4
# The names that configurations have for the number of a mixture's experts that a token takes.
_ACTIVE = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
    "expert_num_selected",
)  # fmt: skip


@dataclass(frozen=True)
class Forecast:
    """About what a training takes on one device; None for what is not known.

    Attributes:
        tokens: tokens at hand of each language.
        steps: steps of `of_step` tokens.
        memory: bytes of weights, gradients, AdamW's moments, activations and logits.
        disk: bytes of the trained checkpoint and of the training checkpoints beside it.
    """

    tokens: Mapping[str, int | None]
    steps: int | None
    of_step: int
    memory: int | None
    disk: int
    hours: float | None

    def words(self, room: int | None = None) -> str:
        """One line; `room` is the memory of the device that trains."""
        words = [f"about {self.steps:,} steps of {self.of_step:,} tokens"] if self.steps else []
        if known := [f"{code} {count:,}" for code, count in self.tokens.items() if count is not None]:
            words.append(f"tokens at hand, about: {', '.join(known)}")
        if self.memory is not None:
            words.append(
                f"memory about {readable_size(self.memory)}" + (f" of {readable_size(room)} here" if room else "")
            )
            if room and self.memory > room:
                words[-1] += f" (warning: too much: {LESS_MEMORY})"
        words.append(f"disk up to {readable_size(self.disk)}")
        if self.hours is not None:
            minutes = math.ceil(60 * self.hours)
            words.append(f"very roughly {f'{self.hours:,.1f} hours' if minutes > 90 else f'{minutes} min'}")
        return "; ".join(words)


def forecast(
    network: Any,
    config: Any,
    tokens: Mapping[str, int | None],
    dtype: torch.dtype = torch.float32,
    checkpointing: bool = False,
    speed: float | None = None,
) -> Forecast:
    """The forecast of a stage on one device.

    Args:
        network: the model that trains, without its weights.
        config: the stage's configuration.
        tokens: tokens at hand of each language; None where they are not known.
        dtype: float32, or that of mixed precision.
        checkpointing: keeps each layer's input and one layer's activations.
        speed: operations a second; this machine's by default.
    """
    at_once, total = config.per_device_train_batch_size * config.block_size, size_of(network)
    of_step, trained = at_once * config.gradient_accumulation_steps, config.saved_parameters(network)[1]
    wanted = config.max_steps * of_step if config.max_steps > 0 else config.tokens
    known = [count for count in tokens.values() if count is not None]
    some_documents = getattr(config, "old_documents", None) is not None  # of each language
    if wanted is None and known and len(known) == len(tokens) and not some_documents:
        wanted = int(sum(known) * config.num_train_epochs)
    memory = hours = None
    if not network.config.is_encoder_decoder:
        memory = _WEIGHT * (total + trained) + (_MOMENTS * trained if _keeps_moments(config) else 0)
        memory += _activations(network, at_once, dtype != torch.float32, checkpointing)
    if wanted:
        # Forward and backward: 4 operations for an active weight, 2 more if it trains; embeddings are looked up.
        looked_up = 0 if network.config.tie_word_embeddings else network.get_input_embeddings().weight.numel()
        active = total - idle_weights(network) - looked_up
        hours = wanted * (4 + 2 * trained / total) * active / (speed or training_speed(dtype)) / 3600
    disk = total * network.dtype.itemsize + training_disk(config, network)
    return Forecast(tokens, wanted and max(wanted // of_step, 1), of_step, memory, disk, hours)


def training_disk(config: Any, network: Any) -> int:
    """Bytes of the training checkpoints of a stage that lie on the disk at once, at most.

    The Trainer removes an old checkpoint after it saved a new one, so one more than `save_total_limit` can be there. An
    interrupt, or the clock, may save one more than `save_steps` says.
    Where the number of steps is unknown before the text is read, they are assumed to be enough for that."""
    strategy, limit = str(getattr(config.save_strategy, "value", config.save_strategy)), config.save_total_limit
    saves = 0 if strategy == "no" else math.inf
    if strategy == "steps" and config.save_steps < 1:  # a share of all steps
        saves = math.ceil(min(1 / config.save_steps, MOST))
    elif strategy == "steps" and config.max_steps > 0:
        saves = math.ceil(config.max_steps / config.save_steps)  # the last step is saved too
    elif strategy == "epoch" and config.max_steps <= 0:
        saves = math.ceil(config.num_train_epochs)
    if saves:
        saves = min(saves + 1, config.max_steps if config.max_steps > 0 else math.inf)
    saves = min(saves, limit + 1 if limit and limit > 0 else math.inf)
    total, trained = config.saved_parameters(network)
    each = _WEIGHT * total + (_MOMENTS * trained if _keeps_moments(config) else 0)
    return each * (2 if saves == math.inf else int(saves))  # without a limit, at least two


def _keeps_moments(config: Any) -> bool:
    return getattr(config.optim, "value", config.optim) in _ADAMW


def _activations(network: Any, tokens: int, half: bool, checkpointing: bool) -> int:
    """Bytes of the activations and logits of so many tokens at once, at the end of the forward pass."""
    hidden, ffns = network.config.hidden_size, decoder_ffns(network)
    experts = sum(ffn.module.top_k if isinstance(ffn.module, ExpandedFFN) else 1 for ffn in ffns)
    # Two thirds of the inner size for an FFN that is not gated, which keeps fewer tensors.
    inner = (sum(size_of(ffn.module) for ffn in ffns) - _idle_in_ffns(network)) / (3 * hidden)
    per_token = (_HIDDEN * len(ffns) + _HIDDEN_EXPERT * experts) * hidden + _INNER * inner
    if checkpointing:
        per_token = per_token / len(ffns) + len(ffns) * hidden
    logits = tokens * network.get_input_embeddings().weight.shape[0]
    return int(4 * (tokens * per_token * (_HALF if half else 1) + _LOGITS * (logits if logits <= LARGE else PIECE)))


def size_of(module: Any) -> int:
    """The number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def idle_weights(network: Any) -> int:
    """Weights that a token does not use; of a mixture of the backbone's own, none where the configuration does not say
    how many experts a token takes."""
    blocks: Any = getattr(network, "expanded_ffns", dict)().values()
    adapters = [sorted(map(size_of, block.experts)) for block in blocks if isinstance(block, AdaptedLayer)]
    return _idle_in_ffns(network) + sum(size for sizes in adapters for size in sizes[:-1])


def _idle_in_ffns(network: Any) -> int:
    config, idle = network.config, 0
    active = next((count for name in _ACTIVE if isinstance(count := getattr(config, name, None), int)), None)
    for ffn in decoder_ffns(network):
        block: Any = ffn.module
        expanded = isinstance(block, ExpandedFFN)
        if ffn.is_mixture and active is not None:
            fused = [p for p in (block.experts[0] if expanded else block).parameters() if p.dim() > 2]
            idle += sum(p.numel() // p.shape[0] * max(0, p.shape[0] - active) for p in fused)
        if expanded:
            sizes = sorted(map(size_of, list(block.experts)[1:]), reverse=True)
            if any(kind.has_ffn for kind in config.expert_kinds):
                sizes = sorted([*sizes, size_of(block.experts[0])], reverse=True)
                sizes = sizes[int(block.conditional_gate is not None) :]
            idle += sum(sizes[block.top_k :])  # of other kinds a token uses expert 0's weights besides
    return idle


@cache
def training_speed(dtype: torch.dtype) -> float:
    """Operations a second of a training on this machine's device: 40 % of those of a matrix product, timed once."""
    device, size, seconds = ("cuda", 4096, []) if torch.cuda.is_available() else ("cpu", 768, [])
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    for _ in range(3):
        started = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        seconds.append(time.perf_counter() - started)
    return _EFFICIENCY * 2 * size**3 / min(seconds)


def tokens_at_hand(source: LanguageText, tokenizer: Any) -> int | None:
    """About how many tokens a language's text has, by the first megabyte of each file; None on the hub."""
    if not source.files():
        return None
    total = 0.0
    for beginning in source.beginnings():
        if beginning.rows:
            ids = tokenizer([row["text"] for row in beginning.rows], add_special_tokens=False)["input_ids"]
            total += sum(map(len, ids)) / beginning.read
    return int(total)
