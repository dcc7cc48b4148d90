"""The start of an added expert: its rows are neurons of the block beside it, drawn by chance.

A gated FFN's neuron is a row of `gate` and one of `up`. Those that the base has learned fire on text, so that the
gradient of `down`, which starts at zero, is larger than with random rows (docs/added_experts.md). The experts of a
mixture have their neurons in one tensor, `gate_up_proj`; of other blocks the rows stay random.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..modeling.grouped_experts import plain_form
from .new_weights import place_generator
from .stored import StoredModel

_FUSED = "gate_up_proj"
ROWS = (".gate_proj.weight", ".up_proj.weight")
# Rows of a tensor of the block, by the tensor's name in the block: `[W, h]`.
Take = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Neurons:
    """A block's neurons.

    Attributes:
        names: the tensors of `gate` and `up` in the block; one tensor may hold both.
        count: neurons in the block, of all its experts.
        width: neurons of one expert.
        columns: whether they are columns of the tensors.
        interleaved: whether `gate` and `up` take turns.
    """

    names: tuple[str, str]
    count: int
    width: int
    columns: bool = False
    interleaved: bool = False

    def rows(self, part: int, chosen: torch.Tensor) -> torch.Tensor:
        """The rows of `gate` (0) or `up` (1) of chosen neurons, in the tensor as a list of rows."""
        if self.names[0] != self.names[1]:
            return chosen
        expert, neuron = chosen // self.width, chosen % self.width
        inside = 2 * neuron + part if self.interleaved else neuron + part * self.width
        return expert * 2 * self.width + inside


def neurons_of(block: nn.Module, hidden_size: int) -> Neurons | None:
    """The neurons of a layer's block, an FFN or a mixture; None if they are not known to be gate and up."""
    for name, module in block.named_modules():
        fused = getattr(module, _FUSED, None)
        if isinstance(fused, nn.Parameter) and fused.dim() == 3:
            key = f"{name}.{_FUSED}".removeprefix(".")
            experts, before, behind = fused.shape
            columns = bool(getattr(module, "is_transposed", behind != hidden_size))
            inner = (behind if columns else before) // 2
            interleaved = not getattr(module, "is_concatenated", True)
            return Neurons((key, key), experts * inner, inner, columns, interleaved)
    form = plain_form(block)
    if form is None or not form.gated or form.kind is not nn.Linear:
        return None
    first, last = f"{form.first[0]}.weight", f"{form.first[-1]}.weight"
    width = block.get_parameter(first).shape[0] // (2 if first == last else 1)
    return Neurons((first, last), width, width)


def added_rows(neurons: Neurons, inner: str, width: int, place: tuple[int, ...], take: Take) -> torch.Tensor:
    """The rows of an added expert's `gate` or `up`, `[width, h]`.

    Args:
        inner: name of the tensor inside the layer's FFN block.
        place: seed and layer, which decide with the expert's number which neurons these are.
        take: gives rows of the block's tensors.
    """
    expert, part = int(inner.split(".")[1]), ROWS.index(next(end for end in ROWS if inner.endswith(end)))
    order = torch.randperm(neurons.count, generator=place_generator(*place, expert))
    chosen = order.repeat(-(-width // neurons.count))[:width]
    return take(neurons.names[part], neurons.rows(part, chosen))


def rows_in_memory(block: nn.Module, neurons: Neurons) -> Take:
    """Takes rows of a loaded block."""

    def take(name: str, rows: torch.Tensor) -> torch.Tensor:
        tensor = block.get_parameter(name).detach()
        tensor = tensor.transpose(-1, -2) if neurons.columns else tensor
        return tensor.reshape(-1, tensor.shape[-1])[rows.to(tensor.device)]

    return take


def rows_of_files(stored: StoredModel, prefix: str, neurons: Neurons) -> Take:
    """Takes rows of a block in a checkpoint, without reading the rest of its tensors.

    Args:
        prefix: prefix of the block's tensors in the model.
    """
    reader = stored.reader

    def take(name: str, rows: torch.Tensor) -> torch.Tensor:
        key = stored.home(f"{prefix}.{name}")
        if parts := list(reader.parts.get(key, {}).values()):  # all experts' gates, then all experts' ups
            each, width = 2 * neurons.width, neurons.width
            which = (rows % each) // width * (len(parts) // 2) + rows // each
            picked = [
                reader.rows(parts[i], [row]) for i, row in zip(which.tolist(), (rows % width).tolist(), strict=True)
            ]
            return torch.cat(picked)
        if not neurons.columns:
            return reader.rows(key, rows.tolist())
        # Columns of one expert after the other.
        _, hidden, each = reader.info(key).shape
        taken: dict[int, torch.Tensor] = {}
        for expert in sorted(set((rows // each).tolist())):
            pieces = reader.pieces(key, expert * hidden * each, (expert + 1) * hidden * each)
            matrix = torch.cat(list(pieces)).view(hidden, each)
            mine = (rows // each == expert).nonzero().flatten()
            taken |= dict(zip(mine.tolist(), matrix[:, rows[mine] % each].T.clone(), strict=True))
        return torch.stack([taken[number] for number in range(len(rows))])

    return take


def file_rows(
    stored: StoredModel, block: nn.Module, prefix: str, inner: str, width: int, place: tuple[int, ...]
) -> Any:
    """A function that gives the rows of an added expert's tensor; None if they stay random."""
    neurons = neurons_of(block, stored.config.hidden_size) if inner.endswith(ROWS) else None
    if neurons is None:
        return None
    return lambda: added_rows(neurons, inner, width, place, rows_of_files(stored, prefix, neurons))
