"""Backbones that have mixtures of experts of their own, which stay frozen. `config.parts["mixture"]` is empty.

Of an FFN that is a mixture, a checkpoint has the experts one by one, or fused, as the base has them. transformers fuses
them when it loads them and takes them apart when it saves them, by rules for the names of its own architectures. In an
expanded model the mixture is expert 0 of an `ExpandedFFN`: the same rules hold for its names there.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import fields as fields_of
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from .backbone import DecoderFFN, decoder_ffns, layer_names
from .expanded_ffn import ExpandedFFN
from .part import BasePart

_COUNT = re.compile(r"(^|_)(n|num)_(local_|routed_)?experts$")  # of a mixture's experts; Doge's `is_moe` is beside it
_AUXILIARY = {"output_router_logits": False, "router_aux_loss_coef": 0.0}  # see `_Off`


class _Off:
    """A field that reads as off and is saved as it came: by it, libraries add the loss that balances the experts of a
    base's own mixture (TRL turns it on itself)."""

    def __init__(self, name: str, off: Any) -> None:
        self.name, self.off = name, off

    def __get__(self, config: Any, owner: Any = None) -> Any:
        return self.off

    def __set__(self, config: Any, value: Any) -> None:
        vars(config).setdefault(self.name, value)


class MixtureModel:
    """A model with mixtures of the backbone's own."""

    config: Any
    _dense_class: Any

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls._dense_class._can_set_experts_implementation()

    def post_init(self) -> None:
        config = self.config
        if not any("expert" in name for name, _ in self.named_parameters()):  # type: ignore[attr-defined]
            config.parts.pop("mixture", None)  # its number of experts is of layers that the model does not have
        ffns = decoder_ffns(self)  # type: ignore[arg-type]
        mixtures = [index for index, ffn in enumerate(ffns) if ffn.is_mixture]
        grown = [index for index in mixtures if config.num_experts_per_layer[index] > 1]
        if grown and not any(part.beside_mixtures for part in config.used_parts):
            names = layer_names(config)
            raise ValueError(
                f"Layers {', '.join(names[index] for index in grown)} are mixtures of experts of the backbone's own, "
                f"of which no {config.expert_kind} experts are made: take another expert_kind, or one expert there."
            )
        super().post_init()  # type: ignore[misc]

    def _rules(self) -> list:
        return [*super()._rules(), *mixture_rules(self, decoder_ffns(self))]  # type: ignore[misc, arg-type]


def mixture_rules(model: Any, ffns: list[DecoderFFN]) -> list[WeightConverter]:
    """The rules for the mixtures of an expanded model, layer by layer: a new expert's tensors may have names that the
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


class Part(BasePart):
    name = "mixture"
    model_class = MixtureModel
    not_served = (
        "{server} runs a mixture of experts by code of its own, which knows nothing of the experts beside it: serve "
        "this model with transformers."
    )

    @classmethod
    def read(cls, fields: dict[str, Any], config: Any) -> Any:
        backbone = getattr(type(config), "backbone_config_class", None)
        counts = [field.name for field in fields_of(backbone) if _COUNT.search(field.name)] if backbone else []
        return {} if getattr(config, "is_moe", True) and any(getattr(config, name) for name in counts) else None

    @classmethod
    def prepare(cls, made: type) -> None:
        for name, off in _AUXILIARY.items():
            if hasattr(made, name):
                setattr(made, name, _Off(name, off))
