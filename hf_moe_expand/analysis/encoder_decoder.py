"""Batches of sentence pairs for analyses of an encoder-decoder: a language's sentences as source and as target.

The encoder's layers are measured on a language's source tokens, the decoder's layers on its target tokens.

Shape suffixes: B pairs of a batch, S tokens of a source, T tokens of a target.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..data.pair_encoder import PairEncoder, SentencePair
from ..data.pairs import IGNORED
from ..data.sources import names_language
from ..errors import InputError
from ..evaluation.perplexity import pair_batch
from ..models import longest_block

_AT_ONCE = 256  # pairs tokenised at once


@dataclass(frozen=True)
class SideBatch:
    """A batch of sentence pairs, and the tokens of it that are measured.

    Attributes:
        inputs: the model's inputs, `decoder_input_ids` included, without labels.
        labels: `[B, T]`, the target's tokens; -100 is padding.
        encoder, decoder: `[B, S]` and `[B, T]` bool, the measured tokens.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    encoder: torch.Tensor
    decoder: torch.Tensor

    def mask(self, layer: int, encoder_layers: int) -> torch.Tensor:
        """`[tokens]` bool: the measured tokens of a layer's stack."""
        return (self.encoder if layer < encoder_layers else self.decoder).flatten()


def side_batches(
    language: str, pairs: Iterable[SentencePair], tokenizer: Any, tokens: int, batch_size: int, model: Any
) -> list[SideBatch]:
    """Batches with exactly `tokens` tokens of the language on each side: sentences from it, and translations into it.

    Raises:
        InputError: a side has fewer tokens, the model reads the language and does not write it or the other way round,
            or the tokenizer has no code for a language.
    """
    batches: list[SideBatch] = []
    of_side: list[list[SentencePair]] = [[], []]
    encoder, all_pairs = PairEncoder(tokenizer), list(pairs)
    translatable = [pair for pair in all_pairs if encoder.translates(pair.direction)]
    for pair in translatable:
        for side, code in enumerate(pair.direction):
            if names_language(code, language):
                of_side[side].append(pair)
    for side, rows in enumerate(of_side):
        if not rows and len(translatable) < len(all_pairs):
            raise InputError(
                f"Language {language!r} has no sentence as a {('source', 'target')[side]}, and both sides are "
                f"measured: {encoder.one_way()}. `plan moe-lpr` needs no analysis."
            )
        batches += _batches_of_side(language, rows, side, tokenizer, tokens, batch_size, model)
    return batches


def _batches_of_side(
    language: str, rows: Sequence[SentencePair], side: int, tokenizer: Any, tokens: int, batch_size: int, model: Any
) -> Iterator[SideBatch]:
    encoder, longest = PairEncoder(tokenizer), longest_block(model.config)
    inputs: list[list[int]] = []
    labels: list[list[int]] = []
    left = tokens
    for first in range(0, len(rows), _AT_ONCE):
        for source, target in zip(*encoder.encode(rows[first : first + _AT_ONCE]), strict=True):
            if left and (longest is None or max(len(source), len(target)) <= longest):
                inputs.append(source)
                labels.append(target)
                left -= min(left, len((source, target)[side]))
    if left:
        raise InputError(
            f"Language {language!r} has {tokens - left:,} tokens {'as a target' if side else 'as a source'}, but "
            f"{tokens:,} were asked for: give more sentence pairs or a smaller --tokens (`analysis: {{tokens: ...}}` "
            "in a recipe)."
        )
    left = tokens
    for first in range(0, len(inputs), batch_size):
        last = first + batch_size
        batch = pair_batch(model, inputs[first:last], labels[first:last])
        labels_BT = batch.pop("labels")
        counted = [batch["attention_mask"].bool(), labels_BT.ne(IGNORED)]
        counted[1 - side] = torch.zeros_like(counted[1 - side])
        # The last tokens beyond the wanted number are not measured.
        counted[side] &= (counted[side].flatten().cumsum(0) <= left).view(counted[side].shape)
        left -= int(counted[side].sum())
        yield SideBatch(batch, labels_BT, *counted)
