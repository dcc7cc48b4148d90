"""Calibrates a joined model: gates that tell the packs' languages from all others, or a factor for each pack's router.

Routers that were trained apart agree on expert 0, but one that was trained longer, or at a higher learning rate, may
claim tokens with larger log-odds than another. Nothing is trained: the model only reads the text.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..checkpoint.join import JoinReport, check_ungated, joined_config, load_packs, write_joined
from ..checkpoint.packs import check_packs
from ..checkpoint.writer import DEFAULT_SHARD_SIZE
from ..errors import InputError, named_as
from ..evaluation.perplexity import TextStream, beginning, score_stream, text_stream, tokenized
from ..modeling.configuration_layer_moe import joins_packs
from ..models import check_decoder, load_for_inference, load_tokenizer
from ..records import History
from ..scratch import beside, scratch_folder
from ..settings import GateSettings
from .gate_fit import GateReport
from .gating import check_languages, fitted, gate_of

FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
TOKENS = 500
OF_CALIBRATION = "factors and gates that are fitted on text"
_SWEEPS, _LEAST = 3, 16
_BLOCK, _BATCH = 1024, 4


@dataclass(frozen=True)
class Calibration:
    """Result of `calibrate_join`.

    Attributes:
        factors: factor of each pack's router, to multiply the scale that it has in the model.
        before, after: bits per byte of each language, with factors of 1 and with `factors`; for gates, without them and
            with the right experts for each language.
        gates: where fitted gates send tokens; None if factors were found.
    """

    factors: list[float]
    before: dict[str, float]
    after: dict[str, float]
    gates: GateReport | None = None

    def lines(self) -> list[str]:
        """The lines that the command line prints."""
        means = [sum(scores.values()) / len(scores) for scores in (self.before, self.after)]
        of_each = ", ".join(f"{code} {self.before[code]:.3f} to {self.after[code]:.3f}" for code in self.after)
        text = f"bits per byte {means[0]:.3f} to {means[1]:.3f}"
        text = f"gates fitted; without them, and told the languages: {text}" if self.gates else text
        return [f"calibration        {text} ({of_each})", *(self.gates.lines() if self.gates else [])]


def calibrate_join(
    model: Any, tokenizer: Any, texts: Mapping[str, Iterable[str]], *, tokens: int = TOKENS
) -> Calibration:
    """One positive factor for the router of each pack of a joined model, by a search over `FACTORS`.

    The factors scale the rows of a pack's experts in the routers of all layers, the pack's log-odds against expert 0
    (`packs.joined_rows`). Pack after pack, the factor with the lowest mean of the languages' bits per byte is taken
    while the others stay, until nothing changes, at most three times around. Every language counts alike. The search
    takes forward passes alone, finds the same factors each time, and leaves the model as it was.

    Args:
        model: joined model (`join_expansions`), not expanded further since.
        texts: documents of languages of the model, of every pack's at least one.
        tokens: tokens to read of each language.

    Raises:
        InputError: the model joins no packs; a language is not one of its own; one, or a pack, has too little text.
    """
    if not joins_packs(model.config):
        raise InputError("The model joins no language packs, or was grown after the join: it has nothing to calibrate.")
    check_calibrated(texts, History.of(model.config), tokens)
    streams = {code: first_tokens(code, documents, tokenizer, tokens) for code, documents in texts.items()}
    return _search(model, streams, len(model.config.packs))


def join_calibrated(
    packs: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    texts: Mapping[str, Iterable[str]],
    *,
    tokens: int | None = None,
    gates: GateSettings | bool = True,
    anchors: Mapping[str, Iterable[str]] | None = None,
    keep_both: bool = False,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> tuple[JoinReport, Calibration]:
    """`join_expansions` with gates that tell the packs' languages from all others (`gating.fit_gates`), or with the
    scales that `calibrate_join` finds. The model is written twice, one after the other: into a folder beside `out`,
    which is removed, and, with its gates or scales, to `out`.

    Args:
        tokens: tokens to read of each language; `TOKENS` by default.
        gates: the gates' settings; False finds scales instead.
        anchors: text of languages that are not new; by default the package's own sentences.

    Raises:
        InputError: see `join_expansions`, `calibrate_join` and `fit_gates`.
    """
    loaded = load_packs(packs, out, overwrite)
    check_packs(loaded, keep_both)
    if gates:
        loaded = [replace(pack, scale=1.0) for pack in loaded]
    else:
        check_ungated(loaded)
    check_decoder(loaded[0].config, packs[0], OF_CALIBRATION)
    # Before the first model is written.
    tokens = TOKENS if tokens is None else tokens
    history = History.of(joined_config(loaded))
    check_calibrated(texts, history, tokens)
    settings = (GateSettings() if gates is True else gates) or None
    chosen = check_languages(history.classes, texts, anchors) if settings else {}
    tokenizer = load_tokenizer(loaded[0].stored.folder, packs[0])
    streams = {code: first_tokens(code, documents, tokenizer, tokens) for code, documents in texts.items()}
    place = beside(Path(out), "joined")
    with scratch_folder(place, True) as scratch, named_as(place / "model", out):
        write_joined(loaded, scratch / "model", max_shard_size=max_shard_size)
        model, tokenizer = load_for_inference(scratch / "model")
        made = None
        if settings:
            gate, report = fitted(model, tokenizer, texts, chosen, settings, history.classes)
            made = gate_of(gate, history.classes, report.bias, settings)
            told: dict[str, float] = {}  # what the gates aim at
            for code, stream in streams.items():
                with model.use_languages(code):
                    told |= _bits(model, {code: stream})
            calibration = Calibration([1.0] * len(loaded), _bits(model, streams), told, report)
        else:
            calibration = _search(model, streams, len(loaded))
        del model
    scaled = [replace(pack, scale=pack.scale * by) for pack, by in zip(loaded, calibration.factors, strict=True)]
    joined = write_joined(scaled, out, max_shard_size=max_shard_size, overwrite=overwrite, gate=made)
    return joined, calibration


def _bits(model: Any, streams: Mapping[str, TextStream]) -> dict[str, float]:
    """The bits per byte of each stream."""
    return {code: score_stream(model, stream, _BLOCK, _BATCH).bits_per_byte for code, stream in streams.items()}


def check_calibrated(languages: Iterable[str], history: History, tokens: int) -> None:
    """Refuses text in languages that a joined model's history lacks, packs without any, and too few tokens of one."""
    languages, known = list(languages), history.languages
    new: dict[str, list[str]] = {}
    for record in history.expansions:
        new.setdefault(record.pack or "", []).extend(record.new_languages)
    if tokens < _LEAST:
        raise InputError(f"calibration: tokens is {tokens}: must be at least {_LEAST}, for a score that says anything.")
    if unknown := [code for code in languages if code not in known]:
        raise InputError(
            f"calibration: {', '.join(unknown)}: not a language of the packs ({', '.join(sorted(known))})."
        )
    for name, codes in new.items():
        if not any(code in languages for code in codes):
            raise InputError(
                f"calibration: no text in a language of {name} ({', '.join(codes)}), whose router it would scale: give "
                "some."
            )


def first_tokens(language: str, documents: Iterable[str], tokenizer: Any, tokens: int) -> TextStream:
    """The stream of a text's first tokens, whose last document is cut; refuses a text with fewer tokens."""
    chosen, count = [], 0
    for text, ids in tokenized(documents, tokenizer):
        fits = count + len(ids) <= tokens
        chosen.append(text if fits else beginning(text, tokenizer, tokens - count)[0])
        count += len(ids)
        if count >= tokens:
            return text_stream(chosen, tokenizer)
    raise InputError(
        f"Language {language!r} has {count:,} tokens, but the calibration reads {tokens:,} of each language: give more "
        "text, or fewer tokens (--tokens; `join: {tokens: ...}` in a recipe)."
    )


@torch.no_grad()
def _search(model: Any, streams: Mapping[str, TextStream], packs: int) -> Calibration:
    """The factors that a search pack by pack finds."""
    model.eval()
    known: dict[tuple[float, ...], dict[str, float]] = {}

    def scores(factors: tuple[float, ...]) -> dict[str, float]:
        if factors not in known:
            with _scaled(model, factors):
                known[factors] = _bits(model, streams)
            bar.update()
        return known[factors]

    def mean(factors: tuple[float, ...]) -> float:
        bits = scores(factors)
        return sum(bits.values()) / len(bits)

    best = (1.0,) * packs
    with tqdm(desc="calibrate", unit="pass") as bar:
        before = scores(best)
        for _ in range(_SWEEPS):
            start = best
            for pack in range(packs):
                tried = [(*best[:pack], factor, *best[pack + 1 :]) for factor in FACTORS]
                best = min([best, *tried], key=mean)  # of equals the present one
            if best == start:
                break
    return Calibration(list(best), before, scores(best))


@contextmanager
def _scaled(model: Any, factors: Sequence[float]) -> Iterator[None]:
    """Inside, the rows of each pack's experts in all routers are multiplied by the pack's factor."""
    originals = []
    ends = [0, *accumulate(model.config.packs)]
    for ffn in model.expanded_ffns().values():
        weight = ffn.router.weight
        originals.append((weight, weight.detach().clone()))
        for factor, (start, end) in zip(factors, pairwise(ends), strict=True):
            rows = weight[ffn.experts_of_class[start] : ffn.experts_of_class[end]]
            rows.copy_(rows.float() * factor)
    try:
        yield
    finally:
        for weight, values in originals:
            weight.copy_(values)
