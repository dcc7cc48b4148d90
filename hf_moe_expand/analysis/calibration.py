"""Calibrates a joined model: gates that tell the packs' languages from all others.

Routers that were trained apart know nothing of the other packs' languages. Nothing is trained: the model only reads the
text.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.join import JoinReport, joined_config, load_packs, write_joined
from ..checkpoint.packs import check_packs
from ..checkpoint.records import History
from ..checkpoint.writer import DEFAULT_SHARD_SIZE
from ..core.errors import InputError, named_as
from ..core.schema import checked
from ..core.scratch import scratch_folder, sibling
from ..evaluation.perplexity import TextStream, beginning, score_stream, text_stream, tokenized
from ..inference.models import check_decoder, load_for_inference, load_tokenizer
from .gate_fit import GateReport
from .gating import check_languages, fitted, gate_of
from .settings import GateSettings

TOKENS = 500
OF_CALIBRATION = "gates that are fitted on text"
_LEAST = 16
_BLOCK, _BATCH = 1024, 4


@dataclass(frozen=True)
class Calibration:
    """Result of `join_calibrated`.

    Attributes:
        before, after: bits per byte of each language, without gates and with the right experts for each language.
        gates: where the gates send tokens.
    """

    before: dict[str, float]
    after: dict[str, float]
    gates: GateReport

    def lines(self) -> list[str]:
        """The lines that the command line prints."""
        means = [sum(scores.values()) / len(scores) for scores in (self.before, self.after)]
        of_each = ", ".join(f"{code} {self.before[code]:.3f} to {self.after[code]:.3f}" for code in self.after)
        text = f"without them, and told the languages: bits per byte {means[0]:.3f} to {means[1]:.3f} ({of_each})"
        return [f"calibration        gates fitted; {text}", *self.gates.lines()]


@checked
def join_calibrated(
    packs: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    texts: Mapping[str, Iterable[str]],
    *,
    tokens: int | None = None,
    gates: GateSettings | None = None,
    anchors: Mapping[str, Iterable[str]] | None = None,
    keep_both: bool = False,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> tuple[JoinReport, Calibration]:
    """`join_expansions` with gates that tell the packs' languages from all others (`gating.fit_gates`). The model is
    written twice, one after the other: into a folder beside `out`, which is removed, and, with its gates, to `out`.

    Args:
        tokens: tokens of each language to score; `TOKENS` by default.
        gates: the gates' settings.
        anchors: text of languages that are not new; by default the package's own sentences.

    Raises:
        InputError: see `join_expansions` and `fit_gates`.
    """
    loaded = load_packs(packs, out, overwrite)
    check_packs(loaded, keep_both)
    loaded = [replace(pack, scale=1.0) for pack in loaded]
    check_decoder(loaded[0].config, packs[0], OF_CALIBRATION)
    # Before the first model is written.
    tokens = TOKENS if tokens is None else tokens
    history = History.of(joined_config(loaded))
    check_calibrated(texts, history, tokens)
    settings = GateSettings() if gates is None else gates
    chosen = check_languages(history.classes, texts, anchors)
    tokenizer = load_tokenizer(loaded[0].stored.folder, packs[0])
    streams = {code: first_tokens(code, documents, tokenizer, tokens) for code, documents in texts.items()}
    place = sibling(Path(out), "joined")
    with scratch_folder(place, True) as scratch, named_as(place / "model", out):
        write_joined(loaded, scratch / "model", max_shard_size=max_shard_size)
        model, tokenizer = load_for_inference(scratch / "model")
        gate, report = fitted(model, tokenizer, texts, chosen, settings, history.classes)
        told: dict[str, float] = {}  # what the gate aims at
        for code, stream in streams.items():
            with model.use_languages(code):
                told |= _bits(model, {code: stream})
        calibration = Calibration(_bits(model, streams), told, report)
        del model
    made = gate_of(gate, history.classes, report.bias, settings)
    joined = write_joined(loaded, out, max_shard_size=max_shard_size, overwrite=overwrite, gate=made)
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
                f"calibration: no text in a language of {name} ({', '.join(codes)}), which the gates shall recognise: "
                "give some."
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
