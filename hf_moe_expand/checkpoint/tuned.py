"""Fine-tunes of one base become languages of one model: what a fine-tune changed are modules of its language's own,
whole or as low-rank updates, and all other text gets the base as it was. Nothing trains."""

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from ..core.errors import InputError
from ..core.jsonfile import read_json
from ..core.languages import check_old_and_new
from ..core.schema import checked
from ..modeling import ExpandedConfig, LayerMoEConfig
from ..planning.plan import Plan
from .compare import base_hashes, moved_tensors
from .expand import base_of, expansion_rule, planned_config, planned_record
from .export import dense_config
from .facts import ExpertKind, Facts, kind_of, set_part
from .fine_tune import FineTune, load_fine_tune
from .gate import Gate
from .peft import PeftAdapter
from .promises import check_architecture
from .records import ExpansionRecord, History, StageRecord
from .source import GENERATION, TEMPLATE, holds_adapter, name_and_commit
from .stored import LoadedModel, Source, StoredModel, network_of, places
from .table import Copy, Rule, check_place, rewrite
from .writer import DEFAULT_SHARD_SIZE, DTYPE_NAMES

STAGE = "tuned"  # the step's name in a history
_OF_LIBRARY = ("transformers_version", "_from_model_config")


@dataclass(frozen=True)
class TunedReport:
    """Result of `expand_tuned`: parameters before and after, and what a user should know."""

    out: Path
    base_parameters: int
    parameters: int
    warnings: list[str]


@checked
def expand_tuned(
    base: Any,
    tuned: Mapping[str, str | os.PathLike | PreTrainedModel],
    out: str | os.PathLike | None = None,
    old_languages: Sequence[str] = (),
    *,
    rank: int | None = None,
    weight: float = 1.0,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    revision: str | None = None,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    gate: Gate | None = None,
) -> Any:
    """Writes the model of a base and fine-tunes of it: each language's texts get its fine-tune, all others the base as
    it was. Nothing trains; text whose language nobody tells, and no gate judges, is the base's.

    Args:
        base: folder or hub id of the dense base, or of a model that was made so, which gets further languages; or a
            loaded one, which then shares its tensors with the new model.
        tuned: by language the folder or hub id of a fine-tune, a full model of the base's shape or a LoRA of PEFT; of
            one for several languages the codes are joined by commas. Loaded models if `base` is one.
        out: folder to write; None for loaded models.
        old_languages: the base's own languages, as far as they are known.
        rank: keeps of each map's difference, and of embedding and head, the best update of this rank (its truncated
            singular value decomposition, in float64); norms and biases stay whole. None keeps all whole.
        weight: times the difference: 1 is the fine-tune, 0.5 its mean with the base.
        dtype: the base's type, to which a fine-tune in another one is converted.
        revision: revision of the base's hub id.
        gate: the language gate of this base, for these languages (`gate_from_file`).

    Returns:
        A `TunedReport`, or the loaded model.

    Raises:
        InputError: a fine-tune is of another base, architecture, configuration, shape, vocabulary or type (the message
            names what differs); the languages contradict each other; or `out` cannot be written.
    """
    home = _home(base, revision)
    rounds, history = [codes_of(languages) for languages in tuned], History.of(home.config)
    known = _old_languages(home, rounds, old_languages)
    network = home.network if not len(history) else network_of(dense_config(home.config))
    loaded = _loaded(home, tuned.values(), rank, weight, dtype)
    check_place(base, out, overwrite, home.folder, *(one.folder for one in loaded))
    entries, is_loaded = [one.entry(network) for one in loaded], isinstance(home, LoadedModel)
    files = {} if is_loaded else _settings_of(home.folder, rounds, loaded, entries)
    config, plans = _planned(home, entries, rounds, known, gate)
    records = _records(home, base, plans, loaded, history)
    made = rewrite(
        [home, *(one.source for one in loaded if isinstance(one, FineTune))],
        config, _rule(home, config, loaded, len(history), network, gate), out,
        record=History([*history.expansions, *records]).with_last(language_gate=config.language_gate), title=STAGE,
        files=files, max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip
    if is_loaded:
        return made
    first, last = History.of(config).first, History.of(config).last
    said = _warnings(home, loaded, first)
    return TunedReport(Path(out or ""), first.base_parameters or 0, last.parameters or 0, said)


def _warnings(home: Any, loaded: Sequence[FineTune | PeftAdapter], first: ExpansionRecord) -> list[str]:
    """What the result says of the bases that the fine-tunes name, and of a base that moved."""
    said = [line for one in loaded for line in one.warnings(first.base_model or "", first.base_revision)]
    if any(isinstance(one, PeftAdapter) for one in loaded) and (verdict := moved_tensors(home)).moved:
        said.append(f"warning: {verdict.names} moved since the expansion: an adapter of the base computes otherwise")
    return said


def _old_languages(home: Source, rounds: Sequence[Sequence[str]], given: Sequence[str]) -> list[str]:
    """The base's own languages, after checking those that the fine-tunes add."""
    if not rounds:
        raise InputError("tuned is empty: give each language's fine-tune.")
    history = History.of(home.config)
    known = history.first.old_languages if len(history) else list(given)
    if len(history) and given:
        raise InputError(f"old_languages: {home.name} says its own already ({', '.join(known) or 'none'}).")
    check_old_and_new([*dict.fromkeys([*known, *history.languages])], [code for codes in rounds for code in codes])
    return known


def codes_of(languages: str) -> list[str]:
    """The codes of a fine-tune's languages, which commas join."""
    return [code.strip() for code in languages.split(",")]


def _home(base: Any, revision: str | None) -> Source:
    """The base, or the model of languages that gets more."""
    if isinstance(base, PreTrainedModel):
        source: Source = LoadedModel(base)
    else:
        source = StoredModel(base, revision=revision)
    config, name = source.config, source.name
    if not isinstance(config, ExpandedConfig):
        check_architecture(config, name)
        if config.is_encoder_decoder:
            raise InputError(f"{name}: is an encoder-decoder, but fine-tunes become languages of decoders alone.")
    elif "languages" not in (config.parts or {}) or not isinstance(config, LayerMoEConfig):
        raise InputError(
            f"{name}: its experts are {kind_of(config).words}: a fine-tune joins a model whose languages have modules "
            "of their own (`expand BASE OUT --tuned`), or its dense base."
        )
    elif (stage := History.of(config).trained_base) is not None:
        raise InputError(f"{name}: `{stage}` trained the base inside, of which no other model is a fine-tune.")
    return source


def _loaded(
    home: Source, tuned: Iterable[Any], rank: int | None, weight: float, dtype: str | None
) -> list[FineTune | PeftAdapter]:
    """The fine-tunes and the adapters of PEFT; refuses a type that the base does not have."""
    if rank is not None and rank < 1:
        raise InputError(f"rank is {rank}: must be at least 1.")
    if not 0 < weight <= 2:
        raise InputError(f"weight is {weight}: must be above 0 and at most 2; 1 is the fine-tune as it is.")
    stored_type = DTYPE_NAMES[getattr(torch, dtype)] if dtype else None
    loaded: list[FineTune | PeftAdapter] = []
    for one in tuned:
        if isinstance(one, PreTrainedModel) != isinstance(home, LoadedModel):
            raise InputError("tuned: give loaded models for a loaded base, and folders or hub ids for a checkpoint.")
        if not isinstance(one, PreTrainedModel) and holds_adapter(one):
            if rank is not None or weight != 1:
                raise InputError(f"{one}: is an adapter of PEFT, which joins as it is: leave rank and weight out.")
            loaded.append(PeftAdapter.load(one))
        else:
            number = 1 + sum(isinstance(other, FineTune) for other in loaded)
            loaded.append(load_fine_tune(home, one, number, rank, weight, stored_type))
    if stored_type and stored_type not in {home[key].dtype for key in home.tensors}:
        raise InputError(f"dtype is {dtype}, but no tensor of {home.name} is: fine-tunes get the base's type.")
    return loaded


def _settings_of(
    home: Path, rounds: Sequence[Sequence[str]], loaded: Sequence[Any], entries: Sequence[dict]
) -> dict[str, bytes]:
    """The files of the fine-tunes' own chat templates, by name; their generation settings that differ from the base's
    are written into their entries."""
    files: dict[str, bytes] = {}
    base = _json(home / GENERATION)
    template = home / TEMPLATE
    for codes, one, entry in zip(rounds, loaded, entries, strict=True):
        own = one.folder / TEMPLATE
        if own.is_file() and not (template.is_file() and template.read_bytes() == own.read_bytes()):
            files |= {f"additional_chat_templates/{code}.jinja": own.read_bytes() for code in codes}
        theirs = _json(one.folder / GENERATION)
        differ = {name: value for name, value in theirs.items() if value != base.get(name) and name not in _OF_LIBRARY}
        if differ:
            entry["generation"] = differ
    return files


def _json(file: Path) -> dict[str, Any]:
    return read_json(file, "a generation configuration") if file.is_file() else {}


def _planned(
    home: Source, entries: Sequence[dict], rounds: Sequence[Sequence[str]], old: Sequence[str], gate: Gate | None
) -> tuple[Any, list[Plan]]:
    """The configuration of a model with an expansion of all layers for each fine-tune, and the plan of each."""
    config, history = home.config, History.of(home.config)
    is_dense = not isinstance(config, ExpandedConfig)
    counts = Facts(config).counts
    earlier = [] if is_dense else config.counts_of_expansions
    plans, known = [], list(dict.fromkeys([*old, *history.languages]))
    for number, codes in enumerate(rounds, start=1):
        plans.append(Plan(STAGE, [count + number for count in counts], old=known, new=list(codes), exclusive=True))
        known = [*known, *codes]
    earlier = [*earlier, *(plan.experts_per_layer for plan in plans[:-1])]
    if is_dense:
        config = planned_config(
            config,
            plans[-1],
            ExpertKind("adapter", {"adapters": list(entries)}),
            gate,
            earlier_experts_per_layer=earlier or None,
        )
    else:
        if gate is not None:
            raise InputError("gate: a gate of the base knows only the new languages: fit one to the model (`gates`).")
        config = copy.deepcopy(config)
        config.num_experts_per_layer, config.earlier_experts_per_layer = plans[-1].experts_per_layer, earlier
        set_part(config, "languages", [*config.parts["languages"], *entries])
        set_part(config, "gate", None)  # it knows nothing of the new languages
    set_part(config, "joined", [*Facts(home.config).sizes, *[1] * len(rounds)])
    return config, plans


def _records(
    home: Source, base: Any, plans: Sequence[Plan], loaded: Sequence[Any], history: History
) -> list[ExpansionRecord]:
    """The record of each fine-tune."""
    if len(history):
        first = history.first
        facts: dict[str, Any] = {"base_model": first.base_model, "base_revision": first.base_revision}
    else:
        name, commit = base_of(base) if isinstance(base, PreTrainedModel) else name_and_commit(base, home.folder)
        size = sum(home[key].numel for key in home.tensors)
        facts = {"base_model": name, "base_revision": commit, "base_parameters": size}
    records = []
    for number, (plan, one) in enumerate(zip(plans, loaded, strict=True)):
        own = {"base_hashes": base_hashes(home)} if not len(history) and not number else {}
        records.append(
            planned_record(
                plan, old_languages=plan.old, expert_init=STAGE, pack="-".join(plan.new), **facts, **own,
                stages=[StageRecord(stage=STAGE, settings={**one.facts(), "license": _license(one.folder)})],
            )
        )  # fmt: skip
    return records


def _license(folder: Path) -> str | None:
    """The licence that a model's card names."""
    try:
        value = ModelCard.load(folder / "README.md").data.get("license") if (folder / "README.md").is_file() else None
    except Exception:  # a card that is none
        return None
    return value if isinstance(value, str) else None


def _rule(home: Source, config: Any, loaded: Sequence[Any], expansions: int, network: Any, gate: Gate | None) -> Rule:
    """Of what the tensors of the new model are made: of the base's, the earlier languages', and each fine-tune's."""
    begin = (lambda place: Copy(place.key)) if expansions else expansion_rule(home, "copy", 0, gate)
    rules: dict[int | None, Rule] = {}
    own = places(network_of(config))
    for number, one in enumerate(loaded, start=expansions + 1):
        rules[number] = one.rule({key: place for key, place in own.items() if place.number == number}, network)
    return lambda place: rules.get(place.number, begin)(place)
