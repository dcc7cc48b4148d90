"""First weights of what an expansion adds: routers, classifiers, gates, LoRA updates, added experts, random experts.

Each tensor's place (seed, layer, ...) decides its values, which depend neither on other tensors nor on their order.
"""

import copy
from typing import Any

import torch
from torch import nn

from ..modeling.experts import init_kaiming
from ..modeling.routing import init_router

_RANDOM = ("lora_A.weight", ".gate_proj.weight", ".up_proj.weight")


def _place_seed(*numbers: int) -> int:
    """A seed for one tensor's place: what a router gets depends neither on the others nor on their order."""
    value = 0
    for number in numbers:
        value = (value * 1_000_003 + number + 1) % ((1 << 61) - 1)
    return value


def place_generator(*numbers: int) -> torch.Generator:
    """The random numbers of one tensor's place."""
    return torch.Generator().manual_seed(_place_seed(*numbers))


def new_router(shape: tuple[int, ...], place: tuple[int, ...]) -> torch.Tensor:
    """A router's first weights, `[N, h]` float32; `place` (seed, layer, ...) decides them."""
    weight = torch.empty(shape)
    init_router(weight, place_generator(*place))
    return weight


def new_weight(inner: str, shape: tuple[int, ...], place: tuple[int, ...]) -> torch.Tensor:
    """First weights, float32, of tensors that the dense model lacks: a router (see `new_router`), a LoRA expert's A and
    the rows of an added expert (`init_kaiming`); a LoRA expert's B, an added expert's `down`, classifiers and gates are
    zero.

    Args:
        inner: name of the tensor inside the layer's FFN block.
        place: seed and layer, which decide the weights.
    """
    if inner == "router.weight":
        return new_router(shape, place)
    weight = torch.zeros(shape)
    if inner.endswith(_RANDOM):
        init_kaiming(weight, place_generator(*place, *inner.encode()))
    return weight


def random_weight(network: Any, ffn: nn.Module, rest: str, place: tuple[int, ...]) -> torch.Tensor:
    """A tensor of a random expert, on the CPU, drawn as the backbone's own initialisation draws it.

    Args:
        network: the dense model.
        ffn: one of its FFNs.
        rest: name of the tensor in it.
        place: seed, layer and expert, which decide the values.
    """
    if network.config.is_encoder_decoder and (drawn := _drawn_with_its_ffn(network, ffn, rest, place)) is not None:
        return drawn
    module_name, _, parameter_name = rest.rpartition(".")
    module = copy.deepcopy(ffn.get_submodule(module_name)).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_place_seed(*place, *module_name.encode()))
        network._init_weights(module)
    return module.get_parameter(parameter_name).detach()


def _drawn_with_its_ffn(network: Any, ffn: nn.Module, rest: str, place: tuple[int, ...]) -> torch.Tensor | None:
    """The tensor, where the backbone initialises its FFN as a whole (T5); None where it does so layer by layer."""
    whole = copy.deepcopy(ffn).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for parameter in whole.parameters():
            parameter.fill_(torch.nan)
        torch.manual_seed(_place_seed(*place))
        network._init_weights(whole)
    drawn = whole.get_parameter(rest).detach()
    return None if drawn.isnan().any() else drawn
