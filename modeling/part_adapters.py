"""Language adapters: low-rank updates of a layer's linear maps, in attention and FFN, for the tokens of one class.

`y = W x + b + scaling * B A x` for a token of the adapter's class, and the base's own bits for all others. The base's
modules stay in their places: a forward hook adds the update to what a map returns, so that one that was replaced before
the model is loaded (quantised) or wrapped afterwards (by PEFT) works too.

Shape suffixes as in `routing.py`.
"""

from functools import partial
from itertools import pairwise
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import nn

from .expanded_ffn import ExpandedLayer, chosen
from .part import BasePart, calls
from .routing import TokenClasses
from .routing_control import RoutingControl
from .updates import LoraUpdate


class Adapter(nn.Module):
    """One expansion's updates of a layer; that of the map `self_attn.q_proj` is `self_attn_q_proj_update`, a name that
    PEFT does not take for the map's.

    Args:
        layer: the layer.
        maps: rank and scaling of each map's update.
    """

    def __init__(self, layer: nn.Module, maps: dict[str, list]) -> None:
        super().__init__()
        for name, (rank, scaling) in maps.items():
            self.add_module(update_name(name), LoraUpdate(layer.get_submodule(name), name, rank, scaling))


def update_name(name: str) -> str:
    """The name in an `Adapter` of the update of a map."""
    return f"{name.replace('.', '_')}_update"


class AdaptedLayer(ExpandedLayer):
    """The adapters of a layer: a module beside the layer's own.

    Args:
        layer: the layer.

    Attributes:
        experts: expert 0 has no weights: it is the layer as it is. Expert e is an `Adapter`.
        updated: by the name of a linear map, the experts that update it.
    """

    def __init__(self, layer: nn.Module, config: Any, layer_index: int, control: RoutingControl) -> None:
        super().__init__(config, layer_index, control)
        counts = self.experts_after_expansion
        # An expansion adds one expert to the layer, or none.
        adding = [number for number, (before, after) in enumerate(pairwise(counts)) if after > before]
        maps = [maps_of(config.parts["adapters"][number], layer_index) for number in adding]
        self.experts = nn.ModuleList([nn.Identity(), *(Adapter(layer, of_expert) for of_expert in maps)])
        self.updated: dict[str, list[int]] = {}
        for number, of_expert in enumerate(maps, start=1):
            for name in of_expert:
                self.updated.setdefault(name, []).append(number)

    def attach(self, layer: nn.Module) -> None:
        """Lets the layer's linear maps call their updates, those that do not yet."""
        if not calls(layer._forward_pre_hooks, self._enter):
            layer.register_forward_pre_hook(partial(self._enter), with_kwargs=True)
        for name in self.updated:
            linear = layer.get_submodule(name)
            if not calls(linear._forward_hooks, self._add):
                linear.register_forward_hook(partial(self._add, name))

    def _enter(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Leaves for the maps the expert of all tokens, or else the class of each."""
        hidden_states = args[0] if args else kwargs["hidden_states"]
        if hidden_states.dim() == 4:  # several streams of each token: [N, B, S, h] in Gemma 3n, [B, S, N, h] in Hy 4
            comes_first = hasattr(self.model_config, "altup_num_inputs")
            hidden_states = hidden_states[0] if comes_first else hidden_states[:, :, 0]
        request = self.control.request
        known = self._known(request, hidden_states)
        self.control.own.decided = self._single_expert(request, known), known, hidden_states.shape[:-1].numel()

    def _add(self, name: str, linear: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        """A map's output with the updates of its tokens."""
        if (decided := getattr(self.control.own, "decided", None)) is None:  # the map alone
            return output
        x, (single_expert, known, tokens), ran = inputs[0], decided, set()
        if single_expert is None and x.shape[:-1].numel() != tokens:
            # A map of what the cache holds, too (`kv_b_proj` of DeepSeek's kin): the classes of the sequences.
            class_B = known.class_T.view(len(x), -1)[:, -1]
            known = TokenClasses(class_B.repeat_interleave(x.shape[:-1].numel() // len(x)), known.present)
        y = output
        if single_expert is not None:
            ran = {single_expert}
            y = output + self._update(single_expert, name)(x) if single_expert in self.updated[name] else output
        else:
            for number in range(1, len(self.experts_after_expansion)) if known.present is None else known.present:
                expert = self.expert_of(number) or 0
                if expert in self.updated[name]:
                    ran.add(expert)
                    own_T, update = known.class_T == number, self._update(expert, name)
                    # Where gradients flow, passes over whole outputs cost more than the update.
                    y = y + update(x, own_T) if self.training else chosen(own_T, output + update(x), y)
        # In training all experts are in the graph, so that all ranks have the same graph.
        if self.training and (idle := [expert for expert in self.updated[name] if expert not in ran]):
            nothing = x.flatten(0, -2)[:0]
            y = y + sum(self._update(expert, name)(nothing).sum() for expert in idle)
        return y

    def _update(self, expert: int, name: str) -> nn.Module:
        return self.experts[expert].get_submodule(update_name(name))


class AdaptedModel:
    """A model with adapters."""

    def _attach_parts(self) -> None:
        super()._attach_parts()  # type: ignore[misc]
        for name, module in list(self.named_modules()):  # type: ignore[attr-defined]
            if isinstance(module, AdaptedLayer):
                module.attach(self.get_submodule(name.rpartition(".")[0]))  # type: ignore[attr-defined]

    def init_parallel_plans(self) -> None:
        super().init_parallel_plans()  # type: ignore[misc]
        self._tp_plan: dict = {}  # an update is added to a map's whole output: every rank keeps the model whole


def maps_of(adapter: dict, layer: int) -> dict[str, list]:
    """The updates of a layer by one expansion's adapter: rank and scaling, by the name of the map in the layer."""
    return adapter.get("layers", {}).get(str(layer), adapter["maps"])


def _is_update(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    rank, scaling = value
    numbers = isinstance(rank, int) and isinstance(scaling, int | float) and not isinstance(rank, bool)
    return numbers and rank >= 1 and isfinite(scaling)


class Part(BasePart):
    """`config.parts["adapters"]` has for each expansion `{"maps": {NAME: [rank, scaling]}, "layers": {LAYER: {NAME:
    [rank, scaling]}}}`: the updates of each layer, under the names of its maps in the layer; `layers` has those that
    differ."""

    name, kind = "adapters", "adapter"
    flat = ("adapters",)
    model_class = AdaptedModel
    beside_mixtures = True
    not_beside: ClassVar = {"lora": "an adapter updates the FFN too", "added": "an adapter updates the FFN too"}
    not_served = (
        "{server} merges the linear layers that adapters update: serve the base with its adapters (`hf-moe-expand "
        "export --peft`), or the dense model of one language (`hf-moe-expand export --language`)."
    )

    @classmethod
    def read(cls, fields: dict[str, Any], config: Any) -> Any:
        return (fields.get("adapters") or []) if fields.get("expert_kind") == "adapter" else None

    def check(self) -> None:
        if not isinstance(self.settings, list) or not self.settings:
            raise ValueError("adapters is empty: adapters need the maps that they update.")
        for adapter in self.settings:
            layers = adapter.get("layers", {}) if isinstance(adapter, dict) else None
            all_maps = [adapter.get("maps"), *layers.values()] if isinstance(layers, dict) else [None]
            if not all(isinstance(maps, dict) and all(map(_is_update, maps.values())) for maps in all_maps):
                raise ValueError(
                    f"adapters has {str(adapter)[:80]}: must have `maps`, and may have `layers`, with a rank of at "
                    "least 1 and a finite scaling for each map's name."
                )
        history = self.config.counts_of_expansions
        steps = pairwise([[1] * len(history[0]), *history])
        one_each = all(after - before in (0, 1) for old, new in steps for before, after in zip(old, new, strict=False))
        if not self.config.exclusive_experts or not one_each or len(self.settings) != len(history):
            raise ValueError(
                "expert_kind is 'adapter': a class has one adapter in a layer and no router: set exclusive_experts, "
                "let each expansion add one expert to a layer or none, and give one entry of adapters for each "
                "expansion."
            )

    def expand(self, model: Any, place: str, layer: int) -> bool:
        module = model.get_submodule(place.rpartition(".")[0])
        module.adapters = AdaptedLayer(module, self.config, layer, model.routing_control)
        return True
