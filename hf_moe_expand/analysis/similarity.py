"""Measures the similarity of languages in each layer, at the FFN's input (LayerMoE Eq. 8)."""

from collections.abc import Iterable, Mapping, Sequence
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


class MeanDirections:
    """Running sums of unit vectors, `[layers, h]` float64. The mean of all `Q x Q` cosines of two languages is the dot
    product of their mean unit vectors, so this is exact."""

    def __init__(self, num_layers: int, hidden_size: int) -> None:
        self.sums = torch.zeros(num_layers, hidden_size, dtype=torch.float64)
        self.counts = [0] * num_layers

    def add(self, layer: int, states_Th: torch.Tensor) -> None:
        # A zero vector, which has no direction, stays zero: its cosine with any vector counts as 0.
        self.sums[layer] += F.normalize(states_Th.double(), dim=-1).sum(0).cpu()
        self.counts[layer] += len(states_Th)

    def means(self) -> torch.Tensor:
        return self.sums / torch.tensor(self.counts, dtype=torch.float64).unsqueeze(-1)


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
    means = {}
    with token_bar("similarity", batches) as bar:
        for language, of_language in batches.items():
            bar.set_description(f"similarity in {model_name(model)}: {language}")
            directions = MeanDirections(count_layers(config), config.get_text_config(decoder=True).hidden_size)
            read_inputs(model, of_language, directions.add, bar)
            means[language] = directions.means()
    names = combinations_with_replacement([*new, *old], 2)
    pairs = {f"{a}-{b}": (means[a] * means[b]).sum(-1).tolist() for a, b in names}
    return SimilarityResult.from_pairs(pairs, old, new, tokens, Facts(config).encoder_layers)
