"""The layout of a mixture's tensors in a checkpoint: experts one by one, or fused, as the base has them.

transformers has rules by which it fuses a mixture's experts when it loads them and takes them apart when it saves them,
for the names of its own architectures. In an expanded model the mixture is expert 0 of an `ExpandedFFN`: the same rules
hold for its names there.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from .backbone import DecoderFFN
from .expanded_ffn import ExpandedFFN


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


def use_rules(model: Any, rules: list[WeightConverter]) -> None:
    """Lets the library load and save the model by these rules. It looks them up by the name of the model's class,
    right after the model is built, and keeps them in the model."""
    name = type(model).__name__
    if rules or get_checkpoint_conversion_mapping(name) is not None:
        register_checkpoint_conversion_mapping(name, [*rules], overwrite=True)
    if rules:
        model._weight_conversions = rules
