"""Finds the FFN of each layer by its structure, so that a checkpoint needs no list of architectures.

An FFN is the one module of a layer that maps the hidden states alone, `[..., h] -> [..., h]`, by matrices from and to
the hidden size. Attention and state-space modules take more than the hidden states (masks, caches). A layer may hold
its parts in a list (T5): the FFN is then inside the one part that has one. Or its two linear layers stand one by one in
the layer (OPT, XGLM, BART, M2M100): a `SeparateFFN` then holds them.
"""

import inspect
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from .expanded_ffn import ExpandedFFN, ExpandedLayer

# The names that configurations have for the decoder's layers; the encoder's are `num_hidden_layers` under any name.
DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")


class DecoderFFN(NamedTuple):
    """The FFN of a layer, of a decoder or of an encoder-decoder."""

    name: str  # prefix of its tensors in the dense model
    module: nn.Module  # the FFN, or its `ExpandedFFN`
    place: str  # name of the module that the layer calls first; in an expanded model, of the `ExpandedFFN`
    is_mixture: bool = False  # whether it is a mixture of experts of the backbone's own


def stack_sizes(config: Any) -> dict[str, int]:
    """The number of layers of each stack: `{"": n}` for a decoder, `{"encoder": n, "decoder": m}` for an
    encoder-decoder.

    Raises:
        ValueError: an encoder-decoder's configuration does not say how many layers its decoder has.
    """
    if not getattr(config, "is_encoder_decoder", False):
        return {"": config.get_text_config(decoder=True).num_hidden_layers}  # of a model of several kinds of input
    decoder = next((layers for name in DECODER_LAYERS if (layers := getattr(config, name, None)) is not None), None)
    if decoder is None or not isinstance(config.num_hidden_layers, int):
        raise ValueError(f"a {config.model_type} configuration has none of {', '.join(DECODER_LAYERS)}.")
    return {"encoder": config.num_hidden_layers, "decoder": decoder}


def count_layers(config: Any) -> int:
    """The number of all layers."""
    return sum(stack_sizes(config).values())


def layer_names(config: Any) -> list[str]:
    """The name of each layer: its number in a decoder; `encoder.0`, `decoder.0` and so on in an encoder-decoder."""
    sizes = stack_sizes(config)
    return [f"{stack}.{layer}" if stack else str(layer) for stack, size in sizes.items() for layer in range(size)]


def decoder_ffns(model: nn.Module) -> list[DecoderFFN]:
    """The FFN of each layer, dense or expanded, in layer order; an encoder's layers precede its decoder's.

    Raises:
        ValueError: a layer has no FFN.
    """
    of_model: Any = model.config
    # Of a model of several kinds of input, the text decoder's.
    config = of_model if of_model.is_encoder_decoder else of_model.get_text_config(decoder=True)
    result: list[DecoderFFN] = []
    for stack, size in stack_sizes(config).items():
        for place, ffn in _ffns_of_stack(model, stack, size, config.hidden_size):
            if ffn is None:
                raise ValueError(
                    f"{type(model).__name__} cannot be expanded: layer {layer_names(config)[len(result)]} has no FFN, "
                    "a module that maps the hidden states alone."
                )
            attribute, module, is_mixture = ffn
            place = f"{place}.{attribute}"
            inner = module.experts[0] if isinstance(module, ExpandedFFN) else module
            name = place.rpartition(".")[0] if isinstance(inner, SeparateFFN) else place
            result.append(DecoderFFN(name, module, place, is_mixture))
    return result


_Found = tuple[str, nn.Module, bool]  # name and module of an FFN, and whether it is a mixture of experts


def _ffns_of_stack(model: nn.Module, stack: str, size: int, hidden_size: int) -> list[tuple[str, _Found | None]]:
    """The name of each layer of a stack, and its FFN; the layers are those of the list with the most FFNs."""
    lists = [
        (name, [_ffn_of(layer, hidden_size) for layer in module])
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == size and (not stack or stack in name.split("."))
    ]
    nothing: tuple[str, list[_Found | None]] = (stack, [None] * size)
    name, ffns = max(lists, key=lambda item: sum(ffn is not None for ffn in item[1]), default=nothing)
    return [(f"{name}.{layer}", ffn) for layer, ffn in enumerate(ffns)]


def _ffn_of(layer: nn.Module, hidden_size: int) -> _Found | None:
    """A layer's FFN. Of several modules that map the hidden states alone (Gemma 3n's low-rank `laurel`), the FFN is the
    largest."""
    candidates: list[tuple[int, str, bool]] = []
    for name, child in layer.named_children():
        if isinstance(child, ExpandedFFN):
            return name, child, child.is_mixture
        if isinstance(child, ExpandedLayer):  # beside the FFN
            continue
        if isinstance(child, nn.ModuleList):
            inner = [(number, ffn) for number, part in enumerate(child) if (ffn := _ffn_of(part, hidden_size))]
            if len(inner) == 1:
                number, (inside, module, is_mixture) = inner[0]
                return f"{name}.{number}.{inside}", module, is_mixture
        if isinstance(child, nn.Linear | Conv1D | nn.Embedding) or not takes_hidden_states_alone(type(child)):  # type: ignore[arg-type]
            continue
        # Those of a parameter that DeepSpeed's ZeRO-3 has split are beside it.
        shapes = [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in child.parameters()]
        has_list = any(isinstance(part, nn.ModuleList | nn.ModuleDict) for part in child.modules())
        is_mixture = has_list or any(len(shape) > 2 for shape in shapes)  # experts are listed, or fused
        if is_mixture or sum(len(shape) == 2 and hidden_size in shape for shape in shapes) > 1:
            candidates.append((sum(map(prod, shapes)), name, is_mixture))
    if candidates:
        _, name, is_mixture = max(candidates)
        return name, getattr(layer, name), is_mixture
    return ("fc1", SeparateFFN(layer), False) if _has_separate_ffn(layer) else None


@cache
def takes_hidden_states_alone(kind: Any) -> bool:
    """Whether the modules of a class are called with the hidden states alone, or a residual beside them."""
    _, *parameters = inspect.signature(kind.forward).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.KEYWORD_ONLY)]
    return len(names) == 1 or names[1:] == ["residual"]  # of BLOOM's FFN


def _has_separate_ffn(layer: Any) -> bool:
    """Whether a layer computes `fc2(dropout(activation_fn(fc1(x))))` itself."""
    first: Any = getattr(layer, "fc1", None)
    second: Any = getattr(layer, "fc2", None)
    is_pair = isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
    return is_pair and callable(getattr(layer, "activation_fn", None)) and first.in_features == second.out_features


class SeparateFFN(nn.Module):
    """`fc2(dropout(activation_fn(fc1(x))))` of a layer, whose modules and names it shares."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.fc1, self.activation_fn, self.fc2 = layer.fc1, layer.activation_fn, layer.fc2
        self.dropout = float(getattr(layer, "activation_dropout", 0.0))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner = F.dropout(self.activation_fn(self.fc1(hidden_states)), self.dropout, self.training)
        return self.fc2(inner)

    def replace_in(self, layer: Any, expanded: nn.Module) -> None:
        """Lets the layer call `expanded` where it called `fc1`, and nothing afterwards."""
        layer.fc1 = expanded
        layer.activation_fn, layer.fc2, layer.activation_dropout = nn.Identity(), nn.Identity(), 0.0
