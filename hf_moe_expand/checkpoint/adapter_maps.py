"""The linear maps that a language adapter updates, as PEFT finds them."""

import copy
import warnings
from collections import Counter
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import InputError, first_line
from ..modeling import decoder_ffns
from ..modeling.part_adapters import update_name
from .stored import network_of

ALL_LINEAR = "all-linear"
Maps = dict[str, list]  # rank and scaling by the name of a map in its layer


def layer_modules(network: Any) -> dict[str, nn.Module]:
    """The layers of a decoder, by their names in the model."""
    names = [ffn.place.rpartition(".")[0] for ffn in decoder_ffns(network)]
    return {name: network.get_submodule(name) for name in names}


def all_linear(network: Any) -> list[str]:
    """The linear maps of all layers: of a mixture of experts its shared parts, and not its router; not those of
    state-space blocks, whose kernels read the weights themselves."""
    mixtures = tuple(f"{ffn.place}." for ffn in decoder_ffns(network) if ffn.is_mixture)
    found = []
    for place, layer in layer_modules(network).items():
        for inner, module in layer.named_modules():
            name = f"{place}.{inner}"
            if not isinstance(module, nn.Linear | Conv1D) or hasattr(_parent(layer, inner), "A_log"):
                continue
            is_shared = "shared" in inner and min(module.weight.shape) > 1
            if not name.startswith(mixtures) or is_shared:
                found.append(name)
    return found


def _parent(layer: nn.Module, inner: str) -> nn.Module:
    return layer.get_submodule(inner.rpartition(".")[0])


def adapter_of(network: Any, lora: LoraConfig, where: str) -> dict[str, Any]:
    """The entry of `adapters` in a configuration for a LoRA of a dense model, whose weights are not read.

    Args:
        lora: its configuration, of PEFT.
        where: what has it, for messages.

    Raises:
        InputError: PEFT refuses it, or it updates modules outside the layers.
    """
    if lora.target_modules == ALL_LINEAR:
        names = all_linear(network)
        wrapped = _wrapped(network, _with_targets(lora, names), where)
        # In the layers of some mixtures PEFT takes the names of shared or dense FFNs for those of the experts.
        known = [name for name in names if isinstance(wrapped.get_submodule(name), LoraLayer)]
        if left_out := sorted({name.rpartition(".")[2] for name in names} - {n.rpartition(".")[2] for n in known}):
            warnings.warn(
                f"{where}: PEFT knows {', '.join(left_out)} of this model as the experts' alone: they are left out",
                stacklevel=2,
            )
        lora = _with_targets(lora, known)
    wrapped = _wrapped(network, lora, where)
    places = list(layer_modules(network))
    layers: list[Maps] = [{} for _ in places]
    for name, module in wrapped.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        layer = next((number for number, place in enumerate(places) if name.startswith(f"{place}.")), None)
        if layer is None or not isinstance(module.get_base_layer(), nn.Linear | Conv1D):
            raise InputError(
                f"{where}: updates {name}, which is no linear map of a layer: an adapter of a language updates the "
                "linear maps of the layers alone."
            )
        (adapter,) = module.r
        layers[layer][name.removeprefix(f"{places[layer]}.")] = [module.r[adapter], module.scaling[adapter]]
    return entry_of(layers)


def _with_targets(lora: LoraConfig, names: list[str]) -> LoraConfig:
    lora = copy.deepcopy(lora)
    lora.target_modules = names  # type: ignore[assignment]
    return lora


def _wrapped(network: Any, lora: LoraConfig, where: str) -> nn.Module:
    """The dense model with the LoRA, on the meta device."""
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.filterwarnings("ignore", "fan_in_fan_out")  # of GPT-2's maps, which PEFT finds out itself
            warnings.filterwarnings("ignore", ".*alpha_pattern keys did not match")  # its own, for fused experts
            return inject_adapter_in_model(copy.deepcopy(lora), network_of(network.config))
    except Exception as error:  # of PEFT, in many types
        raise InputError(
            f"{where}: PEFT finds no maps for it in {type(network).__name__} ({first_line(error)})."
        ) from None


def update_of(place: str, map_name: str, expert: int) -> str:
    """The name in an expanded model of an expert's update of a map of the layer `place`."""
    return f"{place}.adapters.experts.{expert}.{update_name(map_name)}"


def entry_of(layers: list[Maps]) -> dict[str, Any]:
    """The entry of `adapters` for the maps of each layer: those of most layers, and the layers that differ."""
    layers = [dict(sorted(maps.items())) for maps in layers]
    (most, _), *_ = Counter(map(repr, layers)).most_common(1)
    usual = next(maps for maps in layers if repr(maps) == most)
    differ = {str(number): maps for number, maps in enumerate(layers) if maps != usual}
    return {"maps": usual, **({"layers": differ} if differ else {})}
