"""Fits the prefix gates of a joined model on text, without a gradient: which pack's language, or the base's, it is.

No pack's router has seen the other packs' languages. A linear map of each layer's FFN input tells the classes apart:
with `y` the indicator of a token's class, ridge regression gives

    W = argmin  mean |W x - y|^2 + lambda |W|^2,    lambda = 0.01 * mean |x|^2 / h,

the means over classes that count alike, and languages that count alike in their class. `W x` estimates each class's
probability, and the gate's logits are `8 W x`: about +-4 nats of log-odds around one half.

Shape suffixes: T tokens, h hidden size, C classes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from tqdm.auto import tqdm

from ..models import longest_block
from ..records import History
from .similarity import ffn_inputs, padded_batches

RIDGE = 0.01
SLOPE = 8.0
_BLOCK, _BATCH = 256, 8


@torch.no_grad()
def fit_gates(model: Any, ids: Mapping[str, list[int]]) -> dict[int, torch.Tensor]:
    """The rows of a gate in each expanded layer, `[C - 1, h]` float32: the log-odds of each class against class 0.

    The text of each language is read with the experts of its class alone, as it will be once the gates decide.

    Args:
        model: joined model.
        ids: tokens of languages of the model: at least one of the base's, and one of each expansion's.
    """
    model.eval()
    classes = History.of(model.config).classes
    present = [classes[code] for code in ids]
    layers, hidden = list(model.expanded_ffns()), model.config.hidden_size
    squares = {layer: torch.zeros(hidden, hidden, dtype=torch.float64) for layer in layers}
    sums = {layer: torch.zeros(max(present) + 1, hidden, dtype=torch.float64) for layer in layers}
    block = min(_BLOCK, longest_block(model.config) or _BLOCK)
    count = len(set(present))
    for code, tokens in tqdm(ids.items(), desc="fit gates", unit="language"):
        number = classes[code]
        weight = 1 / (count * present.count(number) * len(tokens))
        mask: Any = None

        def receive(layer: int, states: torch.Tensor, number: int = number, weight: float = weight) -> None:
            if layer in squares:
                x_Th = states.flatten(0, -2)[mask.flatten()].double().cpu()  # noqa: B023 the present batch's
                squares[layer] += weight * x_Th.T @ x_Th
                sums[layer][number] += weight * x_Th.sum(0)

        blocks = [tokens[start : start + block] for start in range(0, len(tokens), block)]
        with ffn_inputs(model, receive), model.use_languages(code):
            for batch in padded_batches(blocks, _BATCH):
                given = {name: value.to(model.device) for name, value in batch.items()}
                mask = given["attention_mask"].bool()
                model(**given, use_cache=False)
    return {layer: _rows(squares[layer], sums[layer]) for layer in layers}


def _rows(square_hh: torch.Tensor, sums_Ch: torch.Tensor) -> torch.Tensor:
    ridge = RIDGE * square_hh.diagonal().mean()
    weight_Ch = torch.linalg.solve(square_hh + ridge * torch.eye(len(square_hh), dtype=torch.float64), sums_Ch.T).T
    return (SLOPE * (weight_Ch[1:] - weight_Ch[:1])).float()
