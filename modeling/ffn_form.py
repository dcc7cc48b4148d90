"""The forward pass of an FFN: linear layers with row-wise operations between them.

Experts of one layer are equal but for their weights. If their forward pass consists of linear layers and operations on
single elements (`down(act(gate(x)) * up(x))`, `fc2(act(fc1(x)))`), it can run on the sorted tokens of all experts at
once: each linear layer becomes a grouped product, and all else runs once. `ffn_trace.py` reads the pass from the FFN's
own code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

# Attributes whose values a traced forward pass holds as they were.
_SETTINGS = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType, MethodType)
_OF_ALL_MODULES = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Linears:
    """Linear layers of an FFN that read the same input: `gate` and `up`, or `down`.

    Attributes:
        names: their names in the FFN.
        kind: their class, `nn.Linear` or `Conv1D`.
        has_bias: of each, whether it has a bias.
        inputs: size of the input.
        outputs: sizes of the outputs.
    """

    names: tuple[str, ...]
    kind: type
    has_bias: tuple[bool, ...]
    inputs: int
    outputs: tuple[int, ...]

    @property
    def is_transposed(self) -> bool:
        """Whether the weights are `[in, out]`."""
        return self.kind is Conv1D

    def shape(self, place: int) -> tuple[int, int]:
        """The shape of a layer's weight."""
        output = self.outputs[place]
        return (self.inputs, output) if self.is_transposed else (output, self.inputs)


@dataclass(frozen=True)
class Step:
    """One step of the forward pass; values are numbered, 0 is the FFN's input.

    Attributes:
        call: `Linears`; the name of a module of the FFN or, with `is_method`, of a tensor's method; or a function.
        args, kwargs: arguments, in which a `Value` stands for a value.
        results: numbers of the values that the step makes.
        last: numbers of the values that no later step reads.
    """

    call: Linears | str | Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    is_method: bool = False
    last: tuple[int, ...] = ()


@dataclass(frozen=True)
class Value:
    """A value in the arguments of a step."""

    number: int


@dataclass(frozen=True)
class Part:
    """The FFN, or a row-wise module of it, as it was when the forward pass was read.

    Attributes:
        name: its name in the FFN, empty for the FFN.
        kind: its class.
        forward: the class's method, or its name where a pickled copy was loaded.
        settings: its public attributes that are numbers, names or functions.
    """

    name: str
    kind: type
    forward: Callable[..., Any] | str
    settings: dict[str, Any]

    @classmethod
    def of(cls, name: str, module: nn.Module) -> "Part":
        return cls(name, type(module), type(module).forward, _settings_of(module))

    def is_still(self, module: nn.Module) -> bool:
        """Whether a module is of the same class, with the same settings."""
        if type(module) is not self.kind or (isinstance(module, nn.Dropout) and module.p and module.training):
            return False
        if torch.compiler.is_compiling():  # reads attributes one by one, to notice if they change
            return all(_function_of(getattr(module, name, None)) == value for name, value in self.settings.items())
        return self.forward in (self.kind.forward, _name_of(self.kind.forward)) and self.settings == _settings_of(
            module
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "forward": self.forward if isinstance(self.forward, str) else _name_of(self.forward)}


def _settings_of(module: nn.Module) -> dict[str, Any]:
    return {
        name: _function_of(value) for name, value in vars(module).items()
        if isinstance(value, _SETTINGS) and name not in _OF_ALL_MODULES and not name.startswith("_")
    }  # fmt: skip


def _name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _function_of(value: Any) -> Any:
    """Of a bound method, its function, which copies of a module share."""
    return value.__func__ if isinstance(value, MethodType) else value


@dataclass(frozen=True)
class FFNForm:
    """The forward pass of an FFN.

    Attributes:
        steps: its steps, in order.
        output: the number of the value that it returns.
        linears: the steps that are linear layers.
        parts: the FFN and its row-wise modules.
        mode: whether the FFN was training, None if its form is the same in training and in evaluation.
    """

    steps: tuple[Step, ...]
    output: int
    linears: tuple[Linears, ...]
    parts: tuple[Part, ...]
    mode: bool | None = field(compare=False)

    def run(
        self, ffn: nn.Module, x: torch.Tensor, product: Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]]
    ) -> torch.Tensor:
        """The FFN's output; `product(input, n)` computes the layers of `linears[n]`, all else runs in `ffn`."""
        values: dict[int, Any] = {0: x}
        number = 0
        for step in self.steps:
            args = tuple(values[a.number] if isinstance(a, Value) else a for a in step.args)
            if isinstance(step.call, Linears):
                for result, value in zip(step.results, product(args[0], number), strict=True):
                    values[result] = value
                number += 1
            elif isinstance(step.call, str):
                owner: Any = args[0] if step.is_method else ffn
                rest = args[1:] if step.is_method else args
                call = getattr(owner, step.call) if step.is_method else owner.get_submodule(step.call)
                values[step.results[0]] = call(*rest, **step.kwargs)
            else:
                values[step.results[0]] = step.call(*args, **step.kwargs)
            del args
            for unread in step.last:
                del values[unread]
        return values[self.output]
