"""Fine-tunes of one base become languages of one model: what a fine-tune changed are modules of its language's own,
whole or as low-rank updates, and all other text gets the base as it was. Nothing trains."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import ModelCard
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..core.errors import InputError, library_errors_at
from ..core.jsonfile import read_json
from ..core.languages import check_old_and_new
from ..core.progress import Bar
from ..core.schema import checked
from ..modeling import ExpandedConfig, LayerMoEConfig, decoder_ffns
from ..modeling.backbone import takes_hidden_states_alone
from ..modeling.part_languages import decoder_of
from ..planning.plan import Plan
from .compare import base_hashes
from .expand import base_of, expansion_rule, planned_config, planned_record
from .export import dense_config
from .facts import ExpertKind, Facts, kind_of, set_part
from .gate import Gate
from .new_experts import Maps, entry_of, layer_of, layer_places
from .peft import PeftAdapter
from .promises import check_architecture
from .reader import are_headers_alone
from .records import ExpansionRecord, History, StageRecord
from .source import (
    GENERATION,
    TEMPLATE,
    differences,
    holds_adapter,
    load_base_config,
    name_and_commit,
    resolve_checkpoint,
)
from .stored import LoadedModel, Place, Source, StoredModel, load_any_config, network_of, places
from .table import Copy, Mix, New, Rule, check_place, rewrite
from .writer import DEFAULT_SHARD_SIZE, DTYPE_NAMES

STAGE = "tuned"  # the step's name in a history
# Fields of a configuration that its computation does not read: a fine-tune's may differ.
_MAY_DIFFER = (
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "history", "task_specific_params", "id2label", "label2id", "problem_type",
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "attention_probs_dropout_prob", "hidden_dropout_prob", "router_aux_loss_coef", "output_router_logits",
    "unsloth_version", "unsloth_fixed", "pretraining_tp",
)  # fmt: skip
_OF_LIBRARY = ("transformers_version", "_from_model_config")
_UNRELATED = 1.0  # the relative change of weights that have nothing to do with the base's is at least this


@dataclass(frozen=True)
class TunedReport:
    """Result of `expand_tuned`: parameters before and after, and what a user should know."""

    out: Path
    base_parameters: int
    parameters: int
    warnings: list[str]


@dataclass
class FineTune:
    """A fine-tune of the base, whole.

    Attributes:
        name: what the user gave, without this machine's folders.
        home: the base.
        number: of `source` in the operation.
        rank: of the updates; None keeps all whole.
        weight: times the difference.
    """

    name: str
    commit: str | None
    source: Source
    home: Source
    number: int
    rank: int | None
    weight: float
    dtype: str | None
    _factors: tuple[str, Any] = ("", None)

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self.source.folder

    @cached_property
    def changed(self) -> list[str]:
        """The tensors that differ from the base's, by their names in the dense model.

        Raises:
            InputError: one is of another type, or they have nothing to do with the base's.
        """
        if are_headers_alone():  # all may differ
            return list(self.home.base)
        found, changes = [], []
        for dense, key in Bar(self.home.base.items(), desc=f"compare {self.name}", unit="tensor", leave=False):
            ours, theirs = self.home[key], self.source[dense]
            if ours.dtype != theirs.dtype and self.dtype != ours.dtype:
                raise InputError(
                    f"{self.name}: tensor {dense!r} is {theirs.dtype}, but {ours.dtype} in {self.home.name}: give "
                    f"--dtype {_torch_name(ours.dtype)} (dtype=) to convert it."
                )
            if ours.dtype == theirs.dtype and ours.same_bytes(theirs):
                continue
            change = size = 0.0
            for a, b in zip(ours.pieces(), theirs.pieces(), strict=True):
                a, b = a.double(), b.double()
                change, size = change + float((b - a).square().sum()), size + float(a.square().sum())
            if not isfinite(change):
                raise InputError(f"{self.name}: tensor {dense!r}, or the base's, has values that are not finite.")
            if change:
                found.append(dense)
                if len(ours.shape) > 1 and size:
                    changes.append((change / size) ** 0.5)
        if not found:
            raise InputError(f"{self.name}: is {self.home.name} itself: none of its tensors differs.")
        if changes and (middle := sorted(changes)[len(changes) // 2]) >= _UNRELATED:
            raise InputError(
                f"{self.name}: is no fine-tune of {self.home.name}: its matrices differ from it by {middle:.0%} "
                "of their size (the median)."
            )
        return found

    def entry(self, network: Any) -> dict[str, Any]:
        """The entry of `languages` in a configuration: each changed tensor's smallest module."""
        ties = dict(getattr(network, "all_tied_weights_keys", None) or {})
        owned: dict[str, set[str]] = {}
        mixtures = [ffn.place for ffn in decoder_ffns(network) if ffn.is_mixture]  # which stay whole
        for dense in self.changed:
            for key in (dense, *(target for target, source in ties.items() if source == dense)):
                name, _, tensor = key.rpartition(".")
                name = next((place for place in mixtures if key.startswith(f"{place}.")), name)
                owned.setdefault(name, set()).add(tensor)
        places, decoder = layer_places(network), decoder_of(network)
        layers: list[Maps] = [{} for _ in places]
        others: dict[str, Maps] = {"outside": {}, "head": {}}
        widths: list[tuple[int, str]] = []
        for name in [name for name in owned if not any(name.startswith(f"{other}.") for other in owned)]:
            if name in ("", decoder, *places):
                tensor = ".".join(filter(None, (name, sorted(owned[name])[0])))
                raise InputError(
                    f"{self.name}: {tensor} belongs to no module inside a layer, so that no language has it."
                )
            if (update := self._update(network, name, owned[name])) is not None:
                widths.append((min(network.get_submodule(name).weight.shape), name))
            if (layer := layer_of(name, places)) is not None:
                layers[layer][name.removeprefix(f"{places[layer]}.")] = update
            elif decoder and name.startswith(f"{decoder}."):
                others["outside"][name.removeprefix(f"{decoder}.")] = update
            else:
                others["head"][name] = update
        width, name = min(widths, default=(self.rank or 0, ""))
        if (self.rank or 0) > width:
            raise InputError(f"rank is {self.rank}: must be at most {width}, the narrowest side of {name}.")
        return {**entry_of(layers), **{where: maps for where, maps in others.items() if maps}}

    def _update(self, network: Any, name: str, tensors: set[str]) -> list | None:
        """How a language has a module of its own: rank, scaling and whether its bias changed; None if whole."""
        module = network.get_submodule(name)
        is_map = isinstance(module, nn.Linear | Conv1D | nn.Embedding) and takes_hidden_states_alone(type(module))  # type: ignore[arg-type]
        if self.rank is None or not is_map or "weight" not in tensors:
            return None
        return [self.rank, 1.0, *([True] if "bias" in tensors else [])]

    def rule(self, own: Mapping[str, Place], network: Any) -> Rule:
        """Of what the tensors of its language's own modules are made; `network` is the dense model."""

        def made(place: Place) -> Copy | Mix | New | None:
            dense = place.dense or place.updates or ""
            base, here = Copy(self.home.base.get(dense, dense)), Copy(dense, self.number)
            if place.update is None:
                is_tied = dense not in self.source
                if is_tied or (self.weight == 1 and self.source[dense].dtype == self.home[base.key].dtype):
                    return here
                return Mix([base, here], [1 - self.weight, self.weight])
            if dense not in self.home.base:  # tied to another's
                return None
            make = partial(self._difference, dense)
            if place.factor != "lora_B.bias":
                is_conv = isinstance(network.get_submodule(dense.rpartition(".")[0]), Conv1D)
                make = partial(self._factor, dense, str(place.factor)[:6], is_conv)
            return New(make, self.home[base.key].dtype)

        return made

    def facts(self) -> dict[str, Any]:
        """What a history says of it."""
        converted = {"dtype": _torch_name(self.dtype)} if self.dtype else {}
        how = {"rank": self.rank, "weight": self.weight, **converted}
        return {"model": self.name, "revision": self.commit, **how}

    def warnings(self, base: str, commit: str | None) -> list[str]:
        """None: it was compared with the base."""
        return []

    def _difference(self, dense: str) -> torch.Tensor:
        ours, theirs = (tensor.load().double() for tensor in (self.home[self.home.base[dense]], self.source[dense]))
        return self.weight * (theirs - ours)

    def _factor(self, dense: str, which: str, is_conv: bool) -> torch.Tensor:
        """A or B of the truncated SVD of a difference `[out, in]`."""
        if self._factors[0] != dense:  # both are written one after the other
            difference = self._difference(dense)
            B, A = best_update(difference.T if is_conv else difference, self.rank or 0)
            self._factors = dense, {"lora_A": A, "lora_B": B}
        return self._factors[1][which]


def best_update(change: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """B `[out, rank]` and A `[rank, in]` whose product is nearest to a change `[out, in]` in float64: its truncated
    singular value decomposition, by the eigenvectors of the smaller of its two Gram matrices, which takes a tenth of
    the time. Both factors have the roots of the singular values."""
    if change.shape[0] < change.shape[1]:
        A, B = best_update(change.T, rank)
        return B.T, A.T
    V = torch.linalg.eigh(change.T @ change).eigenvectors[:, -rank:].flip(1)
    product = change @ V
    root = product.norm(dim=0).sqrt()
    return product / root.clamp(min=torch.finfo(root.dtype).tiny), root[:, None] * V.T


def _torch_name(dtype: str) -> str:
    return next((str(own).removeprefix("torch.") for own, name in DTYPE_NAMES.items() if name == dtype), dtype)


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
        InputError: a fine-tune is of another base, architecture, shape, vocabulary or type, or its configuration
            computes otherwise (the message names what differs); the languages contradict each other; or `out` cannot
            be written.
    """
    rounds = [codes_of(languages) for languages in tuned]
    if not rounds:
        raise InputError("tuned is empty: give each language's fine-tune.")
    if rank is not None and rank < 1:
        raise InputError(f"rank is {rank}: must be at least 1.")
    if not 0 < weight <= 2:
        raise InputError(f"weight is {weight}: must be above 0 and at most 2; 1 is the fine-tune as it is.")
    home = _home(base, revision)
    history = History.of(home.config)
    known = history.first.old_languages if len(history) else list(old_languages)
    if len(history) and old_languages:
        raise InputError(f"old_languages: {home.name} says its own already ({', '.join(known) or 'none'}).")
    check_old_and_new([*dict.fromkeys([*known, *history.languages])], [code for codes in rounds for code in codes])
    network = home.network if not len(history) else network_of(dense_config(home.config))
    stored_type = DTYPE_NAMES[getattr(torch, dtype)] if dtype else None
    loaded: list[FineTune | PeftAdapter] = []
    for one in tuned.values():
        number = 1 + sum(isinstance(other, FineTune) for other in loaded)
        loaded.append(_loaded(home, one, number, rank, weight, stored_type))
    if stored_type and stored_type not in {home[key].dtype for key in home.tensors}:
        raise InputError(f"dtype is {dtype}, but no tensor of {home.name} is: fine-tunes get the base's type.")
    folders = [one.folder for one in loaded]
    check_place(base, out, overwrite, home.folder, *folders)
    entries = [one.entry(network) for one in loaded]
    is_loaded = isinstance(home, LoadedModel)
    files = {} if is_loaded else _settings_of(home.folder, rounds, folders, entries)
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
    name, commit = records[0].base_model or "", records[0].base_revision
    said = [line for one in loaded for line in one.warnings(name, commit)]
    first, last = History.of(config).first, History.of(config).last
    return TunedReport(Path(out or ""), first.base_parameters or 0, last.parameters or 0, said)


def codes_of(languages: str) -> list[str]:
    """The codes of a fine-tune's languages, which commas join."""
    return [code.strip() for code in languages.split(",")]


def _home(base: Any, revision: str | None) -> Source:
    """The base, or the model of languages that gets more."""
    if isinstance(base, PreTrainedModel):
        source: Source = LoadedModel(base)
    else:
        folder = resolve_checkpoint(base, revision)
        source = StoredModel(base, load_any_config(folder), revision)
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
    home: Source, tuned: Any, number: int, rank: int | None, weight: float, dtype: str | None
) -> FineTune | PeftAdapter:
    """A fine-tune, checked against the base's configuration, shapes and vocabulary; or an adapter of PEFT."""
    if isinstance(tuned, PreTrainedModel) != isinstance(home, LoadedModel):
        raise InputError("tuned: give loaded models for a loaded base, and folders or hub ids for a checkpoint.")
    if isinstance(tuned, PreTrainedModel):
        source: Source = LoadedModel(tuned)
        name, commit = base_of(tuned)
    else:
        if holds_adapter(tuned):
            if rank is not None or weight != 1:
                raise InputError(f"{tuned}: is an adapter of PEFT, which joins as it is: leave rank and weight out.")
            return PeftAdapter.load(tuned)
        folder = resolve_checkpoint(tuned)
        source = StoredModel(tuned, load_base_config(folder))
        name, commit = name_and_commit(tuned, folder)
    base = home.config if not isinstance(home.config, ExpandedConfig) else dense_config(home.config)
    if base.model_type != source.config.model_type:
        raise InputError(f"{name}: is a {source.config.model_type} model, but {home.name} is a {base.model_type}.")
    longer = f": a model with other tokens is no fine-tune of {home.name}"
    for what, ours, theirs in differences(base, source.config, _MAY_DIFFER):
        more = longer if what == "vocab_size" else ", so that it computes otherwise with the same weights"
        raise InputError(f"{name}: {what} is {theirs!r}, but {ours!r} in {home.name}{more}.")
    for dense, key in home.base.items():
        ours, there = home.shapes[key], source.shapes.get(dense)
        if ours != there:
            has = "no such tensor" if there is None else f"shape {list(there)}"
            raise InputError(f"{name}: tensor {dense!r} has shape {list(ours)} in {home.name}, but {has} here.")
    if isinstance(source, StoredModel):
        _check_vocabulary(home, source)
    return FineTune(name, commit, source, home, number, rank, weight, dtype)


def _check_vocabulary(home: Source, source: Source) -> None:
    """Refuses other tokens, where both have a tokenizer in one file."""
    files = [one.folder / "tokenizer.json" for one in (home, source)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    with library_errors_at(f"{source.name}: its tokenizer.json cannot be read"):
        ours, theirs = (
            {number: token for token, number in Tokenizer.from_file(str(file)).get_vocab().items()} for file in files
        )
    for number in sorted({*ours, *theirs}):
        if ours.get(number) != theirs.get(number):
            raise InputError(
                f"{source.name}: token {number} is {theirs.get(number)!r}, but {ours.get(number)!r} in {home.name}: a "
                "model with other tokens is no fine-tune of it."
            )


def _settings_of(
    home: Path, rounds: Sequence[Sequence[str]], folders: Sequence[Path], entries: Sequence[dict]
) -> dict[str, bytes]:
    """The files of the fine-tunes' own chat templates, by name; their generation settings that differ from the base's
    are written into their entries."""
    files: dict[str, bytes] = {}
    base = _json(home / GENERATION)
    template = home / TEMPLATE
    for codes, folder, entry in zip(rounds, folders, entries, strict=True):
        own = folder / TEMPLATE
        if own.is_file() and not (template.is_file() and template.read_bytes() == own.read_bytes()):
            files |= {f"additional_chat_templates/{code}.jinja": own.read_bytes() for code in codes}
        theirs = _json(folder / GENERATION)
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
