"""Computes perplexity and bits per byte of a model on the text of each language."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm.auto import tqdm

from ..errors import InputError, at
from ..models import longest_block
from ..settings import EvaluationSettings


@dataclass(frozen=True)
class LanguageScore:
    """Scores of a model on a language's text, with the numbers of scored tokens and bytes.

    Bits per byte is comparable between models, since it does not depend on the tokenizer.
    """

    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int

    @classmethod
    def from_nats(cls, nats: float, tokens: int, size: int) -> "LanguageScore":
        """From the text's negative log-likelihood.

        Raises:
            InputError: it is not finite: the model computes NaN or infinite values.
        """
        if not math.isfinite(nats):
            raise InputError(f"the log-likelihood of the text is {-nats}: the model computes NaN or infinite values.")
        return cls(math.exp(min(nats / tokens, 700.0)), nats / math.log(2) / size, tokens, size)


def scored_stream(
    texts: Iterable[str], tokenizer: Any, max_tokens: int | None = None
) -> tuple[list[int], list[bool], int]:
    """Documents as one stream: token ids, which of them are scored, and the scored text's UTF-8 bytes.

    Each document follows a separator (begin-of-text if the tokenizer adds it, else end-of-text), which is context and
    not scored, so that the scored tokens are exactly the text's. `max_tokens` limits the stream, in whole documents.
    """
    begins = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    separator = tokenizer.bos_token_id if begins else tokenizer.eos_token_id
    if separator is None:
        raise InputError("The tokenizer has neither a begin-of-text nor an end-of-text token: set its eos_token.")
    ids: list[int] = []
    scored: list[bool] = []
    size = 0
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if max_tokens is not None and len(ids) + len(tokens) > max_tokens:
            break
        ids += [separator, *tokens]
        scored += [False, *[True] * len(tokens)]
        size += len(text.encode())
    return ids, scored, size


def language_stream(
    language: str, texts: Mapping[str, Iterable[str]], tokenizer: Any, max_tokens: int | None
) -> tuple[list[int], list[bool], int]:
    """`scored_stream` of one language's documents.

    Raises:
        InputError: the documents have no token to score.
    """
    ids, scored, size = scored_stream(texts[language], tokenizer, max_tokens)
    if not any(scored):
        raise InputError(f"Language {language!r}: no text to score (whole documents, max_tokens {max_tokens}).")
    return ids, scored, size


def windows(
    ids: list[int], scored: list[bool], block_size: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of inputs and targets `[batch, block_size]`; windows overlap by one token, so each is a target once."""
    starts = range(0, len(ids) - 1, block_size)
    for first in range(0, len(starts), batch_size):
        inputs, targets = [], []
        for start in starts[first : first + batch_size]:
            window = ids[start : start + block_size + 1]
            wanted = [t if s else -100 for t, s in zip(window, scored[start : start + block_size + 1], strict=True)]
            padding = block_size + 1 - len(window)
            inputs.append(window[:-1] + [0] * padding)
            targets.append(wanted[1:] + [-100] * padding)
        yield torch.tensor(inputs), torch.tensor(targets)


@torch.no_grad()
def target_nats(
    model: Any, ids: list[int], scored: list[bool], block_size: int, batch_size: int
) -> Iterator[torch.Tensor]:
    """Each target's negative log-probability, `[batch, block_size]` float64 for each batch of `windows`; 0 if not
    scored."""
    for inputs, targets in windows(ids, scored, block_size, batch_size):
        # Padding is at the end, where causal attention keeps it from every scored token.
        logits = model(input_ids=inputs.to(model.device), use_cache=False).logits.float()
        nats = F.cross_entropy(logits.flatten(0, 1), targets.to(model.device).flatten(), reduction="none")
        yield nats.view(targets.shape).cpu().double()


def evaluate_model(
    model: nn.Module,
    tokenizer: Any,
    texts: Mapping[str, Iterable[str]],
    block_size: int = 1024,
    batch_size: int = 8,
    max_tokens: int | None = None,
) -> dict[str, LanguageScore]:
    """Scores each language's documents, in windows of `block_size` tokens.

    Raises:
        InputError: a language has no text to score, its score is not finite, or a number is out of range.
    """
    EvaluationSettings(block_size, batch_size, max_tokens)  # refuses numbers out of range
    model.eval()
    block_size = min(block_size, longest_block(model.config) or block_size)
    scores = {}
    for language in tqdm(list(texts), desc="evaluate", unit="language"):
        ids, scored, size = language_stream(language, texts, tokenizer, max_tokens)
        nats = sum(part.sum().item() for part in target_nats(model, ids, scored, block_size, batch_size))
        with at(f"language {language!r}"):
            scores[language] = LanguageScore.from_nats(nats, sum(scored), size)
    return scores
