"""An expert that is a separate FFN, copied from the backbone's."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig


def shared_config(ffn: nn.Module) -> dict[int, Any]:
    """The second argument that makes `copy.deepcopy` of an FFN share its configuration: a later switch of the
    attention implementation must reach all copies."""
    return {id(value): value for value in vars(ffn).values() if isinstance(value, PreTrainedConfig)}


def copy_ffn(ffn: nn.Module) -> nn.Module:
    """A copy of a backbone's FFN that shares its configuration."""
    memo = shared_config(ffn)
    # While DeepSpeed's ZeRO-3 loads a model, a parameter is an empty shell (`ds_shape` is its shape), which
    # `copy.deepcopy` cannot copy. Copies are made whole, to be loaded later, and are then passed to ZeRO-3.
    shells: list[Any] = [parameter for parameter in ffn.parameters() if hasattr(parameter, "ds_shape")]
    for shell in shells:
        memo[id(shell)] = nn.Parameter(torch.empty(shell.ds_shape, dtype=shell.dtype, device=shell.device))
    copied = copy.deepcopy(ffn, memo)
    if shells:
        shells[0].convert_to_zero_parameters(param_list=[memo[id(shell)] for shell in shells])
    return copied
