"""Fits the gates of an expanded checkpoint: home unless recognised."""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..anchors import shipped_anchors, shipped_sentences
from ..checkpoint.gates import Gates, check_gated, write_gates
from ..checkpoint.source import resolve_checkpoint
from ..checkpoint.writer import DEFAULT_SHARD_SIZE, check_output
from ..errors import InputError
from ..modeling.prefix_gate import PrefixRule
from ..models import check_decoder, load_for_inference, longest_block, model_name
from ..records import History, StageRecord
from ..settings import GateSettings
from .gate_fit import GateReport, fit_rows
from .gate_text import gate_examples

_BLOCK = 256


@dataclass(frozen=True)
class GatingReport:
    """Result of `fit_gates`."""

    out: Path
    gates: GateReport
    anchors: list[str]

    def lines(self) -> list[str]:
        """The lines that the command line prints."""
        return [f"anchors            {' '.join(self.anchors)}", *self.gates.lines(), f"wrote {self.out}"]


def fit_gates(
    model: str | os.PathLike,
    out: str | os.PathLike,
    texts: Mapping[str, Iterable[str]],
    anchors: Mapping[str, Iterable[str]] | None = None,
    settings: GateSettings | None = None,
    *,
    seed: int = 0,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> GatingReport:
    """Writes an expanded checkpoint with gates that send home what they do not recognise.

    The gates are fitted on frozen hidden states, without a gradient through the model, and take the place of all
    classifiers and gates that the checkpoint has. A language that is neither in `texts` nor in `anchors` goes home too.

    Args:
        texts: documents of the model's own languages: every new one, and old ones as far as there is text.
        anchors: text of languages that are not new; by default the package's own sentences (`anchors.shipped_anchors`)
            in some sixty languages without the model's.

    Raises:
        InputError: the checkpoint takes no gates, a new language has no text, a language has fewer than 100 tokens, an
            anchor language is one of the model's new ones, or no bias keeps the promise of `settings.unseen_share`.
    """
    settings = settings or GateSettings()
    config = check_gated(model)
    check_output(out, overwrite, resolve_checkpoint(model, weights=False))
    chosen = check_languages(History.of(config).classes, texts, anchors)
    loaded, tokenizer = load_for_inference(model)
    gates, report = fitted(loaded, tokenizer, texts, chosen, settings)
    del loaded
    record = StageRecord(
        stage="gates", seed=seed,
        settings={
            "anchors": sorted(chosen), "unseen_share": settings.unseen_share, "tokens": settings.tokens,
            "shares": {code: {str(n): round(share, 4) for n, share in of.items()} for code, of in report.new.items()},
            "home": {code: round(share, 4) for code, share in report.home.items()}, "named": report.named,
        },
    )  # fmt: skip
    write_gates(model, out, gates, record, max_shard_size=max_shard_size, overwrite=overwrite)
    return GatingReport(Path(out), report, sorted(chosen))


def check_languages(
    classes: Mapping[str, int], texts: Iterable[str], anchors: Mapping[str, Iterable[str]] | None
) -> dict[str, Iterable[str]]:
    """The anchors to fit on, after checking that every language has its text.

    Args:
        classes: the class of each of the model's languages.
    """
    texts = list(texts)
    if unknown := [code for code in texts if code not in classes]:
        raise InputError(
            f"gates: {', '.join(unknown)}: not a language of the model ({', '.join(classes)}): give text of a language "
            "that is not new as an anchor (--anchors; `anchors` in a recipe)."
        )
    if missing := [code for code, number in classes.items() if number and code not in texts]:
        raise InputError(f"gates: no text in {', '.join(missing)}, which the gates shall recognise: give some.")
    if anchors is None:
        return dict(shipped_anchors(leave_out=list(classes)))
    if new := [code for code in anchors if classes.get(code)]:
        raise InputError(f"anchors: {', '.join(new)} is a new language of the model: anchors say what is not new.")
    if len(anchors) < 3:
        raise InputError(
            f"anchors: {len(anchors)} language(s) were given, but a gate learns from many what is not new: give 20 or "
            "more, or none, to take the package's own."
        )
    return {code: text for code, text in anchors.items() if code not in texts}


def fitted(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Iterable[str]],
    anchors: Mapping[str, Iterable[str]],
    settings: GateSettings,
    classes: Mapping[str, int] | None = None,
) -> tuple[Gates, GateReport]:
    """Gates for a loaded model, see `fit_gates`; the languages have the classes of its history, unless given."""
    known = History.of(model.config).classes if classes is None else classes
    block = min(_BLOCK, longest_block(model.config) or _BLOCK)
    examples = gate_examples(texts, tokenizer, settings.tokens, block)
    everyday = {code: lines for code in texts if (lines := shipped_sentences(code))}  # beside its own, as anchors are
    for code, more in gate_examples(everyday, tokenizer, settings.anchor_tokens, block).items():
        examples[code] += more
    examples |= gate_examples(anchors, tokenizer, settings.anchor_tokens, block)
    rule = None if settings.state_free else PrefixRule(settings.decay, settings.bound)
    numbers = {code: known.get(code, 0) if code in texts else 0 for code in examples}
    return fit_rows(model, examples, numbers, list(anchors), rule, settings.unseen_share)


def gates_of_base(model: Any, tokenizer: Any, texts: Mapping[str, Iterable[str]], new: Collection[str]) -> GateReport:
    """Where gates would send tokens of old and `new` languages, by a dense base's hidden states, before anything is
    trained; refuses what `fit_gates` refuses."""
    check_decoder(model.config, model_name(model), "gates")
    classes = {code: int(code in new) for code in texts}
    anchors = check_languages(classes, texts, None)
    return fitted(model, tokenizer, texts, anchors, GateSettings(), classes)[1]
