"""Source-shielded updates (Yamaguchi et al., arXiv 2512.04844): of each linear layer, the columns that matter most to
text of the base stay frozen.

A column of a weight `[out, in]` is all that the layer does with one of its inputs. Embeddings, the head, norms and
biases train.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from .freezing import evaluating


def shielded_layers(model: Any) -> dict[str, nn.Linear]:
    """The linear layers of a model by name, without its head."""
    head = model.get_output_embeddings()
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head}


def shielded_parameters(model: Any, share: float) -> int:
    """The number of weights in the frozen columns."""
    return sum(int(share * layer.in_features) * layer.out_features for layer in shielded_layers(model).values())


@torch.no_grad()
def column_importance(model: Any, batches: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The importance of each layer's columns to a text: the norm of a column, times that of its input over all tokens.

    Args:
        batches: ids of the text, each `[batch, block]`.

    Returns:
        `[in]` in float32 for each of `shielded_layers`.
    """
    layers = shielded_layers(model)
    squares: dict[str, torch.Tensor] = {}

    def add(name: str, layer: nn.Module, inputs: tuple) -> None:
        sums = inputs[0].detach().float().square().flatten(0, -2).sum(0)
        squares[name] = squares[name] + sums if name in squares else sums

    with ExitStack() as hooks, evaluating(model):
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(add, name)))
        for ids in batches:
            model(input_ids=ids.to(model.device), use_cache=False)
    return {name: layers[name].weight.float().norm(dim=0) * sums.sqrt() for name, sums in squares.items()}


def important_columns(importance: Mapping[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """The numbers of each layer's most important columns, rounded down to whole columns; sorted."""
    return {name: values.topk(int(share * len(values))).indices.sort().values for name, values in importance.items()}


@contextmanager
def shielded(model: Any, columns: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Gives the columns no gradient, and proves at the end that they did not move.

    A weight without a gradient still moves if it decays, or if an optimizer mixes the columns of a matrix."""
    layers = shielded_layers(model)
    before = {name: _digest(layers[name], frozen) for name, frozen in columns.items()}
    with ExitStack() as hooks:
        for name, frozen in columns.items():
            weight = layers[name].weight
            hooks.enter_context(weight.register_hook(lambda of, frozen=frozen: of.index_fill(1, frozen, 0.0)))
        yield
    moved = [name for name, frozen in columns.items() if _digest(layers[name], frozen) != before[name]]
    if moved:
        raise RuntimeError(
            f"{len(moved)} of {len(columns)} layers moved columns that have no gradient, such as {moved[0]}: the "
            "optimizer mixes columns. Take one of AdamW's."
        )


def _digest(layer: nn.Linear, columns: torch.Tensor) -> str:
    weights = layer.weight.detach()[:, columns].contiguous().cpu()
    return hashlib.sha256(weights.view(torch.uint8).numpy().tobytes()).hexdigest()
