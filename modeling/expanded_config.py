"""The flat configuration of an expanded model: every field of the backbone's own configuration, plus ours.

A configuration's class is created at run time and derives from both `ExpandedConfig` and the backbone's configuration
class. Hence all code that reads a Qwen2 configuration reads an expanded Qwen2 configuration.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .backbone import count_layers
from .expanded_ffn import copy_ffn
from .part import keep_own_code, read_parts
from .parts import PARTS

_CLASSES: dict[tuple[type, str], type] = {}
LISTENERS: list = []  # the installed package registers new classes with the Auto classes; empty in a checkpoint's copy

# `new_layers` are those that a base has beyond its own base (`expand --blocks`).
_NOT_INHERITED = ("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path", "new_layers")


class ExpandedConfig(PreTrainedConfig):
    """Fields common to every expanded model. In an encoder-decoder all lists of layers have the encoder's layers first,
    then the decoder's.

    Raises:
        ValueError: the fields contradict each other.
    """

    backbone_model_type: str | None = None  # `model_type` of the dense backbone, e.g. "qwen2"
    # Experts in each layer, the original FFN (expert 0) included; a layer with 1 stays dense.
    num_experts_per_layer: list[int] | None = None
    router_top_k: int = 2  # experts that are active for one token (K in the papers)
    classifier_layers: list[int] | None = None  # layers with a routing classifier in front of the router
    expansions: list[dict] | None = None  # history, one entry for each expansion in order
    exclusive_experts: bool = False  # whether tokens of a new class take its experts alone, without expert 0
    parts: dict = None  # type: ignore[assignment]  # the settings of each optional part, by its name (`part.py`)
    not_told: ClassVar[str | None] = None  # why languages cannot be told

    def __new__(cls, *args: Any, **kwargs: Any) -> "ExpandedConfig":
        backbone = kwargs.get("backbone_model_type")
        if backbone is not None and cls.__dict__.get("backbone_config_class") is None:
            cls = expanded_config_class(cls, backbone)
        return object.__new__(cls)

    def __post_init__(self, **kwargs: Any) -> None:
        self.parts = read_parts(PARTS, self.parts, kwargs, self)
        super().__post_init__(**kwargs)
        if self.backbone_model_type is not None:
            self._check_expansion()

    def _check_expansion(self) -> None:
        layers = count_layers(self)
        if self.num_experts_per_layer is None:
            self.num_experts_per_layer = [1] * layers
        self.classifier_layers = sorted(self.classifier_layers or [])
        counts = self.num_experts_per_layer
        if len(counts) != layers or min(counts) < 1:
            raise ValueError(
                f"num_experts_per_layer is {counts}: must have a count of at least 1, the original FFN, for each of "
                f"the {layers} layers."
            )
        if self.router_top_k < 1:
            raise ValueError(f"router_top_k is {self.router_top_k}: must be at least 1, the active experts of a token.")
        for layer in self.classifier_layers:
            if not 0 <= layer < layers or counts[layer] < 2:
                raise ValueError(f"classifier_layers names layer {layer}, which has no router.")
        used = {self.model_type, *self.parts, *(["exclusive"] if self.exclusive_experts else [])}
        for part in self.used_parts:
            for other, why in part.not_beside.items():
                if other in used:
                    raise ValueError(f"{[*part.flat, part.name][0]} beside {other}: {why}.")
            part.check()

    def __getattr__(self, name: str) -> Any:
        # The fields of parts, as configurations of earlier versions have them.
        if "parts" not in vars(self) or not any(name in part.flat for part in PARTS.values()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        values = (part.written(self.parts.get(part.name)).get(name) for part in PARTS.values())
        return next((value for value in values if value is not None), None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "expert_kind" or any(name in part.flat for part in PARTS.values()):
            raise AttributeError(f"{name}: is a part's field: set it in config.parts.")
        super().__setattr__(name, value)

    @property
    def used_parts(self) -> list[Any]:
        """The optional parts that the model has."""
        return [part(self, self.parts[name]) for name, part in PARTS.items() if name in self.parts]

    def declares(self, name: str) -> bool:
        """Whether a part of the model declares this of itself (`BasePart`)."""
        return any(getattr(part, name) for part in self.used_parts)

    @property
    def expert_kind(self) -> str:
        """The kind of the new experts: `"ffn"`, or that of the part which makes them."""
        return next((part.kind for part in self.used_parts if part.kind), "ffn")

    @property
    def counts_of_expansions(self) -> list[list[int]]:
        """The experts of each layer after each expansion."""
        return [*(getattr(self, "earlier_experts_per_layer", None) or []), self.num_experts_per_layer or []]

    def make_expert(self, layer: int, number: int) -> Callable:
        """How expert `number` of a layer is made of its FFN."""
        made = (part.make_expert(layer, number) for part in self.used_parts)
        return next((make for make in made if make is not None), copy_ffn)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, **kwargs)
        if getattr(self, "auto_map", None):
            keep_own_code(save_directory, self)

    def __reduce__(self) -> tuple:
        return _blank_config, (static_class(type(self)), self.backbone_model_type), self.__dict__

    @classmethod
    def from_dense(cls, dense: PreTrainedConfig, **fields: Any) -> "ExpandedConfig":
        """The configuration of the expanded model of `dense`; `fields` are the fields of this class."""
        inherited = {name: value for name, value in dense.to_dict().items() if name not in _NOT_INHERITED}
        if "output_router_logits" in inherited:  # with them comes the auxiliary loss of a mixture, which stays frozen
            inherited["output_router_logits"] = False
        return cls(backbone_model_type=dense.model_type, **inherited, **fields)


def static_class(cls: type) -> type:
    """The importable class behind a class that `expanded_config_class` made (or `cls` itself)."""
    return cls.__dict__.get("_static", cls)


def expanded_config_class(static: type, backbone: str) -> type:
    """The class of `static`'s configurations for the backbone type `backbone`, created once in a process."""
    if (static, backbone) not in _CLASSES:
        if backbone not in CONFIG_MAPPING:
            raise ValueError(f"This transformers does not know the backbone {backbone!r}: install one that does.")
        dense = CONFIG_MAPPING[backbone]
        namespace = {
            "__module__": static.__module__,
            "__qualname__": f"{static.__name__}_{backbone}",
            "model_type": static.model_type,  # type: ignore[attr-defined]
            "backbone_config_class": dense,
            "_static": static,
        }
        made = type(static.__name__, (static, dense), namespace)
        _CLASSES[static, backbone] = made
        for change in (*(part.prepare for part in PARTS.values()), *LISTENERS):
            change(made)
    return _CLASSES[static, backbone]


def _blank_config(static: type, backbone: str | None) -> ExpandedConfig:
    return object.__new__(expanded_config_class(static, backbone) if backbone else static)
