"""Measures the similarity of languages in each layer, at the FFN's input (LayerMoE Eq. 8)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..checkpoint.facts import Facts
from ..core.schema import checked
from ..inference.models import model_name
from ..modeling import count_layers
from ..planning.results import SimilarityResult
from .reading import language_batches, read_inputs, token_bar
from .settings import AnalysisSettings


def _add_directions(sums_Lh: torch.Tensor, layer: int, states_Th: torch.Tensor) -> None:
    # A zero vector, which has no direction, stays zero: its cosine with any vector counts as 0.
    sums_Lh[layer] += F.normalize(states_Th.double(), dim=-1).sum(0).cpu()


@torch.no_grad()
@checked
def measure_similarity(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, Iterable[Any]],
    old: Sequence[str],
    new: Sequence[str],
    tokens: int = 100_000,
    block_size: int = 1024,
    batch_size: int = 8,
) -> SimilarityResult:
    """Measures the mean cosine of languages' hidden states at the FFN's input of every layer (LayerMoE Eq. 8-9), of a
    dense or an expanded model.

    Args:
        texts: documents of each language of `old` and `new`; for an encoder-decoder, sentence pairs to and from it,
            whose sources its encoder reads and whose targets its decoder.
        tokens: tokens of each language (Q in the paper); for an encoder-decoder, of each side.

    Raises:
        InputError: a language has fewer tokens than `tokens`.
    """
    AnalysisSettings(tokens=tokens, block_size=block_size, batch_size=batch_size)  # refuses numbers out of range
    model.eval()
    config: Any = model.config
    texts = {code: texts[code] for code in (*old, *new)}
    batches = language_batches(model, tokenizer, texts, tokens, block_size, batch_size)
    layers, size = count_layers(config), config.get_text_config(decoder=True).hidden_size
    # The mean of all `Q x Q` cosines of two languages is the dot product of their mean unit vectors.
    means_Lh = {code: torch.zeros(layers, size, dtype=torch.float64) for code in batches}
    with token_bar("similarity", batches) as bar:
        for language, of_language in batches.items():
            bar.set_description(f"similarity in {model_name(model)}: {language}")
            read_inputs(model, of_language, partial(_add_directions, means_Lh[language]), bar)
            means_Lh[language] /= tokens
    names = combinations_with_replacement([*new, *old], 2)
    pairs = {f"{a}-{b}": (means_Lh[a] * means_Lh[b]).sum(-1).tolist() for a, b in names}
    return SimilarityResult.from_pairs(pairs, old, new, tokens, Facts(config).encoder_layers)
