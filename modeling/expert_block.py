"""Finds the weights of a layer's experts, to run them together, and lays them out as one block of memory.

Experts stay modules of the backbone's class, with their own parameters and names. A user, a library or an adapter may
change any of them at any time: what a forward pass found is compared in the next one.
"""

from dataclasses import dataclass
from operator import attrgetter, eq, is_
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as global_hooks

from .ffn_form import FFNForm
from .ffn_trace import forms_of
from .weight_block import ExpertWeights, is_alone, laid_out

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(getattr(global_hooks, f"_global{name}") for name in _HOOKS)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_STATE: Any = (torch.Tensor.data_ptr, torch.Tensor.numel, torch.Tensor.stride, attrgetter("dtype"))
_LOCK = Lock()


@dataclass(frozen=True)
class _Held:
    """The weights that one call found, and all that must stay as it is for the next call to take them again.

    Attributes:
        found: of each of the form's `linears`.
        experts, form: the arguments of the call.
        number: of experts.
        modules, kinds, hooks: the modules that the form replaces; their classes and hooks.
        attributes, sizes: their `__dict__`s, and the number of attributes in each.
        forwards: each class and its `forward`.
        places, values: the dictionaries and keys that lead to modules, weights and settings, and what lies there.
        parameters, states: the weights and biases, and what each function of `_STATE` says of them.
        shared: a weight whose memory another tensor shares, so that no block could be laid out.
    """

    found: list[ExpertWeights]
    experts: nn.ModuleList
    form: FFNForm
    number: int
    modules: list[nn.Module]
    kinds: list[type]
    hooks: list[Any]
    attributes: list[dict[str, Any]]
    sizes: list[int]
    forwards: list[tuple[Any, Any]]
    places: tuple[list[dict[str, Any]], list[str]]
    values: list[Any]
    parameters: list[nn.Parameter]
    states: list[list[Any]]
    shared: nn.Parameter | None

    @classmethod
    def of(cls, experts: nn.ModuleList, form: FFNForm, found: list[ExpertWeights]) -> "_Held":
        linears = [name for call in form.linears for name in call.names]
        names = [*linears, *(part.name for part in form.parts if part.name)]
        places: list[tuple[Any, str]] = [(experts._modules, str(number)) for number in range(len(experts))]
        modules: list[nn.Module] = list(experts)
        parameters: list[nn.Parameter] = []
        for expert in experts:
            for name in names:
                module: Any = expert
                for step in name.split("."):
                    places.append((module._modules, step))
                    module = module._modules[step]
                modules.append(module)
                places += [(module._parameters, kind) for kind in module._parameters]
                parameters += [p for p in module._parameters.values() if p is not None]
            for part in form.parts:
                places += [(vars(expert.get_submodule(part.name)), name) for name in part.settings]
        kinds: list[Any] = list(map(type, modules))
        attributes = list(map(vars, modules))
        places += [(vars(module), "training") for module in modules if isinstance(module, nn.Dropout)]
        if form.mode is not None:
            places += [(vars(expert), "training") for expert in experts]
        return cls(
            found=found,
            experts=experts,
            form=form,
            number=len(experts),
            modules=modules,
            kinds=kinds,
            hooks=[hooks for module in attributes for name in _HOOKS if (hooks := module[name]) is not None],
            attributes=attributes,
            sizes=list(map(len, attributes)),
            forwards=[(kind, kind.forward) for kind in dict.fromkeys(kinds)],
            places=([owner for owner, _ in places], [key for _, key in places]),
            values=[owner.get(key) for owner, key in places],
            parameters=parameters,
            states=[list(map(read, parameters)) for read in _STATE],
            shared=next((w for one in found for w in one.weights if one.block is None and not is_alone(w)), None),
        )

    def is_still(self, experts: nn.ModuleList, form: FFNForm) -> bool:
        """Whether all is as it was. Runs in every forward pass, and so costs microseconds."""
        return (
            form is self.form
            and experts is self.experts
            and len(experts._modules) == self.number
            and not any(_GLOBAL_HOOKS)
            and not any(self.hooks)
            and list(map(type, self.modules)) == self.kinds
            and list(map(len, self.attributes)) == self.sizes
            and all(kind.forward is forward for kind, forward in self.forwards)
            and all(map(is_, map(dict.get, *self.places), self.values))
            and all(
                all(map(eq, map(read, self.parameters), state)) for read, state in zip(_STATE, self.states, strict=True)
            )
            and (self.shared is None or not is_alone(self.shared))
        )


class ExpertBlock:
    """Finds the weights of a layer's experts, and lays them out in blocks.

    A plain object beside the experts, which nothing saves; a copy of the layer starts with no blocks.

    Args:
        forms: the FFN's form in evaluation and in training, None for an FFN of another kind.
    """

    def __init__(self, forms: tuple[FFNForm | None, FFNForm | None]) -> None:
        self.forms = forms
        self.release()

    @classmethod
    def of(cls, ffn: nn.Module) -> "ExpertBlock":
        """For copies of `ffn`."""
        return cls(forms_of(ffn))

    def release(self) -> None:
        """Forgets the blocks; the weights keep the memory that they lie in."""
        self._held: _Held | None = None

    def __deepcopy__(self, memo: dict) -> "ExpertBlock":
        return ExpertBlock(self.forms)

    def __reduce__(self) -> tuple:
        return ExpertBlock, (self.forms,)

    def weights(self, experts: nn.ModuleList, form: FFNForm, x_Th: torch.Tensor) -> list[ExpertWeights] | None:
        """The weights of each of the form's `linears`, for the input `x_Th`; None if the experts must run as modules.

        They must if a class is another one (adapters, quantisation, parametrisation), a hook would not run, a method is
        replaced (offloading), a module or a setting of an expert's differs from the FFN whose form was read, a weight
        is no plain parameter (sharding), or the experts differ in type or device.
        """
        if torch.compiler.is_compiling() or type(x_Th) is not torch.Tensor:
            return _collect(experts, form)
        held = self._held
        if held is not None and held.is_still(experts, form):
            return held.found
        found = _collect(experts, form)
        if found is None:
            return None
        with _LOCK:  # another thread may run the same layer
            self._held = held = _Held.of(experts, form, laid_out(form, found))
        return held.found


def _collect(experts: nn.ModuleList, form: FFNForm) -> list[ExpertWeights] | None:
    """The weights of the experts, where they lie; None if the experts must run as modules."""
    if any(_GLOBAL_HOOKS):
        return None
    for expert in experts:
        if form.mode not in (None, expert.training):
            return None
        for part in form.parts:
            module = expert.get_submodule(part.name)
            if not part.is_still(module) or not _is_plain(module, part.kind):
                return None
    found = []
    first: Any = experts[0].get_submodule(form.linears[0].names[0])
    if not _is_plain(first, form.linears[0].kind) or not _is_weight(first.weight):
        return None
    dtype, device = first.weight.dtype, first.weight.device
    for call in form.linears:
        weights: list[Any] = []
        biases: list[Any] = []
        for expert in reversed(experts):
            for place, name in enumerate(call.names):
                layer: Any = expert.get_submodule(name)
                if not _is_plain(layer, call.kind):
                    return None
                weight, bias = layer.weight, layer.bias
                if not _is_weight(weight) or tuple(weight.shape) != call.shape(place):
                    return None
                if call.has_bias[place] != (bias is not None) or (bias is not None and not _is_weight(bias)):
                    return None
                if weight.dtype != dtype or weight.device != device:
                    return None
                weights.append(weight)
                biases.append(bias)
        found.append(ExpertWeights(tuple(weights), tuple(biases), None))
    return found


def _is_plain(module: nn.Module, kind: type) -> bool:
    """Whether a module is exactly of its class, and nothing beside its own `forward` runs when it is called."""
    return (
        type(module) is kind
        and not any(getattr(module, name) for name in _HOOKS)
        and (torch.compiler.is_compiling() or "forward" not in vars(module))
    )


def _is_weight(tensor: Any) -> bool:
    plain = type(tensor) is nn.Parameter or isinstance(tensor, FakeTensor)
    return (plain or torch.compiler.is_compiling()) and tensor.dtype in _DTYPES and tensor.device.type != "meta"
