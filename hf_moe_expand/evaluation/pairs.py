"""Scores an encoder-decoder's translations of given sentences: the likelihood of the reference."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from ..data.pairs import IGNORED, PairEncoder, SentencePair, padded
from ..data.sources import Pair
from ..errors import InputError, errors_at
from ..models import longest_block
from ..settings import EvaluationSettings
from ..trainers.encoder_decoder import target_loss, with_decoder_inputs
from .perplexity import LanguageScore

_AT_ONCE = 512  # pairs tokenised at once


@dataclass(frozen=True)
class PairStream:
    """Sentence pairs to score.

    Attributes:
        inputs: the encoder's tokens of each sentence.
        labels: tokens of each translation.
        codes: place of the token that names the target's language, which is given and not scored; None without one.
        tokens, size: scored tokens, and UTF-8 bytes of the translations.
    """

    inputs: list[list[int]]
    labels: list[list[int]]
    codes: list[int | None]
    tokens: int
    size: int


def pair_stream(
    language: str,
    pairs: Iterable[SentencePair],
    tokenizer: Any,
    max_tokens: int | None,
    longest: int | None = None,
) -> PairStream:
    """The first pairs to and from a language, in directions that the model translates, whose translations have at most
    `max_tokens` tokens; at least one.

    Args:
        longest: number of positions that the model takes; longer pairs are left out.

    Raises:
        InputError: no pair is short enough, or the tokenizer has no code for a language.
    """
    encoder = PairEncoder(tokenizer)
    places: dict[Pair, int | None] = {}
    rows = [pair for pair in pairs if encoder.translates(pair.direction)]
    inputs: list[list[int]] = []
    labels: list[list[int]] = []
    codes: list[int | None] = []
    tokens = size = 0
    for first in range(0, len(rows), _AT_ONCE):
        some = rows[first : first + _AT_ONCE]
        for row, source, target in zip(some, *encoder.encode(some), strict=True):
            if longest is not None and max(len(source), len(target)) > longest:
                continue
            if row.direction not in places:
                places[row.direction] = encoder.place_of_code(row.direction)
            code = places[row.direction]
            count = len(target) - (code is not None)
            if max_tokens is not None and inputs and tokens + count > max_tokens:
                return PairStream(inputs, labels, codes, tokens, size)
            inputs.append(source)
            labels.append(target)
            codes.append(code)
            tokens, size = tokens + count, size + len(row.target.encode())
    if not tokens:
        raise InputError(
            f"Language {language!r}: no sentence pair to score, or none that the model translates and whose tokens its "
            "positions hold."
        )
    return PairStream(inputs, labels, codes, tokens, size)


@torch.no_grad()
def pair_nats(model: Any, stream: PairStream, batch_size: int) -> Iterator[float]:
    """The negative log-likelihood of each batch's translations, in nats. Pairs of like length share a batch."""
    order = sorted(range(len(stream.inputs)), key=lambda place: -len(stream.inputs[place]))
    for first in range(0, len(order), batch_size):
        places = order[first : first + batch_size]
        batch = {name: value.to(model.device) for name, value in pair_batch(model, stream, places).items()}
        labels = batch.pop("labels")
        for row, place in zip(labels, places, strict=True):
            if (code := stream.codes[place]) is not None:
                row[code % len(stream.labels[place])] = IGNORED
        outputs = model(**batch, use_cache=False)
        yield target_loss(outputs, labels, 1).item()


def pair_batch(model: Any, stream: PairStream, places: Sequence[int]) -> dict[str, torch.Tensor]:
    """The inputs of the model for some pairs, padded, and `labels`."""
    inputs, labels = ([side[place] for place in places] for side in (stream.inputs, stream.labels))
    batch = {
        "input_ids": padded(inputs, model.config.pad_token_id or 0),
        "attention_mask": padded([[1] * len(row) for row in inputs], 0),
        "labels": padded(labels, IGNORED),
    }
    return with_decoder_inputs(model, batch)


def evaluate_pairs(
    model: Any,
    tokenizer: Any,
    pairs: Mapping[str, Iterable[SentencePair]],
    batch_size: int = 8,
    max_tokens: int | None = None,
) -> dict[str, LanguageScore]:
    """Scores the translations to and from each language.

    Raises:
        InputError: a language has no pair to score, its score is not finite, or a number is out of range.
    """
    EvaluationSettings(batch_size=batch_size, max_tokens=max_tokens)  # refuses numbers out of range
    model.eval()
    scores = {}
    for language in tqdm(list(pairs), desc="evaluate", unit="language"):
        stream = pair_stream(language, pairs[language], tokenizer, max_tokens, longest_block(model.config))
        with errors_at(f"language {language!r}"):
            scores[language] = LanguageScore.from_nats(
                sum(pair_nats(model, stream, batch_size)), stream.tokens, stream.size
            )
    return scores
