"""The flat configuration of an expanded model: every field of the backbone's own configuration, plus ours.

A configuration's class is created at run time and derives from both `ExpandedConfig` and the backbone's configuration
class. Hence all code that reads a Qwen2 configuration reads an expanded Qwen2 configuration.

New experts have a kind: `ffn` are FFNs of the backbone's class, `lora` expert 0 with low-rank updates on its linear
layers, and `added` expert 0 with a small FFN beside it, which a base that is a mixture of experts takes too. An
`adapter` is the layer as it was with low-rank updates of all its linear maps, in attention too.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from math import isfinite
from typing import Any, ClassVar

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .language_gate import GateRule

_CLASSES: dict[tuple[type, str], type] = {}
LISTENERS: list = []  # the installed package registers new classes with the Auto classes; empty in a checkpoint's copy

# The names that configurations have for the decoder's layers; the encoder's are `num_hidden_layers` under any name.
DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
# `new_layers` are those that a base has beyond its own base (`expand-depth`).
_NOT_INHERITED = ("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path", "new_layers")
REFUSED = {("exclusive", "conditional"): "conditional_routing shares expert 0"}
_AUXILIARY = {"output_router_logits": False, "router_aux_loss_coef": 0.0}  # of a mixture; see `_Off`


@dataclass(frozen=True)
class ExpertKind:
    """FFNs of the backbone's class, copies of expert 0 at first.

    Attributes:
        name: `expert_kind` in a configuration.
        names: fields of a configuration, one for each field of the kind.
        has_ffn: whether the experts are FFNs of the backbone's own; else they have tensors that no dense model has.
    """

    name: ClassVar[str] = "ffn"
    names: ClassVar[tuple[str, ...]] = ()
    has_ffn: ClassVar[bool] = True

    @classmethod
    def of(cls, config: Any) -> "ExpertKind":
        """The kind with the settings of a configuration."""
        return cls(*(getattr(config, name) for name in cls.names))

    @property
    def settings(self) -> list[float] | None:
        """Its settings as a list; None if it has none."""
        return list(astuple(self)) or None

    @property
    def words(self) -> str:
        """The kind of the experts, in words."""
        return "FFNs"

    def problem(self) -> str | None:
        """Why its settings do not fit; None if they do."""
        return None


@dataclass(frozen=True)
class LoraKind(ExpertKind):
    """Expert 0 with updates of rank `rank`, which are scaled by `alpha / rank`."""

    rank: int
    alpha: float
    name: ClassVar[str] = "lora"
    names: ClassVar[tuple[str, ...]] = ("lora_rank", "lora_alpha")
    has_ffn: ClassVar[bool] = False

    @property
    def words(self) -> str:
        return f"expert 0 with updates of rank {self.rank}, alpha {self.alpha:g}"

    def problem(self) -> str | None:
        if (self.rank or 0) >= 1 and (self.alpha or 0) > 0:
            return None
        return (
            f"lora_rank is {self.rank} and lora_alpha {self.alpha}: LoRA experts need a rank of at least 1 and an "
            "alpha above 0."
        )


@dataclass(frozen=True)
class AddedKind(ExpertKind):
    """Expert 0 and an FFN of width `width` beside it."""

    width: int
    name: ClassVar[str] = "added"
    names: ClassVar[tuple[str, ...]] = ("expert_width",)
    has_ffn: ClassVar[bool] = False

    @property
    def words(self) -> str:
        return f"expert 0 with an added FFN of width {self.width}"

    def problem(self) -> str | None:
        if (self.width or 0) >= 1:
            return None
        return f"expert_width is {self.width}: added experts need a width of at least 1."


@dataclass(frozen=True)
class AdapterKind(ExpertKind):
    """Low-rank updates of a layer's linear maps (`adapters.py`), one adapter for each expansion.

    Attributes:
        adapters: of each expansion, `{"maps": {NAME: [rank, scaling]}, "layers": {LAYER: {NAME: [rank, scaling]}}}`:
            the updates of each layer, under the names of its maps in the layer; `layers` has those that differ.
    """

    adapters: list[dict]
    name: ClassVar[str] = "adapter"
    names: ClassVar[tuple[str, ...]] = ("adapters",)
    has_ffn: ClassVar[bool] = False

    def maps(self, expansion: int, layer: int) -> dict[str, list]:
        """The updates of a layer by expansion `expansion`, which are numbered from 0."""
        adapter = self.adapters[expansion]
        return adapter.get("layers", {}).get(str(layer), adapter["maps"])

    @property
    def words(self) -> str:
        maps = [maps for one in self.adapters for maps in (one["maps"], *one.get("layers", {}).values())]
        ranks = sorted({rank for of_layer in maps for rank, _ in of_layer.values()})
        names = sorted({name.rpartition(".")[2] for of_layer in maps for name in of_layer})
        return f"updates of rank {', '.join(map(str, ranks))} on {', '.join(names)}"

    def problem(self) -> str | None:
        if not isinstance(self.adapters, list) or not self.adapters:
            return "adapters is empty: adapters need the maps that they update."
        for adapter in self.adapters:
            layers = adapter.get("layers", {}) if isinstance(adapter, dict) else None
            all_maps = [adapter.get("maps"), *layers.values()] if isinstance(layers, dict) else [None]
            if not all(isinstance(maps, dict) and all(map(_is_update, maps.values())) for maps in all_maps):
                return (
                    f"adapters has {str(adapter)[:80]}: must have `maps`, and may have `layers`, with a rank of at "
                    "least 1 and a finite scaling for each map's name."
                )
        return None


def _is_update(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    rank, scaling = value
    numbers = isinstance(rank, int) and isinstance(scaling, int | float) and not isinstance(rank, bool)
    return numbers and rank >= 1 and isfinite(scaling)


KINDS: dict[str, type[ExpertKind]] = {kind.name: kind for kind in (ExpertKind, LoraKind, AddedKind, AdapterKind)}


def kind_of_settings(settings: Sequence[float] | None) -> ExpertKind:
    """The kind with these settings, as in `updates_of_packs`: rank and alpha, a width, or None for FFNs.

    Raises:
        ValueError: no kind has so many settings, or their values do not fit.
    """
    numbers = list(settings or [])
    for kind in KINDS.values():
        if len(fields(kind)) == len(numbers):
            made = kind(*([int(numbers[0]), *numbers[1:]] if numbers else []))
            if problem := made.problem():
                raise ValueError(problem)
            return made
    raise ValueError(f"{numbers} are settings of no kind of experts: known are rank and alpha, or a width.")


class _Off:
    """A field that reads as off and is saved as it came: by it, libraries add the loss that balances the experts of a
    base's own mixture (TRL turns it on itself)."""

    def __init__(self, name: str, off: Any) -> None:
        self.name, self.off = name, off

    def __get__(self, config: Any, owner: Any = None) -> Any:
        return self.off

    def __set__(self, config: Any, value: Any) -> None:
        vars(config).setdefault(self.name, value)


class ExpandedConfig(PreTrainedConfig):
    """Fields common to every expanded model.

    Args:
        backbone_model_type: `model_type` of the dense backbone, e.g. `"qwen2"`.
        num_experts_per_layer: experts in each layer, the original FFN (expert 0) included; a layer with 1 stays dense.
            In an encoder-decoder the encoder's layers come first, then the decoder's; all lists of layers number them
            so.
        router_top_k: experts that are active for one token (K in the papers).
        classifier_layers: layers with a routing classifier in front of the router.
        expansions: history, one entry for each expansion in order.
        conditional_routing: whether expert 0 of the expanded layers is a shared FFN outside the routed set, beside a
            gate that weighs the routed experts for each token (CMR).
        expert_kind: kind of experts 1, 2, ...: `"ffn"`, separate FFNs; `"lora"`, expert 0 with a low-rank update on its
            linear layers; `"added"`, expert 0 with an FFN of any width beside it; or `"adapter"`, the whole layer with
            low-rank updates of its linear maps.
        language_gate: `{"layer": ..., "languages": [...], ...}` of the gate that tells the languages of each class
            apart (`GateRule`); None without one.
        exclusive_experts: whether tokens of a new class take its experts alone, without expert 0.
        lora_rank, lora_alpha: rank and alpha of the updates, which are scaled by `lora_alpha / lora_rank`.
        expert_width: width of the added FFNs.
        adapters: the maps that each expansion's adapters update (`AdapterKind`).

    Raises:
        ValueError: the installed transformers does not know the backbone, or the fields contradict each other.
    """

    backbone_model_type: str | None = None
    num_experts_per_layer: list[int] | None = None
    router_top_k: int = 2
    classifier_layers: list[int] | None = None
    expansions: list[dict] | None = None
    conditional_routing: bool = False
    expert_kind: str = "ffn"
    lora_rank: int | None = None
    lora_alpha: float | None = None
    expert_width: int | None = None
    adapters: list[dict] | None = None
    language_gate: dict | None = None
    exclusive_experts: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> "ExpandedConfig":
        backbone = kwargs.get("backbone_model_type")
        if backbone is not None and cls.__dict__.get("backbone_config_class") is None:
            cls = expanded_config_class(cls, backbone)
        return object.__new__(cls)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.backbone_model_type is not None:
            self._check_expansion()

    def _check_expansion(self) -> None:
        if getattr(self, "vocabularies", None) is not None:
            raise ValueError(
                "vocabularies: the checkpoint gives languages tokens of their own, which code after commit ea4a262b "
                "does not know: expand its base again."
            )
        names = layer_names(self)
        layers = len(names)
        if self.num_experts_per_layer is None:
            self.num_experts_per_layer = [1] * layers
        self.classifier_layers = sorted(self.classifier_layers or [])
        counts = self.num_experts_per_layer
        if len(counts) != layers:
            sizes = stack_sizes(self)
            words = "num_hidden_layers" if "" in sizes else ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(
                f"num_experts_per_layer has {len(counts)} entries, but the {self.backbone_model_type} backbone has "
                f"{layers} layers ({words}): give one count for each layer."
            )
        if min(counts) < 1:
            layer = min(range(layers), key=lambda i: counts[i])
            raise ValueError(
                f"num_experts_per_layer[{names[layer]}] is {counts[layer]}: must be at least 1, the original FFN (the "
                "layer then stays dense)."
            )
        if self.router_top_k < 1:
            raise ValueError(f"router_top_k is {self.router_top_k}: must be at least 1, the active experts of a token.")
        for layer in self.classifier_layers:
            if not 0 <= layer < layers or counts[layer] < 2:
                raise ValueError(
                    f"classifier_layers names layer {names[layer] if 0 <= layer < layers else layer}, which is "
                    + ("dense (1 expert)" if 0 <= layer < layers else f"outside 0..{layers - 1}")
                    + ": a classifier needs a layer with a router."
                )
        self._check_gate(names)
        if self.exclusive_experts and (self.is_encoder_decoder or self.conditional_routing):
            raise ValueError(
                "exclusive_experts: a token of a new language takes its expert alone, "
                + (
                    "but a sentence of an encoder-decoder and its translation have a language each"
                    if self.is_encoder_decoder
                    else f"but {REFUSED['exclusive', 'conditional']}"
                )
                + ": leave exclusive_experts out."
            )
        if self.conditional_routing and max(counts) < 2:
            raise ValueError("conditional_routing needs experts beside expert 0, but num_experts_per_layer is all 1.")
        if self.expert_kind not in KINDS:
            raise ValueError(f"expert_kind is {self.expert_kind!r}; known: {', '.join(KINDS)}.")
        if problem := KINDS[self.expert_kind].of(self).problem():
            raise ValueError(problem)
        if self.expert_kind == "adapter":
            self._check_adapters()

    def _check_adapters(self) -> None:
        history = [*(getattr(self, "earlier_experts_per_layer", None) or ()), self.num_experts_per_layer]
        steps = pairwise([[1] * len(self.num_experts_per_layer or ()), *history])
        one_each = all(after - before in (0, 1) for old, new in steps for before, after in zip(old, new, strict=False))
        if not self.exclusive_experts or not one_each or len(self.adapters or ()) != len(history):
            raise ValueError(
                "expert_kind is 'adapter': a class has one adapter in a layer and no router: set exclusive_experts, "
                "let each expansion add one expert to a layer or none, and give one entry of adapters for each "
                "expansion."
            )

    def adapter_maps(self, expansion: int, layer: int) -> dict[str, list]:
        """The updates of a layer's maps by an expansion, which are numbered from 0."""
        return AdapterKind(self.adapters or []).maps(expansion, layer)

    def _check_gate(self, names: list[str]) -> None:
        if getattr(self, "prefix_gate", None) is not None or getattr(self, "gate_languages", None) is not None:
            raise ValueError(
                "prefix_gate: the checkpoint has gates in all layers, of an earlier version: fit the one that takes "
                "their place (`hf-moe-expand gates MODEL OUT --data LANGUAGE=FILE`)."
            )
        rule = GateRule.of(self)
        if rule is None:
            return
        if self.is_encoder_decoder:
            raise ValueError(
                "language_gate judges one text, but a sentence of an encoder-decoder and its translation have a "
                "language each: leave it out for an encoder-decoder, whose classifiers judge single tokens."
            )
        if rule.layer >= len(names):
            raise ValueError(f"language_gate: layer is {rule.layer}, but the layers are 0 to {len(names) - 1}.")
        if self.classifier_layers:
            raise ValueError("language_gate decides for all layers: leave classifier_layers out.")

    def kind_of(self, layer: int, expert: int) -> ExpertKind:
        """The kind of an expert; expert 0 is an FFN."""
        return KINDS[self.expert_kind].of(self) if expert > 0 else ExpertKind()

    @property
    def expert_kinds(self) -> list[ExpertKind]:
        """The kind of the new experts; of a model that joins packs, each pack's."""
        return [KINDS[self.expert_kind].of(self)]

    def has_kind(self, name: str) -> bool:
        """Whether the model has experts of a kind."""
        return any(kind.name == name for kind in self.expert_kinds)

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
    """The class of `static`'s configurations for the backbone type `backbone`, created once in a process.

    Raises:
        ValueError: the installed transformers does not know `backbone`.
    """
    if (static, backbone) not in _CLASSES:
        if backbone not in CONFIG_MAPPING:
            raise ValueError(
                f"transformers {transformers.__version__} does not know the backbone architecture {backbone!r}: "
                "install a version that does."
            )
        dense = CONFIG_MAPPING[backbone]
        namespace = {
            "__module__": static.__module__,
            "__qualname__": f"{static.__name__}_{backbone}",
            "model_type": static.model_type,  # type: ignore[attr-defined]
            "backbone_config_class": dense,
            "_static": static,
            **{name: _Off(name, off) for name, off in _AUXILIARY.items() if hasattr(dense, name)},
        }
        made = type(static.__name__, (static, dense), namespace)
        _CLASSES[static, backbone] = made
        for listener in LISTENERS:
            listener(made)
    return _CLASSES[static, backbone]


def _blank_config(static: type, backbone: str | None) -> ExpandedConfig:
    return object.__new__(expanded_config_class(static, backbone) if backbone else static)


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
        raise ValueError(
            f"a {config.model_type} configuration has none of {', '.join(DECODER_LAYERS)}, the decoder's layers."
        )
    return {"encoder": config.num_hidden_layers, "decoder": decoder}


def count_layers(config: Any) -> int:
    """The number of all layers."""
    return sum(stack_sizes(config).values())


def layer_names(config: Any) -> list[str]:
    """The name of each layer: its number in a decoder; `encoder.0`, `decoder.0` and so on in an encoder-decoder."""
    sizes = stack_sizes(config)
    return [f"{stack}.{layer}" if stack else str(layer) for stack, size in sizes.items() for layer in range(size)]
