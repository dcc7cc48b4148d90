"""Measures how well a linear probe on the FFN's input tells new text from old, in each layer.

Shape suffixes: T tokens, h hidden size, L layers, N stretches of successive tokens, n tokens of a stretch.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..core.errors import InputError
from ..core.schema import checked
from ..inference.models import check_decoder, longest_block, model_name
from ..modeling import count_layers
from ..planning.results import SeparabilityResult
from .reading import document_blocks, padded_batches, progress, read_inputs
from .settings import AnalysisSettings

# Numbers of tokens after which running text is scored; text is cut into stretches of the last one.
LENGTHS = (8, 16, 32)
# Nats that one token may add to a sum of log-odds, so that no single token decides for a text.
BOUND = 4.0

Blocks = list[list[int]]


@dataclass(frozen=True)
class Probe:
    """A linear discriminant: a token's log-odds of new against old are `x @ weight_h + bias`."""

    weight_h: torch.Tensor
    bias: float


class ClassMoments:
    """Running means of `x` and `x x^T` in one layer, float64: vectors of h for each class, one matrix of `h x h`.

    The matrix is shared, since the discriminant needs only the mean over both classes.
    """

    def __init__(self, hidden_size: int) -> None:
        self.means = torch.zeros(2, hidden_size, dtype=torch.float64)
        self.square_hh = torch.zeros(hidden_size, hidden_size, dtype=torch.float64)
        self.tokens = 0

    def add(self, states_Th: torch.Tensor, is_new: bool, weight: float) -> None:
        """Adds tokens of a class, each with this weight; a class's weights must add up to 1."""
        states_Th = states_Th.double()
        self.means[int(is_new)] += weight * states_Th.sum(0).cpu()
        self.square_hh += weight / 2 * (states_Th.T @ states_Th).cpu()
        self.tokens += len(states_Th)

    def probe(self) -> Probe:
        """The regularised linear discriminant between equally likely classes (Fisher 1936).

        With the classes' means m and their covariance C, the mean over both classes of that around its own mean, the
        log-odds are `(x - (m_new + m_old) / 2) @ w`, `w = C^-1 (m_new - m_old)`. They are exact for Gaussian classes
        of one covariance. C's correlations are multiplied by `tokens / (tokens + h)`, as if h more tokens had been
        read in which no two features correlate: so C can be inverted however few the tokens, and the probe does not
        depend on the features' scales.
        """
        old_h, new_h = self.means
        covariance_hh = self.square_hh - (old_h[:, None] * old_h + new_h[:, None] * new_h) / 2
        scale_h = covariance_hh.diagonal().clamp(min=0).sqrt()
        # A feature that is constant in the text, but for rounding: its scale says nothing.
        floor = 1e-6 * float(scale_h.max())
        scale_h = torch.where(scale_h > floor, scale_h, scale_h.max() if floor > 0 else torch.ones_like(scale_h))
        covariance_share = self.tokens / (self.tokens + len(scale_h))
        correlation_hh = covariance_share * covariance_hh / (scale_h[:, None] * scale_h)
        correlation_hh.diagonal().add_(1 - covariance_share)
        weight_h = torch.linalg.solve(correlation_hh, (new_h - old_h) / scale_h) / scale_h
        return Probe(weight_h, -float(weight_h @ (new_h + old_h)) / 2)


def split(language: str, documents: Sequence[Blocks], seed: int) -> tuple[Blocks, Blocks]:
    """The blocks to fit on and the blocks to score on; no document is in both.

    Documents are drawn in an order that `seed` gives until they have a quarter of the tokens; one that would make it
    more than half of them is passed over. If no quarter can be had so, because documents are few or unequal, blocks
    are drawn instead, in the same way.

    Args:
        documents: the blocks of each document.

    Raises:
        InputError: the language has a single block, or the held-out blocks have fewer tokens than a stretch.
    """
    blocks = [[block] for document in documents for block in document]
    if len(blocks) < 2:
        raise InputError(
            f"Language {language!r} has one block of text, so none can be held out: give more --tokens or a smaller "
            "--block-size."
        )
    total = sum(len(block) for (block,) in blocks)
    parts, tokens = _drawn(documents, total, seed)
    if tokens < total / 4:
        parts, tokens = _drawn(blocks, total, seed)
    if tokens < LENGTHS[-1]:
        raise InputError(
            f"Language {language!r} has {tokens} held-out tokens, but a score needs at least {LENGTHS[-1]}: give more "
            "--tokens."
        )
    return parts


def _drawn(units: Sequence[Blocks], total: int, seed: int) -> tuple[tuple[Blocks, Blocks], int]:
    """The blocks of the other units, those of units drawn until they have a quarter of the tokens, and their tokens."""
    held: set[int] = set()
    tokens = 0
    for index in random.Random(seed).sample(range(len(units)), len(units)):
        size = sum(map(len, units[index]))
        if tokens < total / 4 and tokens + size <= total / 2:
            held.add(index)
            tokens += size
    parts: tuple[Blocks, Blocks] = ([], [])
    for index, unit in enumerate(units):
        parts[index in held].extend(unit)
    return parts, tokens


@torch.no_grad()
@checked
def measure_separability(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, Iterable[str]],
    old: Sequence[str],
    new: Sequence[str],
    tokens: int = 100_000,
    block_size: int = 1024,
    batch_size: int = 8,
    seed: int = 0,
) -> SeparabilityResult:
    """Measures how well a linear probe on each FFN's input tells new text from old.

    In every layer a linear discriminant (`ClassMoments.probe`) is fitted on some documents of each language and scored
    on the others, which have a quarter of its tokens or a little more (`split`); padding is excluded. Old and new count
    equally, and each language equally within its kind. A token whose log-odds are above 0 is called new, below 0 old;
    0 counts as half right. For running text, the held-out text of each language, block after block, is cut into
    stretches of 32 tokens, without the rest; after 8, 16 and 32 tokens of a stretch, the sign of the sum of its tokens'
    log-odds is scored in the same way, each token's log-odds bounded to -4..4 nats.

    Each token passes the model once. Besides the model this needs `8 h^2` bytes a layer for float64 sums over the text
    that is fitted on, and one float64 number a layer for each held-out token of a language.

    Args:
        texts: documents of each language of `old` and `new`.
        tokens: tokens of each language.
        seed: random seed of the choice of held-out text.

    Raises:
        InputError: there is no old or no new language; a language has fewer tokens than `tokens`, or too few to hold
            some out; a number is out of range; or hidden states are not finite.
    """
    AnalysisSettings(tokens=tokens, block_size=block_size, batch_size=batch_size)  # refuses numbers out of range
    for kind, languages in (("old", old), ("new", new)):
        if not languages:
            raise InputError(
                f"No {kind} language is given: separability is of old from new text, so give some of both."
            )
    check_decoder(model.config, model_name(model), "separability and prefix gates")
    model.eval()
    config: Any = model.config
    layers, hidden_size = count_layers(config), config.get_text_config(decoder=True).hidden_size
    block_size = min(block_size, longest_block(model.config) or block_size)
    # Counts all text before the first pass, so that a lack of text is reported at once.
    parts = {
        code: split(code, document_blocks(code, texts[code], tokenizer, tokens, block_size), seed)
        for code in (*old, *new)
    }
    moments = [ClassMoments(hidden_size) for _ in range(layers)]
    probes: list[Probe] = []

    def fit(is_new: bool, weight: float, layer: int, states_Th: torch.Tensor) -> None:
        moments[layer].add(states_Th, is_new, weight)

    def score(log_odds: list[list[torch.Tensor]], layer: int, states_Th: torch.Tensor) -> None:
        probe = probes[layer]
        log_odds[layer].append((states_Th.double() @ probe.weight_h.to(states_Th.device) + probe.bias).cpu())

    with progress(model, len(parts), tokens) as bar:
        for language, (fitted, _) in parts.items():
            bar.set_description(f"separability in {model_name(model)}: {language}, fit")
            is_new = language in new
            weight = 1 / (sum(map(len, fitted)) * len(new if is_new else old))
            read_inputs(model, padded_batches(fitted, batch_size), partial(fit, is_new, weight), bar)
        while moments:  # each layer's sums are freed when its probe is found
            if not bool(moments[0].square_hh.isfinite().all()):
                raise InputError(
                    f"Layer {len(probes)}: the hidden states are not finite, so no probe fits them: check the model's "
                    "dtype, or load it in float32."
                )
            probes.append(moments.pop(0).probe())
        shares = {}
        for language, (_, held_out) in parts.items():
            bar.set_description(f"separability in {model_name(model)}: {language}, score")
            log_odds: list[list[torch.Tensor]] = [[] for _ in range(layers)]
            read_inputs(model, padded_batches(held_out, batch_size), partial(score, log_odds), bar)
            shares[language] = called_right(torch.stack([torch.cat(odds) for odds in log_odds]), language in new)

    def balanced(length: int) -> list[float]:
        of_kinds = [torch.stack([shares[code][length] for code in codes]).mean(0) for codes in (old, new)]
        return torch.stack(of_kinds).mean(0).tolist()

    return SeparabilityResult(
        old=list(old), new=list(new), tokens=tokens,
        held_out={code: sum(map(len, held)) for code, (_, held) in parts.items()}, bound=BOUND, seed=seed,
        token=balanced(1), running={str(length): balanced(length) for length in LENGTHS},
        by_language={code: shares[code][LENGTHS[-1]].tolist() for code in parts},
    )  # fmt: skip


def called_right(odds_LT: torch.Tensor, is_new: bool) -> dict[int, torch.Tensor]:
    """Shares `[L]` of single tokens (key 1) and of stretches after each of `LENGTHS` tokens that are called right.

    Args:
        odds_LT: log-odds of new against old of a language's held-out tokens, at least one stretch.
        is_new: whether the language is new.
    """
    stretch = LENGTHS[-1]
    whole = odds_LT.shape[1] // stretch * stretch
    sums_LNn = odds_LT[:, :whole].clamp(-BOUND, BOUND).unflatten(1, (-1, stretch)).cumsum(-1)
    scored = {1: odds_LT, **{length: sums_LNn[..., length - 1] for length in LENGTHS}}
    sign = 1 if is_new else -1
    return {length: ((sign * sums.sign() + 1) / 2).mean(-1) for length, sums in scored.items()}
