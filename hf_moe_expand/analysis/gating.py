"""Fits the language gate of a checkpoint, or of a dense base before anything is trained: home unless recognised."""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint.arguments import check_file
from ..checkpoint.expansion_only import sha256_of
from ..checkpoint.facts import Facts
from ..checkpoint.gate import Gate, check_takes_gate, gated, write_gate
from ..checkpoint.records import StageRecord
from ..checkpoint.source import resolve_checkpoint
from ..checkpoint.stored import StoredModel, layer_list
from ..checkpoint.table import check_place
from ..checkpoint.writer import DEFAULT_SHARD_SIZE
from ..core.errors import InputError, in_one_line
from ..core.languages import same_language
from ..core.schema import checked
from ..core.scratch import new_file
from ..data.anchors import shipped_anchors, shipped_sentences
from ..inference.models import check_decoder, load_for_inference, longest_block, model_name
from ..modeling.language_gate import READ, GateRule
from ..trainers.freezing import evaluating
from .gate_fit import FittedGate, GateReport, Scored, by_class, candidates, fit_gate, report_of
from .gate_text import begin_of, gate_examples
from .settings import GateSettings


@dataclass(frozen=True)
class GatingReport:
    """Result of `fit_gates` and `fit_base_gate`: what was written, or of a loaded model the `model` with its gate."""

    out: Path | None
    gates: GateReport
    anchors: list[str]
    model: Any = field(default=None, repr=False)

    def lines(self) -> list[str]:
        """The lines that the command line prints."""
        wrote = [] if self.out is None else [f"wrote {self.out}"]
        return [f"anchors            {' '.join(self.anchors)}", *self.gates.lines(), *wrote]


@checked
def fit_gates(
    model: str | os.PathLike | PreTrainedModel,
    out: str | os.PathLike | None = None,
    texts: Mapping[str, Iterable[str]] | None = None,
    anchors: Mapping[str, Iterable[str]] | None = None,
    settings: GateSettings | None = None,
    *,
    processing_class: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> GatingReport:
    """Gives an expanded model a gate that sends home what it does not recognise: writes the checkpoint of one, or makes
    a loaded model of a loaded one, a new one that shares all other tensors (`.model` of the result).

    The gate takes the place of all classifiers and gates that the model has. A language that is neither in `texts` nor
    in `anchors` goes home too.

    Args:
        out: folder to write; None of a loaded model.
        texts: documents of the model's own languages: every new one, and old ones as far as there is text. Shuffle
            them: each one's first `GateSettings.tokens` tokens are read.
        anchors: text of languages that are not new, beside the package's own sentences in some sixty languages
            (`anchors.shipped_anchors`) without the model's; a language that is given has this text alone.
        processing_class: the tokenizer of a loaded model.
        seed: the one that `texts` were shuffled by, for the record.

    Raises:
        InputError: the model takes no gate, a new language has no text, a language has fewer than 100 tokens, an
            anchor language is one of the model's new ones, or no layer keeps the promise of `settings.unseen_share`.
    """
    if texts is None:
        raise InputError("texts is None: give documents of every new language, and of old ones if there are.")
    settings, is_loaded = settings or GateSettings(), isinstance(model, PreTrainedModel)
    given: Any = model
    if is_loaded and processing_class is None:
        raise InputError("processing_class is None: give the tokenizer of the loaded model.")
    if processing_class is not None and not is_loaded:
        raise InputError("processing_class: a checkpoint has its own tokenizer: leave it out.")
    check_place(model, out, overwrite, *([] if is_loaded else [resolve_checkpoint(given)]))
    place: Any = out
    with nullcontext(given) if is_loaded else gated(given, place) as source:
        classes = Facts(check_takes_gate(source)).history.classes
        chosen = anchors_for(classes, texts, anchors)
        loaded, tokenizer = (given, processing_class) if is_loaded else load_for_inference(source)
        with evaluating(loaded):
            gate, report = fitted(loaded, tokenizer, texts, chosen, settings, classes)
        del loaded
        found = {
            "anchors": sorted(chosen), "layer": report.layer, "unseen_share": settings.unseen_share,
            "tokens": settings.tokens, "home": {code: round(share, 4) for code, share in report.old.items()},
            "shares": {code: {"end": round(share, 4)} for code, share in report.new.items()}, "named": report.named,
        }  # fmt: skip
        record = StageRecord(stage="gates", seed=seed, settings=found)
        made = gate_of(gate, classes, report, settings)
        result = write_gate(source, out, made, record, max_shard_size=max_shard_size, overwrite=overwrite)
    return GatingReport(
        None if out is None else Path(out), report, sorted(chosen), result.eval() if is_loaded else None
    )


@checked
def fit_base_gate(
    base: str | os.PathLike,
    out: str | os.PathLike,
    texts: Mapping[str, Iterable[str]],
    new: Collection[str],
    anchors: Mapping[str, Iterable[str]] | None = None,
    settings: GateSettings | None = None,
    *,
    revision: str | None = None,
    overwrite: bool = False,
) -> GatingReport:
    """Fits the gate of a dense base before it is expanded, and writes it to a file for `expand_checkpoint`.

    The file keeps a row for each language and the logits of each one's texts by a fit without them, from which bias and
    `home` follow for any choice of new languages.

    Args:
        out: the file to write, `.safetensors`.
        texts: documents of the new languages, and of old ones as far as there is text.
        new: the languages by which the layer is chosen.

    Raises:
        InputError: see `fit_gates`.
    """
    settings = settings or GateSettings()
    check_file(Path(out), overwrite)
    classes = {code: int(code in new) for code in (*texts, *new)}
    if not new:
        raise InputError("gates: name the languages of --data that will be new, by which the gate's layer is chosen.")
    chosen = anchors_for(classes, texts, anchors)
    stored = StoredModel(base, revision=revision)
    model, tokenizer = load_for_inference(base, revision)
    check_decoder(model.config, model_name(model), "a language gate")
    gate, report = fitted(model, tokenizer, texts, chosen, settings, classes)
    facts = {
        "layer": gate.layer, "begin": gate.begin, "codes": gate.codes, "anchors": gate.anchors, "new": sorted(new),
        "settings": settings.model_dump(), "base": base_hash(stored, gate.layer),
    }  # fmt: skip
    tensors = {"weight": gate.weight_Rh, "bias": gate.bias_R}
    for code, scored in gate.scored.items():
        tensors |= {f"logits.{code}": scored.logits_TR.half(), f"texts.{code}": scored.texts_M2.int()}
    with new_file(Path(out)) as partial:
        partial.write_bytes(save(tensors, metadata={"gate": json.dumps(facts)}))
    return GatingReport(Path(out), report, sorted(chosen))


@checked
def gate_from_file(
    file: str | os.PathLike,
    base: str | os.PathLike,
    new: Collection[str] | Mapping[str, int],
    revision: str | None = None,
) -> tuple[Gate, GateReport]:
    """The gate of a file of `fit_base_gate`, for a base and its new languages: those of one expansion, or the expansion
    of each, which are numbered from 1.

    Raises:
        InputError: the file is broken, was fitted on another base, or has no row for a new language.
    """
    try:
        with safe_open(str(file), "pt") as opened:
            facts = json.loads(opened.metadata()["gate"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 not a mapping
        settings = GateSettings(**facts["settings"])
        codes = [name.removeprefix("logits.") for name in tensors if name.startswith("logits.")]
        scored = {code: Scored(tensors[f"logits.{code}"].float(), tensors[f"texts.{code}"].long()) for code in codes}
        gate = FittedGate(
            facts["layer"], facts["begin"], facts["codes"], facts["anchors"], tensors["weight"], tensors["bias"], scored
        )
    except Exception as error:  # a broken file raises many types
        raise InputError(f"{file}: is no file of a gate ({in_one_line(error)}): write one with `gates BASE`.") from None
    stored = StoredModel(base, revision=revision)
    if facts["base"] != base_hash(stored, gate.layer):
        raise InputError(
            f"{file}: was fitted on another base than {stored.name}, or on other weights: fit the gate of this base."
        )
    if missing := [code for code in new if code not in gate.codes]:
        raise InputError(f"{file}: has no row for {', '.join(missing)}: fit the gate with text in each new language.")
    classes = dict(new) if isinstance(new, Mapping) else dict.fromkeys(new, 1)
    report = report_of(gate, classes, settings)
    return gate_of(gate, classes, report, settings), report


def base_hash(stored: StoredModel, layer: int) -> str:
    """The SHA-256 of all tensors outside the layers, and of those of its layers up to this one."""
    prefix = f"{layer_list(stored.network)}."
    hashes = []
    for key in sorted(stored.tensors):
        number = key.removeprefix(prefix).partition(".")[0] if key.startswith(prefix) else ""
        if not number.isdigit() or int(number) <= layer:
            hashes += [sha256_of(one) for one in stored.in_files(key)]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def gate_of(gate: FittedGate, classes: Mapping[str, int], report: GateReport, settings: GateSettings) -> Gate:
    """The gate for these classes, whose later rows lose the report's bias."""
    order, sizes = by_class(gate.codes, classes)
    codes = iter(gate.codes[row] for row in order.tolist())
    languages = [[next(codes) for _ in range(size)] for size in sizes]
    is_new = torch.arange(len(order)) >= sizes[0]
    rule = GateRule(gate.layer, languages, settings.bound, settings.window, gate.begin, report.home, report.leave)
    return Gate(rule, gate.weight_Rh[order], gate.bias_R[order] - report.bias * is_new)


def anchors_for(
    classes: Mapping[str, int], texts: Iterable[str], anchors: Mapping[str, Any] | None
) -> dict[str, Iterable[str]]:
    """The anchors to fit on, after checking that every language has its text; `classes` has each of the model's
    languages."""
    texts = list(texts)
    if unknown := [code for code in texts if code not in classes]:
        raise InputError(
            f"{', '.join(unknown)}: not a language of the model ({', '.join(classes)}): give text of a language "
            "that is not new as an anchor (--anchors; `anchors` in a recipe)."
        )
    if missing := [code for code, number in classes.items() if number and code not in texts]:
        raise InputError(f"no text in {', '.join(missing)}, which the gate shall recognise: give some.")
    given = anchors or {}
    if new := [code for code in given if any(number and same_language(code, of) for of, number in classes.items())]:
        raise InputError(f"anchors: {', '.join(new)} is a new language of the model: anchors say what is not new.")
    own = {code: text for code, text in given.items() if not any(same_language(code, other) for other in texts)}
    return own | shipped_anchors(leave_out=[*classes, *given])


def fitted(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, Iterable[str]],
    anchors: Mapping[str, Iterable[str]],
    settings: GateSettings,
    classes: Mapping[str, int],
) -> tuple[FittedGate, GateReport]:
    """The gate of a loaded model, dense or expanded, for the class of each language; see `fit_gates`."""
    block = min(READ, longest_block(model.config) or READ)
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    check_layer(settings, count)
    tried = candidates(count) if settings.layer is None else [settings.layer]
    examples = gate_examples(texts, tokenizer, settings.tokens, block)
    everyday = {code: lines for code in texts if (lines := shipped_sentences(code))}  # beside its own, as anchors are
    for code, more in gate_examples(everyday, tokenizer, settings.anchor_tokens, block).items():
        examples[code] += more
    examples |= gate_examples(anchors, tokenizer, settings.anchor_tokens, block)
    numbers = {code: classes.get(code, 0) if code in texts else 0 for code in examples}
    return fit_gate(model, examples, numbers, list(anchors), settings, tried, begin_of(tokenizer))


def check_layer(settings: GateSettings, count: int) -> None:
    """Refuses a layer of the settings that a model of `count` layers lacks."""
    if settings.layer is not None and settings.layer >= count:
        raise InputError(f"layer is {settings.layer}, but the model has the layers 0..{count - 1}.")
