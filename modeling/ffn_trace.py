"""Reads the forward pass of an FFN by symbolic tracing, which computes nothing and needs no names of classes."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from transformers import activations
from transformers.pytorch_utils import Conv1D

from .ffn_form import FFNForm, Linears, Part, Step, Value

# Functions and methods of tensors that treat each element, or each row, by itself.
_FUNCTIONS = {
    *(operator.mul, operator.add, operator.sub, operator.truediv, operator.pow, operator.neg, operator.getitem),
    *(torch.mul, torch.add, torch.square, torch.pow, torch.relu, torch.tanh, torch.sigmoid, torch.erf, torch.chunk),
    *(F.relu, F.relu6, F.gelu, F.silu, F.mish, F.leaky_relu, F.elu, F.tanh, F.sigmoid, F.softplus),
}
_METHODS = {"mul", "add", "sub", "div", "square", "pow", "relu", "tanh", "sigmoid", "chunk"}
_ACTIVATIONS = ("torch.nn.modules.activation", activations.__name__)


def forms_of(ffn: nn.Module) -> tuple[FFNForm | None, FFNForm | None]:
    """The form in evaluation and in training, one object if both are the same."""
    mode = ffn.training
    evaluation, training = form_of(ffn.eval()), form_of(ffn.train())
    ffn.train(mode)
    if evaluation is None or training != evaluation:
        return evaluation, training
    same = replace(evaluation, mode=None)
    return same, same


def form_of(ffn: nn.Module) -> FFNForm | None:
    """The form of an FFN in its present mode (training or evaluation); None if its forward pass is of another kind.

    Dropout that is active, parameters outside linear layers, branches on values and arguments beside the hidden states
    make it another kind.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    try:
        result = type(ffn).forward(_shell(ffn, "", tracer), fx.Proxy(graph.placeholder("x"), tracer))
        graph.output(tracer.create_arg(result))
    except Exception:  # code that cannot be traced fails in many ways
        return None
    steps, output = _read(ffn, list(graph.nodes))
    if output is None:
        return None
    steps = _joined(steps)
    linears = tuple(step.call for step in steps if isinstance(step.call, Linears))
    known = {
        f"{name}.{kind}" for call in linears for name, bias in zip(call.names, call.has_bias, strict=True)
        for kind in ("weight", *(["bias"] if bias else []))
    }  # fmt: skip
    if not linears or known != {name for name, _ in ffn.named_parameters()} or any(True for _ in ffn.buffers()):
        return None
    names = ["", *dict.fromkeys(step.call for step in steps if isinstance(step.call, str) and not step.is_method)]
    parts = tuple(Part.of(name, ffn.get_submodule(name)) for name in names)
    return FFNForm(_with_last_uses(steps, output), output, linears, parts, ffn.training)


def _shell(module: nn.Module, name: str, tracer: fx.proxy.TracerBase) -> nn.Module:
    """A stand-in for an FFN or, with a name, for a module of it, a call of which becomes a node of the graph.

    `fx.Tracer` replaces `nn.Module.__call__` for the whole process, and so breaks what runs in other threads.
    """
    shell = object.__new__(type(module))
    prefix = f"{name}." if name else ""
    children = {
        key: None if child is None else _shell(child, prefix + key, tracer) for key, child in module._modules.items()
    }
    vars(shell).update(vars(module), _modules=children)
    if name:  # a call of a module runs this in place of hooks and `forward`
        vars(shell)["_compiled_call_impl"] = lambda *args, **kwargs: tracer.create_proxy(
            "call_module", name, args, kwargs
        )
    return shell


def _read(ffn: nn.Module, nodes: list[fx.Node]) -> tuple[list[Step], int | None]:
    """The steps of a traced graph, and the number of its result; None for a graph of another kind."""
    numbers: dict[fx.Node, int] = {}
    steps: list[Step] = []
    for number, node in enumerate(nodes):
        if node.op == "placeholder" and number == 0:
            numbers[node] = 0
            continue
        if node.op == "output":
            result = node.args[0]
            return steps, numbers[result] if isinstance(result, fx.Node) else None
        args = tuple(Value(numbers[a]) if isinstance(a, fx.Node) else a for a in node.args)
        nested = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, tuple | list | dict | slice)]
        if nested or any(isinstance(value, fx.Node) for value in node.kwargs.values()):
            break
        call = _call_of(ffn, node, len(args))
        if call is None:
            break
        numbers[node] = number
        steps.append(Step(call, args, dict(node.kwargs), (number,), node.op == "call_method"))
    return steps, None


def _call_of(ffn: nn.Module, node: fx.Node, arguments: int) -> Linears | str | Callable[..., Any] | None:
    target: Any = node.target
    known: Any
    if node.op == "call_module":
        module = ffn.get_submodule(target)
        if arguments != 1 or node.kwargs:
            return None
        if type(module) in (nn.Linear, Conv1D):
            return _linear(target, module)
        return target if _is_row_wise(module) else None
    if node.op == "call_method":
        known = target in _METHODS
    elif target is F.dropout:
        rate = node.kwargs.get("p", node.args[1] if arguments > 1 else 0.5)
        known = rate == 0 or not node.kwargs.get("training", node.args[2] if arguments > 2 else True)
    else:
        known = node.op == "call_function" and target in _FUNCTIONS
    if known and target in (torch.chunk, "chunk"):
        known = node.kwargs.get("dim", node.args[2] if arguments > 2 else 0) == -1
    if known and target is operator.getitem:
        known = isinstance(node.args[0], fx.Node) and node.args[0].target in (torch.chunk, "chunk")
    return target if known else None


def _linear(name: str, module: Any) -> Linears:
    if isinstance(module, Conv1D):
        return Linears((name,), Conv1D, (True,), module.nx, (module.nf,))
    return Linears((name,), nn.Linear, (module.bias is not None,), module.in_features, (module.out_features,))


def _is_row_wise(module: nn.Module) -> bool:
    """Whether a module without weights treats each element by itself."""
    if getattr(module, "inplace", False):
        return False
    if isinstance(module, nn.Dropout):
        return module.p == 0 or not module.training
    of_library = type(module).__module__ in _ACTIVATIONS and not isinstance(
        module, nn.Softmax | nn.Softmin | nn.LogSoftmax | nn.Softmax2d | nn.GLU | nn.MultiheadAttention | nn.RReLU
    )
    return (of_library or type(module) is nn.Identity) and not any(True for _ in module.parameters())


def _joined(steps: list[Step]) -> list[Step]:
    """Joins linear layers of the same input into one step, at the place of the first."""
    found: list[Step] = []
    for step in steps:
        for place, other in enumerate(found):
            first, second = other.call, step.call
            if (
                isinstance(first, Linears) and isinstance(second, Linears)
                and other.args == step.args and first.kind is second.kind
            ):  # fmt: skip
                both = Linears(
                    first.names + second.names, first.kind, first.has_bias + second.has_bias, first.inputs,
                    first.outputs + second.outputs,
                )  # fmt: skip
                found[place] = Step(both, other.args, {}, other.results + step.results)
                break
        else:
            found.append(step)
    return found


def _with_last_uses(steps: list[Step], output: int) -> tuple[Step, ...]:
    found, seen = [], {output}
    for step in reversed(steps):
        read = {a.number for a in step.args if isinstance(a, Value)}
        unread = set(step.results) - seen
        last = tuple(sorted((read | unread) - seen))
        seen |= read
        found.append(Step(step.call, step.args, step.kwargs, step.results, step.is_method, last))
    return tuple(reversed(found))
