"""Forecasts the costs of an expansion before anything runs: parameters, memory and arithmetic of each stage."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from .checkpoint.expand import check_layers, planned_config
from .checkpoint.new_experts import check_kinds, chosen_kind
from .checkpoint.source import load_base_config, resolve_checkpoint
from .checkpoint.stored import network_of
from .costs import activation_bytes, size_of, training_flops, weights_bytes
from .errors import InputError
from .inspection import Inspection, inspect_config
from .planning.plan import Plan
from .settings import LORA_ALPHA, LORA_RANK
from .stages import stages_for
from .stages.base import TrainingStage
from .trainers.freezing import freeze
from .trainers.router_losses import CHECKPOINTING

# Tokens of a step on one device for which activations are forecast: 8 blocks of 1,024, the stages' default.
AT_ONCE = 8 * 1024
# Bytes of Python, torch, transformers and packed text: VmRSS in /proc/self/status when `train_stage` is about to load
# the model, here of 50,000 parameters (0.56 GB; Python 3.11, torch 2.13 for CPUs, transformers 5.23, Linux).
PROCESS = 600_000_000


@dataclass(frozen=True)
class StageCost:
    """Costs of one kind of training.

    Attributes:
        trained: parameters that train.
        memory: bytes of weights, gradients and AdamW's moments on one device.
        activations: about the bytes of activations and logits of a step of `AT_ONCE` tokens in float32, which come on
            top; None for an encoder-decoder.
        flops: operations for a token, forward and backward, without attention's share that grows with the sequence.
    """

    name: str
    trained: int
    memory: int
    flops: float
    activations: int | None = None


@dataclass(frozen=True)
class Forecast:
    """The expanded model and the costs of its stages; full fine-tuning of the base is the last of `stages`."""

    model: Inspection
    stages: Sequence[StageCost]

    def lines(self, tokens: float | None = None, tflops: float | None = None) -> list[str]:
        """The report, line by line.

        Args:
            tokens: tokens to train on; with `tflops`, the device's speed in practice in 10^12 operations a second, the
                report gives hours of one device.
        """
        for name, number in (("tokens", tokens), ("tflops", tflops)):
            if number is not None and not 0 < number < inf:
                raise InputError(f"{name} is {number:g}: must be above 0, and finite.")
        hours = tokens / (tflops * 1e12) / 3600 if tokens and tflops else None  # for an operation of each token
        return self.model.rendered(
            "forecast.txt", stages=self.stages, hours=hours, tokens=tokens, tflops=tflops, process=PROCESS,
            at_once=AT_ONCE, checkpointing=CHECKPOINTING,
        ).splitlines()  # fmt: skip


def forecast(
    base: str | os.PathLike,
    plan: Plan,
    revision: str | None = None,
    *,
    expert_kind: str = "ffn",
    lora_rank: int = LORA_RANK,
    lora_alpha: float = LORA_ALPHA,
    expert_width: int | None = None,
) -> Forecast:
    """The costs of `plan` on `base`, with experts as `expand_checkpoint` makes them, from config.json alone."""
    if plan.grows_from:
        raise InputError("The plan grows an expanded checkpoint; give a dense base and its first plan for a forecast.")
    dense = load_base_config(resolve_checkpoint(base, revision, weights=False))
    check_layers(plan, dense, base)
    check_kinds("copy", expert_kind)
    whole = network_of(dense)
    kind = chosen_kind(whole, plan, "copy", expert_kind, lora_rank, lora_alpha, expert_width)
    config: Any = planned_config(dense, plan, kind)
    network, stages = network_of(config), []
    for stage in stages_for(config.model_type):
        if issubclass(stage, TrainingStage):
            freeze(network, stage.trains)
            stages.append(_cost(stage.name, network, stage.one_expert_runs))
    stages.append(_cost("full fine-tuning of the base", whole))
    return Forecast(inspect_config(config), stages)


def _cost(name: str, network: Any, one_expert_runs: bool = False) -> StageCost:
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    memory = weights_bytes(size_of(network), trained)
    activations = None if network.config.is_encoder_decoder else activation_bytes(network, AT_ONCE)
    return StageCost(name, trained, memory, training_flops(network, one_expert_runs), activations)
