"""The weights of a layer's experts as one block of memory.

Experts stay modules of the backbone's class, with their own parameters and names. Beneath them, each of the FFN's
matrices lies in one tensor `[N, out, in]`, last expert first, and each expert's weight is its slice. Kernels for all
experts at once read the block; checkpoints, optimizers and adapters see ordinary parameters, since every slice is a
storage of its own: nothing takes them for tied weights.

Experts come last first because frozen ones come first (the original FFN, earlier expansions): their gradients are then
the end of a block of gradients, and are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as global_hooks

from .ffn_form import FFNForm, Linears, form_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(getattr(global_hooks, f"_global{name}") for name in _HOOKS)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DEVICES = ("cpu", "cuda")
# Blocks by the address of their first weight.
_BLOCKS: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


@dataclass(frozen=True)
class ExpertWeights:
    """The parameters of one `Linears` of all experts, last expert first.

    Attributes:
        weights: one for each expert and name; `[expert 0's gate, its up]` come last.
        biases: likewise; None without a bias.
        block: `[N, sum of out, in]` (`[N, in, out]` of `Conv1D`), of which the weights are slices; None if it is not
            laid out.
    """

    weights: tuple[nn.Parameter, ...]
    biases: tuple[nn.Parameter | None, ...]
    block: torch.Tensor | None


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
        mode = ffn.training
        forms = form_of(ffn.eval()), form_of(ffn.train())
        ffn.train(mode)
        return cls(forms)

    def release(self) -> None:
        """Forgets the blocks; the weights keep the memory that they lie in."""
        self._form: FFNForm | None = None
        self._found: list[ExpertWeights] = []
        self._number = 0
        self._modules: list[nn.Module] = []
        self._kinds: list[type] = []
        self._hooks: list[Any] = []
        self._attributes: list[dict[str, Any]] = []
        self._places: list[tuple[Any, str]] = []
        self._children: list[Any] = []
        self._parameters: list[nn.Parameter] = []
        self._state: tuple[list, ...] = ()

    def __deepcopy__(self, memo: dict) -> "ExpertBlock":
        return ExpertBlock(self.forms)

    def __reduce__(self) -> tuple:
        return ExpertBlock, (self.forms,)

    def weights(self, experts: nn.ModuleList, form: FFNForm, x_Th: torch.Tensor) -> list[ExpertWeights] | None:
        """The weights of each of the form's `linears`, for the input `x_Th`; None if the experts must run as modules.

        They must if a class is another one (adapters, quantisation, parametrisation), a hook would not run, a method is
        replaced (offloading), a weight is no plain parameter (sharding), or the experts differ in type or device.
        """
        if torch.compiler.is_compiling() or type(x_Th) is not torch.Tensor:
            return _collect(experts, form)
        if not self._holds(experts, form):
            found = _collect(experts, form)
            if found is None:
                return None
            self._remember(experts, form, _laid_out(form, found))
        return self._found

    def _holds(self, experts: nn.ModuleList, form: FFNForm) -> bool:
        """Whether what the last call found is still so. Runs in every forward pass, and so costs microseconds."""
        return (
            form is self._form
            and len(experts._modules) == self._number
            and not any(_GLOBAL_HOOKS)
            and not any(self._hooks)
            and list(map(type, self._modules)) == self._kinds
            and not [None for attributes in self._attributes if "forward" in attributes]
            and all(map(is_, [owner.get(name) for owner, name in self._places], self._children))
            and _state_of(self._parameters) == self._state
        )

    def _remember(self, experts: nn.ModuleList, form: FFNForm, found: list[ExpertWeights]) -> None:
        self.release()
        self._form, self._found, self._number = form, found, len(experts)
        names = [name for call in form.linears for name in call.names]
        layers = [expert.get_submodule(name) for expert in experts for name in names]
        owners: list[tuple[Any, str]] = [(experts._modules, str(number)) for number in range(len(experts))]
        for expert in experts:
            for name in names:
                parent, _, attribute = name.rpartition(".")
                owners.append((expert.get_submodule(parent)._modules, attribute))
        owners += [(layer._parameters, kind) for layer in layers for kind in layer._parameters]
        self._places, self._children = owners, [owner[name] for owner, name in owners]
        self._modules = [*experts, *layers]
        self._kinds = list(map(type, self._modules))
        self._hooks = [getattr(module, name) for module in self._modules for name in _HOOKS]
        self._attributes = list(map(vars, self._modules))
        self._parameters = [p for layer in layers for p in layer.parameters(recurse=False)]
        self._state = _state_of(self._parameters)


def _state_of(parameters: list[nn.Parameter]) -> tuple[list, ...]:
    address, elements = torch.Tensor.data_ptr, torch.Tensor.numel
    return list(map(address, parameters)), list(map(elements, parameters)), [p.dtype for p in parameters]


def _collect(experts: nn.ModuleList, form: FFNForm) -> list[ExpertWeights] | None:
    """The weights of the experts, where they lie; None if the experts must run as modules."""
    if any(_GLOBAL_HOOKS):
        return None
    kind = type(experts[0])
    if not all(_is_plain(expert, kind) for expert in experts):
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
                if call.has_bias[place] and not _is_weight(bias):
                    return None
                if weight.dtype != dtype or weight.device != device:
                    return None
                weights.append(weight)
                biases.append(bias if call.has_bias[place] else None)
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


def _laid_out(form: FFNForm, found: list[ExpertWeights]) -> list[ExpertWeights]:
    """The same weights, moved into blocks if nothing else uses their memory."""
    weights = [weight for one in found for weight in one.weights]
    if weights[0].device.type not in _DEVICES or not all(map(_is_alone, weights)):
        return found
    with torch.inference_mode(False), torch.no_grad():
        return [_moved(call, one) for call, one in zip(form.linears, found, strict=True)]


def _is_alone(weight: nn.Parameter) -> bool:
    """Whether no other tensor shares the weight's memory, such as a dense model's of which this one was made."""
    storage = weight.untyped_storage()
    # Two references: the weight's, and that of the variable above.
    alone = torch._C._storage_Use_Count(storage._cdata) == 2 and storage.nbytes() == weight.nbytes
    return alone and weight.is_contiguous() and not weight.is_shared() and not weight.is_inference()


def _moved(call: Linears, one: ExpertWeights) -> ExpertWeights:
    parts = len(call.names)
    axis = int(call.is_transposed)
    experts = [one.weights[start : start + parts] for start in range(0, len(one.weights), parts)]
    shape = list(call.shape(0))
    shape[axis] = sum(call.outputs)
    block = one.weights[0].new_empty(len(experts), *shape)
    for slices, weights in zip(block, experts, strict=True):
        for part, weight in zip(slices.split(call.outputs, axis), weights, strict=True):
            part.copy_(weight)
            weight.data = torch.from_dlpack(part)  # a storage of its own, in the same memory
    _BLOCKS[block.data_ptr()] = block
    return ExpertWeights(one.weights, one.biases, block)


def block_of(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The block of which `weights` are the slices, in order; None if there is none."""
    block = _BLOCKS.get(weights[0].data_ptr())
    if block is None or block.dtype != weights[0].dtype or block.device != weights[0].device:
        return None
    address = block.data_ptr()
    for weight in weights:
        if weight.data_ptr() != address:
            return None
        address += weight.nbytes
    return block if address == block.data_ptr() + block.nbytes else None
