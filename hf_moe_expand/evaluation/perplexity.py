"""Perplexity and bits per byte of a model on each language: of documents, or of the translations of pairs."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..checkpoint.facts import Facts
from ..core.errors import InputError, errors_at
from ..core.languages import check_named_once
from ..core.progress import Bar
from ..core.saying import say_once
from ..core.schema import checked
from ..data.lost import MOST_LOST, LostText
from ..data.pairs import IGNORED, PairEncoder, SentencePair, padded
from ..data.tokens import bare_tokens, begin_tokens, say_special, special_tokens
from ..inference.models import longest_block, model_name
from ..modeling import decoder_ffns
from ..trainers.encoder_decoder import with_decoder_inputs
from .scoring_settings import EvaluationSettings

# The most logits of a forward pass: 1.1 GB in float32. Tokens whose logits are turned into float32 at a time.
_LOGITS = 1 << 28
_TOKENS = 256
_AT_ONCE = 512  # documents tokenised at once


@dataclass(frozen=True)
class LanguageScore:
    """Scores of a model on a language's text, with the numbers of scored tokens and bytes. Bits per byte is comparable
    between models with other tokenizers.

    Attributes:
        lost: the share of the bytes that the tokenizer loses, which the model does not have to predict.
        away: behind a gate, the tokens that it sends to new experts; None without a gate.
    """

    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    lost: float | None = None
    away: int | None = None

    @property
    def is_bound(self) -> bool:
        """Whether the model could write the text in so many bits: not if the tokenizer loses some of it."""
        return self.lost is None or self.lost <= MOST_LOST

    @classmethod
    def from_nats(
        cls, nats: float, tokens: int, size: int, lost: float | None = None, away: int | None = None
    ) -> "LanguageScore":
        """From the text's negative log-likelihood, which must be finite."""
        if not math.isfinite(nats):
            raise InputError(f"the log-likelihood of the text is {-nats}: the model computes NaN or infinite values.")
        return cls(math.exp(min(nats / tokens, 700.0)), nats / math.log(2) / size, tokens, size, lost, away)


@dataclass(frozen=True)
class ScoredText:
    """Documents as one stream of tokens.

    Attributes:
        ids: the token ids. Each document follows a separator (begin-of-text if the tokenizer adds it, else
            end-of-text), which is context and not scored.
        scored: which of them are scored: exactly the text's.
        size, lost: UTF-8 bytes of the scored text, and the share of them that the tokenizer loses.
        begin: the tokens that the tokenizer puts before a text. Every window begins with them, since models that were
            trained so are bad without them.
    """

    ids: list[int]
    scored: list[bool]
    size: int
    begin: Sequence[int] = ()
    lost: float = 0.0

    def batches(
        self, model: Any, block_size: int, batch_size: int
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """`windows`, smaller where the model takes no more positions, and fewer where the logits of so many would not
        fit `_LOGITS`."""
        block_size = min(block_size, longest_block(model.config) or block_size)
        bounded = _LOGITS // (block_size * model.get_input_embeddings().weight.shape[0])
        for inputs, targets in self.windows(block_size, min(batch_size, max(1, bounded))):
            # Padding is at the end, where causal attention keeps it from every scored token.
            yield {"input_ids": inputs}, targets

    def windows(self, block_size: int, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of inputs and targets `[batch, block_size]`; -100 where a target is not scored. Windows overlap by
        one token, so that each token is a target once."""
        windows = self._windows(block_size)
        while batch := list(islice(windows, batch_size)):
            inputs, targets = zip(*batch, strict=True)
            yield torch.tensor(inputs), torch.tensor(targets)

    @property
    def tokens(self) -> int:
        return sum(self.scored)

    def _windows(self, block_size: int) -> Iterator[tuple[list[int], list[int]]]:
        start = 0
        while start < len(self.ids) - 1:
            begun = self.ids[start : start + len(self.begin)] == [*self.begin]
            lead = [] if begun or block_size <= len(self.begin) else self.begin
            end = start + block_size - len(lead)
            window = [*lead, *self.ids[start : end + 1]]
            # The first token was a target of the window before.
            scored = [*[False] * (len(lead) + 1), *self.scored[start + 1 : end + 1]]
            wanted = [token if is_scored else IGNORED for token, is_scored in zip(window, scored, strict=True)]
            padding = block_size + 1 - len(window)
            yield window[:-1] + [0] * padding, wanted[1:] + [IGNORED] * padding
            start = end


@dataclass(frozen=True)
class ScoredPairs:
    """Sentence pairs to score.

    Attributes:
        pairs: the encoder's tokens of each sentence, the tokens of its translation, and the place of the token that
            names the target's language, which is given and not scored; None without one.
        tokens, size, lost: scored tokens, UTF-8 bytes of the translations, and the share that the tokenizer loses.
    """

    pairs: list[tuple[list[int], list[int], int | None]]
    tokens: int
    size: int
    lost: float = 0.0

    def batches(
        self, model: Any, block_size: int, batch_size: int
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """The inputs of some pairs, and `[batch, longest]`, the tokens of their translations; -100 where a token is
        not scored. Pairs of like length share a batch."""
        pairs = sorted(self.pairs, key=lambda pair: -len(pair[0]))
        for first in range(0, len(pairs), batch_size):
            inputs, targets, codes = zip(*pairs[first : first + batch_size], strict=True)
            batch = pair_batch(model, inputs, targets)
            labels = batch.pop("labels")
            for row, target, code in zip(labels, targets, codes, strict=True):
                if code is not None:
                    row[code % len(target)] = IGNORED
            yield batch, labels


def text_stream(
    texts: Iterable[str], tokenizer: Any, max_tokens: int | None = None, name: str = "the text"
) -> ScoredText:
    """The stream of some documents. `max_tokens` limits it, in whole documents; a first document with more tokens is
    cut, and a line on the screen, which calls the text `name`, says so."""
    begin = begin_tokens(tokenizer)
    separator = begin or [tokenizer.eos_token_id]
    if separator == [None]:
        raise InputError("The tokenizer has neither a begin-of-text nor an end-of-text token: set its eos_token.")
    ids: list[int] = []
    scored: list[bool] = []
    size, special, found, lost = 0, special_tokens(tokenizer), Counter[str](), LostText()
    for text, tokens in _tokenized(texts, tokenizer):
        if max_tokens is not None and len(ids) + len(tokens) > max_tokens:
            if any(scored):
                break
            text, tokens = _shortened(text, tokenizer, max_tokens - len(ids))
            if not tokens:
                break
            say_once(
                f"{name}: its first document is longer than max_tokens {max_tokens}; it is cut to {len(text):,} "
                "characters"
            )
        ids += [*separator, *tokens]
        scored += [*[False] * len(separator), *[True] * len(tokens)]
        size += len(text.encode())
        lost.add(text, tokens, tokenizer)
        found.update(special[token] for token in tokens if token in special)
    say_special(name, found)
    return ScoredText(ids, scored, size, tuple(begin), lost.share)


def _tokenized(texts: Iterable[str], tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """Each document and its tokens. Batches begin small, since only the first documents may be wanted."""
    documents, size = iter(texts), 1
    while batch := list(islice(documents, size)):
        yield from zip(batch, bare_tokens(batch, tokenizer), strict=True)
        size = min(2 * size, _AT_ONCE)


def _shortened(text: str, tokenizer: Any, most: int) -> tuple[str, list[int]]:
    """A beginning of a document that has at most `most` tokens, as long as bisection finds, and its tokens."""

    def tokens(end: int) -> list[int]:
        return bare_tokens([text[:end]], tokenizer)[0]

    end = bisect_right(range(1, len(text)), most, key=lambda place: len(tokens(place)))
    return text[:end], tokens(end)


@torch.no_grad()
def batch_nats(model: Any, targets_BT: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """The negative log-probability of each target, `[B, T]` float64, 0 where it is -100. A row's first T logits predict
    its targets."""
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    logits_BSV = model(**inputs, use_cache=False).logits
    # In float32, and as a log-softmax, the logits of some tokens at a time take memory.
    nats = [
        F.cross_entropy(piece.float(), wanted, reduction="none")
        for row, targets in zip(logits_BSV, targets_BT.to(model.device), strict=True)
        for piece, wanted in zip(row[: len(targets)].split(_TOKENS), targets.split(_TOKENS), strict=True)
    ]
    return torch.cat(nats).cpu().double().view(targets_BT.shape)


def target_nats(
    model: Any, stream: ScoredText | ScoredPairs, block_size: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`batch_nats` of each batch of a text, and which targets are scored, `[batch, targets]`."""
    for inputs, targets in stream.batches(model, block_size, batch_size):
        yield batch_nats(model, targets, **inputs), targets != IGNORED


def pair_stream(
    language: str, pairs: Iterable[SentencePair], tokenizer: Any, max_tokens: int | None, longest: int | None = None
) -> ScoredPairs:
    """The first pairs to and from a language whose translations have at most `max_tokens` tokens; at least one. Other
    directions than the model's, and pairs longer than `longest`, its positions, are left out."""
    encoder = PairEncoder(tokenizer)
    place_of_code = cache(encoder.place_of_code)
    rows = [pair for pair in pairs if encoder.translates(pair.direction)]
    chosen: list[tuple[list[int], list[int], int | None]] = []
    tokens = size = 0
    lost = LostText()
    for row, source, target in encoder.fitting(rows, longest):
        code = place_of_code(row.direction)
        count = len(target) - (code is not None)
        if max_tokens is not None and chosen and tokens + count > max_tokens:
            break
        chosen.append((source, target, code))
        tokens, size = tokens + count, size + len(row.target.encode())
        lost.add(row.target, target, tokenizer)
    if not tokens:
        raise InputError(f"Language {language!r}: no sentence pair to score that the model translates and can hold.")
    return ScoredPairs(chosen, tokens, size, lost.share)


def pair_batch(model: Any, inputs: Sequence[list[int]], labels: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    """The inputs of an encoder-decoder for some pairs of token ids, padded, and `labels`."""
    batch = {
        "input_ids": padded(inputs, model.config.pad_token_id or 0),
        "attention_mask": padded([[1] * len(row) for row in inputs], 0),
        "labels": padded(labels, IGNORED),
    }
    return with_decoder_inputs(model, batch)


def stream_for(
    config: Any, language: str, texts: Mapping[str, Iterable[Any]], tokenizer: Any, max_tokens: int | None
) -> ScoredText | ScoredPairs:
    """What a model of this configuration is scored on; refuses documents without a token to score."""
    if config.is_encoder_decoder:
        return pair_stream(language, texts[language], tokenizer, max_tokens, longest_block(config))
    stream = text_stream(texts[language], tokenizer, max_tokens, f"language {language!r}")
    if not any(stream.scored):
        raise InputError(f"Language {language!r}: no text to score (max_tokens {max_tokens}).")
    return stream


def score_stream(
    model: Any, stream: ScoredText | ScoredPairs, block_size: int, batch_size: int,
    update: Callable[[int], Any] = lambda tokens: None,
) -> LanguageScore:  # fmt: skip
    """The score of a model on a text, in windows of `block_size` tokens; `update` is told of scored tokens."""
    nats, away = 0.0, None
    with _judged(model) as judged:
        for part, scored in target_nats(model, stream, block_size, batch_size):
            nats += part.sum().item()
            update(int(scored.sum()))
            for class_T in judged:
                away = (away or 0) + int((class_T.view(scored.shape)[scored] > 0).sum())
            judged.clear()
    return LanguageScore.from_nats(nats, stream.tokens, stream.size, stream.lost, away)


@contextmanager
def _judged(model: Any) -> Iterator[list[torch.Tensor]]:
    """Inside, each pass of a model with a gate adds the classes of its tokens that it judges, `[T]`."""
    classes: list[torch.Tensor] = []
    if Facts(model.config).gate is None:
        yield classes
        return

    def note(*_: Any) -> None:
        if (judged := model.routing_control.judged) is not None:
            classes.append(judged.class_T.cpu())

    hook = model.get_submodule(decoder_ffns(model)[-1].place).register_forward_pre_hook(note)
    try:
        yield classes
    finally:
        hook.remove()


@checked
def evaluate_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, Iterable[Any]],
    block_size: int = 1024,
    batch_size: int = 8,
    max_tokens: int | None = None,
    told: bool = False,
) -> dict[str, LanguageScore]:
    """Scores each language's documents, in windows of `block_size` tokens; of an encoder-decoder, the translations to
    and from each language.

    Args:
        texts: documents of each language, also as a data set with a column `text`; for an encoder-decoder its sentence
            pairs.
        told: tell the model the language.

    Raises:
        InputError: a language has no text to score, its score is not finite, or a number is out of range.
    """
    EvaluationSettings(block_size=block_size, batch_size=batch_size, max_tokens=max_tokens)  # refuses others
    check_named_once(list(texts))
    model.eval()
    config: Any = model.config
    if not config.is_encoder_decoder:
        texts = {code: of["text"] if isinstance(of, Dataset) else of for code, of in texts.items()}
    streams = {language: stream_for(config, language, texts, tokenizer, max_tokens) for language in texts}
    tokens, scores = sum(stream.tokens for stream in streams.values()), {}
    with Bar(total=tokens, desc=f"evaluate {model_name(model)}", unit="token", unit_scale=True) as bar:
        for language, stream in streams.items():
            with errors_at(f"language {language!r}"), model.use_languages(language) if told else nullcontext():  # type: ignore[operator]
                scores[language] = score_stream(model, stream, block_size, batch_size, bar.update)
    return scores
