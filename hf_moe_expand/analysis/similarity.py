"""Measures the similarity of languages in each layer, at the FFN's input (LayerMoE Eq. 8)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ..data.packing import begin_token
from ..errors import InputError
from ..modeling import decoder_ffns, stack_sizes
from ..models import longest_block, model_name
from ..results import SimilarityResult
from ..settings import AnalysisSettings
from .encoder_decoder import SideBatch, side_batches


class MeanDirections:
    """Running sums of unit vectors: `[layers, h]` float64, and the number of vectors.

    The mean of all `Q x Q` cosines of two languages is the dot product of their mean unit vectors, so this is exact
    and needs memory for one vector a layer.
    """

    def __init__(self, num_layers: int, hidden_size: int) -> None:
        self.sums = torch.zeros(num_layers, hidden_size, dtype=torch.float64)
        self.counts = [0] * num_layers

    def add(self, layer: int, states_Th: torch.Tensor) -> None:
        states_Th = states_Th.double()
        lengths_T1 = states_Th.norm(dim=-1, keepdim=True)
        # A zero vector has no direction; its cosine with any vector counts as 0.
        units_Th = torch.where(lengths_T1 > 0, states_Th / lengths_T1, torch.zeros_like(states_Th))
        self.sums[layer] += units_Th.sum(0).cpu()
        self.counts[layer] += len(states_Th)

    def means(self) -> torch.Tensor:
        return self.sums / torch.tensor(self.counts, dtype=torch.float64).unsqueeze(-1)


@contextmanager
def ffn_inputs(model: nn.Module, receive: Any) -> Iterator[None]:
    """Inside, every FFN, expanded or dense, passes its input to `receive(layer, hidden_states)`."""

    def hook(layer: int) -> Any:
        return lambda module, args: receive(layer, args[0])

    handles = [
        model.get_submodule(ffn.place).register_forward_pre_hook(hook(i)) for i, ffn in enumerate(decoder_ffns(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def token_blocks(language: str, texts: Iterable[str], tokenizer: Any, tokens: int, block_size: int) -> list[list[int]]:
    """Exactly the first `tokens` tokens of the texts, each text cut into blocks.

    Raises:
        InputError: the texts have fewer than `tokens` tokens.
    """
    return [block for blocks in document_blocks(language, texts, tokenizer, tokens, block_size) for block in blocks]


def document_blocks(
    language: str, texts: Iterable[str], tokenizer: Any, tokens: int, block_size: int
) -> list[list[list[int]]]:
    """The blocks of `token_blocks`, document by document; documents without tokens are left out.

    Where the tokenizer begins texts with a begin-of-text token, so does every block, in place of its first token.

    Raises:
        InputError: the texts have fewer than `tokens` tokens.
    """
    documents: list[list[list[int]]] = []
    begin, left = begin_token(tokenizer), tokens
    first = [] if begin is None else [begin]
    for text in texts:
        ids = tokenizer(text, verbose=False).input_ids[:left]
        left -= len(ids)
        if ids:
            documents.append(
                [[*first, *ids[start : start + block_size][len(first) :]] for start in range(0, len(ids), block_size)]
            )
        if left == 0:
            return documents
    raise InputError(
        f"Language {language!r} has {tokens - left:,} tokens, but {tokens:,} were asked for: give more text or a "
        "smaller --tokens (`analysis: {tokens: ...}` in a recipe)."
    )


def padded_batches(blocks: Sequence[list[int]], batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of blocks, padded, with attention masks."""
    for start in range(0, len(blocks), batch_size):
        yield _padded(blocks[start : start + batch_size])


def _padded(blocks: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, blocks))
    mask = torch.tensor([[1] * len(block) + [0] * (longest - len(block)) for block in blocks])
    ids = torch.tensor([block + [0] * (longest - len(block)) for block in blocks])
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def measure_similarity(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Iterable[Any]],
    old: Sequence[str],
    new: Sequence[str],
    tokens: int = 100_000,
    block_size: int = 1024,
    batch_size: int = 8,
) -> SimilarityResult:
    """Measures the mean cosine of hidden states between languages, in every layer, at the FFN's input (LayerMoE
    Eq. 8-9).

    Takes one forward pass over `tokens` tokens of each language, padding excluded; the model may be dense or expanded.
    An encoder-decoder's encoder is measured on the language's sentences as sources, its decoder on them as targets.

    Args:
        texts: documents of each language of `old` and `new`; for an encoder-decoder, sentence pairs to and from it.
        tokens: tokens of each language (Q in the paper); for an encoder-decoder, of each side.

    Raises:
        InputError: a language has fewer tokens than `tokens`, or a number is out of range.
    """
    AnalysisSettings(tokens=tokens, block_size=block_size, batch_size=batch_size)  # refuses numbers out of range
    model.eval()
    base = getattr(model, "base_model", model)
    encoder_layers = stack_sizes(model.config).get("encoder", 0)
    if encoder_layers:
        return _of_encoder_decoder(model, tokenizer, texts, old, new, tokens, batch_size, encoder_layers)
    num_layers, hidden_size = len(decoder_ffns(model)), model.config.get_text_config(decoder=True).hidden_size
    block_size = min(block_size, longest_block(model.config) or block_size)
    # Counts all text before the first pass, so that a lack of text is reported at once.
    blocks = {code: token_blocks(code, texts[code], tokenizer, tokens, block_size) for code in (*old, *new)}
    means = {}
    bar = tqdm(total=tokens * len(blocks), unit="token", unit_scale=True)
    for language in blocks:
        bar.set_description(f"similarity in {model_name(model)}: {language}")
        directions = MeanDirections(num_layers, hidden_size)
        mask: Any = None

        def receive(layer: int, states: torch.Tensor, directions: MeanDirections = directions) -> None:
            directions.add(layer, states.flatten(0, -2)[mask.flatten()])  # noqa: B023 the current batch's mask, by intent

        with ffn_inputs(model, receive):
            for batch in padded_batches(blocks[language], batch_size):
                batch = {name: value.to(model.device) for name, value in batch.items()}
                mask = batch["attention_mask"].bool()
                base(**batch, use_cache=False)
                bar.update(int(mask.sum()))
        means[language] = directions.means()
    bar.close()
    return _result(means, old, new, tokens)


def _of_encoder_decoder(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Iterable[Any]],
    old: Sequence[str],
    new: Sequence[str],
    tokens: int,
    batch_size: int,
    encoder_layers: int,
) -> SimilarityResult:
    """The similarities in an encoder-decoder."""
    codes = (*old, *new)
    batches = {code: side_batches(code, texts[code], tokenizer, tokens, batch_size, model) for code in codes}
    means = {}
    bar = tqdm(total=2 * tokens * len(batches), unit="token", unit_scale=True)
    for language, of_language in batches.items():
        bar.set_description(f"similarity in {model_name(model)}: {language}")
        directions = MeanDirections(len(decoder_ffns(model)), model.config.hidden_size)
        for batch in of_language:

            def receive(
                layer: int, states: torch.Tensor, batch: SideBatch = batch, directions: MeanDirections = directions
            ) -> None:
                directions.add(layer, states.flatten(0, -2)[batch.mask(layer, encoder_layers)])

            with ffn_inputs(model, receive):
                model(**{name: value.to(model.device) for name, value in batch.inputs.items()}, use_cache=False)
            bar.update(int(batch.encoder.sum() + batch.decoder.sum()))
        means[language] = directions.means()
    bar.close()
    return _result(means, old, new, tokens, encoder_layers)


def _result(
    means: Mapping[str, torch.Tensor], old: Sequence[str], new: Sequence[str], tokens: int, encoder_layers: int = 0
) -> SimilarityResult:
    """The similarities of the languages' mean unit vectors `[layers, h]`."""
    names = [*combinations(new, 2), *((a, b) for a in new for b in old)]
    pairs = {f"{a}-{b}": (means[a] * means[b]).sum(-1).tolist() for a, b in names}
    return SimilarityResult.from_pairs(pairs, old, new, tokens, encoder_layers)
