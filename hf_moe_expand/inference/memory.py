"""The memory of the device that trains, and what a training takes of it and of the disk."""

import math
from typing import Any

import psutil
import torch

from ..modeling import count_layers
from ..trainers.pieces import PIECE, is_large

_FLOAT, _MOMENTS = 4, 8  # bytes of a float32 number, and of AdamW's two moments of a weight
# The optimizers of transformers that keep both moments in float32; of the others, the state is not counted.
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused")


def device_memory() -> int:
    """Bytes of memory of the device that trains here: the GPU's, else the machine's."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return psutil.virtual_memory().total


def memory_of_all() -> int | None:
    """Bytes of memory of all devices here over which a launch may split a model; None where it is not known."""
    if torch.accelerator.is_available() and not torch.cuda.is_available():
        return None
    return device_memory() * max(torch.cuda.device_count(), 1)


def least_memory(network: Any, config: Any, kept: int = 1) -> int:
    """Bytes that a stage takes at least: weights, gradients and moments; for each token of a pass, `kept` hidden states
    of each layer; and the logits, or a piece of many. `network` is the model without its weights."""
    tokens, trained = config.per_device_train_batch_size * config.block_size, config.saved_parameters(network)[1]
    vocabulary = network.get_input_embeddings().weight.shape[0]
    logits = PIECE if is_large(tokens, vocabulary) else tokens * vocabulary
    hidden = tokens * count_layers(network.config) * network.config.hidden_size
    return _FLOAT * (network.num_parameters() + trained + kept * hidden + logits) + _moments(config) * trained


def training_disk(network: Any, config: Any) -> int:
    """Bytes of the training checkpoints of a stage that lie on the disk at once, at most. The Trainer removes an old
    one after it saved a new one; an interrupt, or the clock, may save one more. Two, where no number is known."""
    strategy, every = getattr(config.save_strategy, "value", config.save_strategy), config.save_steps
    steps = config.max_steps if config.max_steps > 0 else math.inf
    limit = config.save_total_limit if (config.save_total_limit or 0) > 0 else math.inf
    epochs = config.num_train_epochs if steps == math.inf else math.inf
    saves = {"no": -1, "steps": 1 / every if every < 1 else steps / every, "epoch": epochs}.get(strategy, math.inf)
    most = min(saves + 1, steps, limit + 1)
    total, trained = config.saved_parameters(network)
    return (_FLOAT * total + _moments(config) * trained) * (2 if most == math.inf else math.ceil(most))


def _moments(config: Any) -> int:
    return _MOMENTS if getattr(config.optim, "value", config.optim) in _ADAMW else 0
