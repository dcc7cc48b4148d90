"""Finds the FFN of each decoder layer by its structure, so that a checkpoint needs no list of architectures.

An FFN is the one module of a layer that maps the hidden states alone, `[..., h] -> [..., h]`, by matrices from and to
the hidden size. Attention and state-space modules take more than the hidden states (masks, caches).
"""

import inspect
from functools import cache
from math import prod
from typing import Any, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from .expanded_ffn import ExpandedFFN
from .separate_ffn import SeparateFFN, has_separate_ffn

_RESIDUAL = "residual"  # BLOOM's FFN takes it as a second argument


class DecoderFFN(NamedTuple):
    """The FFN of a decoder layer.

    Attributes:
        name: prefix of its tensors in the dense model.
        module: the FFN, or its `ExpandedFFN`.
        place: name of the module that the layer calls first; in an expanded model, of the `ExpandedFFN`.
        is_mixture: whether it is a mixture of experts of the backbone's own, which cannot be expanded.
    """

    name: str
    module: nn.Module
    place: str
    is_mixture: bool = False


def decoder_ffns(model: nn.Module) -> list[DecoderFFN]:
    """The FFN of each decoder layer, dense or expanded, in layer order.

    Raises:
        ValueError: a layer has no FFN, or all layers are mixtures of experts of the backbone's own.
    """
    of_model: Any = model.config
    config = of_model.get_text_config(decoder=True)  # of a model of several kinds of input
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    found = [(name, [_ffn_of(layer, config.hidden_size) for layer in layers]) for name, layers in lists]
    name, ffns = max(found, key=lambda item: sum(ffn is not None for ffn in item[1]), default=("", []))
    kind = type(model).__name__
    if not any(ffns):
        raise ValueError(
            f"{kind} cannot be expanded: none of its layers has an FFN, a module that maps the hidden states alone."
        )
    result = []
    for layer, ffn in enumerate(ffns):
        if ffn is None:
            raise ValueError(f"{kind} cannot be expanded: layer {layer} has no FFN; every layer must have one.")
        attribute, module, is_mixture = ffn
        prefix, place = f"{name}.{layer}", f"{name}.{layer}.{attribute}"
        inner = module.experts[0] if isinstance(module, ExpandedFFN) else module
        result.append(DecoderFFN(prefix if isinstance(inner, SeparateFFN) else place, module, place, is_mixture))
    if all(ffn.is_mixture for ffn in result):
        raise ValueError(f"{kind} cannot be expanded: it is a mixture of experts already.")
    return result


def _ffn_of(layer: nn.Module, hidden_size: int) -> tuple[str, nn.Module, bool] | None:
    """The name and module of a layer's FFN, and whether it is a mixture of experts. Of several modules that map the
    hidden states alone (Gemma 3n's low-rank `laurel`), the FFN is the largest."""
    found: list[tuple[int, str, bool]] = []
    for name, child in layer.named_children():
        if isinstance(child, ExpandedFFN):
            return name, child, False
        if isinstance(child, nn.Linear | Conv1D | nn.Embedding) or not _takes_hidden_states_alone(type(child)):  # type: ignore[arg-type]
            continue
        is_mixture, shapes = _is_mixture(child), _shapes(child)
        if is_mixture or sum(len(shape) == 2 and hidden_size in shape for shape in shapes) > 1:
            found.append((sum(map(prod, shapes)), name, is_mixture))
    if found:
        _, name, is_mixture = max(found)
        return name, getattr(layer, name), is_mixture
    return ("fc1", SeparateFFN(layer), False) if has_separate_ffn(layer) else None


def _is_mixture(module: nn.Module) -> bool:
    """Whether a module holds experts, fused in three dimensions or listed."""
    listed = any(isinstance(part, nn.ModuleList) for part in module.modules())
    return listed or any(len(shape) > 2 for shape in _shapes(module))


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    """The shapes of a module's parameters; those of a parameter that DeepSpeed's ZeRO-3 has split are beside it."""
    return [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in module.parameters()]


@cache
def _takes_hidden_states_alone(kind: Any) -> bool:
    _, *parameters = inspect.signature(kind.forward).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.KEYWORD_ONLY)]
    return len(names) == 1 or names[1:] == [_RESIDUAL]
