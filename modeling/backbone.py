"""Finds the FFN of each layer by its structure, so that a checkpoint needs no list of architectures.

An FFN is the one module of a layer that maps the hidden states alone, `[..., h] -> [..., h]`, by matrices from and to
the hidden size. Attention and state-space modules take more than the hidden states (masks, caches). A layer may hold
its parts in a list (T5): the FFN is then inside the one part that has one. Or its two linear layers stand one by one in
the layer (OPT, XGLM, BART, M2M100): a `SeparateFFN` then holds them.

Of an FFN that is a mixture, a checkpoint has the experts one by one, or fused, as the base has them. transformers fuses
them when it loads them and takes them apart when it saves them, by rules for the names of its own architectures. In an
expanded model the mixture is expert 0 of an `ExpandedFFN`: the same rules hold for its names there.
"""

import copy
import inspect
import re
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.pytorch_utils import Conv1D

from .expanded_config import layer_names, stack_sizes
from .expanded_ffn import ExpandedFFN
from .expanded_layer import ExpandedLayer

_RESIDUAL = "residual"  # BLOOM's FFN takes it as a second argument


class DecoderFFN(NamedTuple):
    """The FFN of a layer, of a decoder or of an encoder-decoder.

    Attributes:
        name: prefix of its tensors in the dense model.
        module: the FFN, or its `ExpandedFFN`.
        place: name of the module that the layer calls first; in an expanded model, of the `ExpandedFFN`.
        is_mixture: whether it is a mixture of experts of the backbone's own, beside which only added experts can stand.
    """

    name: str
    module: nn.Module
    place: str
    is_mixture: bool = False


def decoder_ffns(model: nn.Module) -> list[DecoderFFN]:
    """The FFN of each layer, dense or expanded, in layer order; an encoder's layers precede its decoder's.

    Raises:
        ValueError: a layer has no FFN.
    """
    of_model: Any = model.config
    # Of a model of several kinds of input, the text decoder's.
    config = of_model if of_model.is_encoder_decoder else of_model.get_text_config(decoder=True)
    kind = type(model).__name__
    result: list[DecoderFFN] = []
    for stack, size in stack_sizes(config).items():
        for place, ffn in _ffns_of_stack(model, stack, size, config.hidden_size):
            if ffn is None:
                layer = layer_names(config)[len(result)]
                raise ValueError(f"{kind} cannot be expanded: layer {layer} has no FFN; every layer must have one.")
            attribute, module, is_mixture = ffn
            place = f"{place}.{attribute}"
            inner = module.experts[0] if isinstance(module, ExpandedFFN) else module
            name = place.rpartition(".")[0] if isinstance(inner, SeparateFFN) else place
            result.append(DecoderFFN(name, module, place, is_mixture))
    return result


_Found = tuple[str, nn.Module, bool]


def _ffns_of_stack(model: nn.Module, stack: str, size: int, hidden_size: int) -> list[tuple[str, _Found | None]]:
    """The name of each layer of a stack, and its FFN; the layers are those of the list with the most FFNs."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == size and (not stack or stack in name.split("."))
    ]
    candidates = [(name, [_ffn_of(layer, hidden_size) for layer in layers]) for name, layers in lists]
    name, ffns = max(candidates, key=lambda item: sum(ffn is not None for ffn in item[1]), default=("", []))
    if not any(ffns):
        of_stack = f"its {stack}'s" if stack else "its"
        raise ValueError(
            f"{type(model).__name__} cannot be expanded: none of {of_stack} layers has an FFN, a module that maps the "
            "hidden states alone."
        )
    return [(f"{name}.{layer}", ffn) for layer, ffn in enumerate(ffns)]


def _ffn_of(layer: nn.Module, hidden_size: int) -> _Found | None:
    """The name and module of a layer's FFN, and whether it is a mixture of experts. Of several modules that map the
    hidden states alone (Gemma 3n's low-rank `laurel`), the FFN is the largest."""
    candidates: list[tuple[int, str, bool]] = []
    for name, child in layer.named_children():
        if isinstance(child, ExpandedFFN):
            return name, child, child.is_mixture
        if isinstance(child, ExpandedLayer):  # adapters, beside the FFN
            continue
        if inner := _ffn_of_parts(child, hidden_size):
            return f"{name}.{inner[0]}", *inner[1:]
        if isinstance(child, nn.Linear | Conv1D | nn.Embedding) or not _takes_hidden_states_alone(type(child)):  # type: ignore[arg-type]
            continue
        is_mixture, shapes = _is_mixture(child), _shapes(child)
        if is_mixture or sum(len(shape) == 2 and hidden_size in shape for shape in shapes) > 1:
            candidates.append((sum(map(prod, shapes)), name, is_mixture))
    if candidates:
        _, name, is_mixture = max(candidates)
        return name, getattr(layer, name), is_mixture
    return ("fc1", SeparateFFN(layer), False) if has_separate_ffn(layer) else None


def _ffn_of_parts(parts: nn.Module, hidden_size: int) -> _Found | None:
    """The FFN inside a layer's list of parts; None unless exactly one part has one."""
    if not isinstance(parts, nn.ModuleList):
        return None
    ffns = [(number, ffn) for number, part in enumerate(parts) if (ffn := _ffn_of(part, hidden_size))]
    if len(ffns) != 1:
        return None
    number, (name, module, is_mixture) = ffns[0]
    return f"{number}.{name}", module, is_mixture


def _is_mixture(module: nn.Module) -> bool:
    """Whether a module holds experts, fused in three dimensions or listed."""
    listed = any(isinstance(part, nn.ModuleList | nn.ModuleDict) for part in module.modules())
    return listed or any(len(shape) > 2 for shape in _shapes(module))


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    """The shapes of a module's parameters; those of a parameter that DeepSpeed's ZeRO-3 has split are beside it."""
    return [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in module.parameters()]


@cache
def _takes_hidden_states_alone(kind: Any) -> bool:
    _, *parameters = inspect.signature(kind.forward).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.KEYWORD_ONLY)]
    return len(names) == 1 or names[1:] == [_RESIDUAL]


def has_separate_ffn(layer: nn.Module) -> bool:
    """Whether a layer computes `fc2(dropout(activation_fn(fc1(x))))` itself."""
    first, second = getattr(layer, "fc1", None), getattr(layer, "fc2", None)
    return (
        isinstance(first, nn.Linear)
        and isinstance(second, nn.Linear)
        and callable(getattr(layer, "activation_fn", None))
        and first.in_features == second.out_features
    )


class SeparateFFN(nn.Module):
    """`fc2(dropout(activation_fn(fc1(x))))` of a layer, whose modules and names it shares."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.fc1, self.activation_fn, self.fc2 = layer.fc1, layer.activation_fn, layer.fc2
        self.dropout = float(getattr(layer, "activation_dropout", 0.0))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner = F.dropout(self.activation_fn(self.fc1(hidden_states)), self.dropout, self.training)
        return self.fc2(inner)


def put_in_place(layer: Any, expanded: nn.Module) -> None:
    """Lets the layer call `expanded` where it called `fc1`, and nothing afterwards."""
    layer.fc1 = expanded
    layer.activation_fn, layer.fc2, layer.activation_dropout = nn.Identity(), nn.Identity(), 0.0


def mixture_rules(model: Any, ffns: list[DecoderFFN]) -> list[WeightConverter]:
    """The rules for the mixtures of an expanded model, layer by layer: an added expert's tensors have names that the
    library's own rules would take for those of a mixture's experts."""
    names = (model._dense_class.__name__, model.config.backbone_model_type)
    known: list[Any] = next(
        (rules for name in names if (rules := get_checkpoint_conversion_mapping(name)) is not None), []
    )
    converters = [rule for rule in known if isinstance(rule, WeightConverter)]
    start = f"{model.base_model_prefix}."  # a file may have it where the model does not, and the reverse
    mixtures = [ffn for ffn in ffns if ffn.is_mixture]
    return [rule for ffn in mixtures for rule in _of_layer(converters, ffn.place.removeprefix(start), ffn.module)]


def _of_layer(converters: list[WeightConverter], place: str, module: nn.Module) -> Iterator[WeightConverter]:
    block = module
    if isinstance(module, ExpandedFFN):
        block, place = module.experts[0], f"{place}.experts.0"
    inner = list(block.state_dict())
    for rule in converters:
        sources, targets = (
            [pattern.replace("\\.", ".") for pattern in patterns]
            for patterns in (rule._original_source_patterns, rule._original_target_patterns)
        )
        for name in inner:
            head = targets[0].removesuffix(name)
            if len(targets) == 1 and head != targets[0] and all(source.startswith(head) for source in sources):
                moved = [f"{place}.{source.removeprefix(head)}" for source in sources]
                yield WeightConverter(moved, f"{place}.{name}", operations=copy.deepcopy(rule.operations))


def use_rules(model: Any, rules: list[WeightConverter], old_names: dict[str, str]) -> None:
    """Lets the library load and save the model by these rules, and load tensors by old names too. It looks them up by
    the name of the model's class, right after the model is built, and keeps them in the model."""
    name = type(model).__name__
    renamings = [WeightRenaming(re.escape(old), new) for old, new in old_names.items()]
    if rules or renamings or get_checkpoint_conversion_mapping(name) is not None:
        register_checkpoint_conversion_mapping(name, [*renamings, *rules], overwrite=True)
    if rules or renamings:
        model._weight_conversions = rules
