"""Fine-tunes of one base become languages of one model: what a fine-tune changed are modules of its language's own,
whole or as low-rank updates, and all other text gets the base as it was. Nothing trains."""

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import ModelCard
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..core.errors import InputError
from ..core.languages import check_old_and_new
from ..core.progress import Bar
from ..core.schema import checked
from ..modeling import ExpandedConfig, LayerMoEConfig, decoder_ffns
from ..modeling.backbone import takes_hidden_states_alone
from ..modeling.part_languages import decoder_of
from ..planning.plan import Plan
from .arguments import TunedSettings
from .compare import base_hashes, moved_tensors
from .expand import ExpansionReport, expansion_rule, planned_config, planned_record
from .export import dense_config, generation_of
from .facts import ExpertKind, Facts, set_part
from .gate import Gate
from .new_experts import Maps, entry_of, layer_of, layer_places
from .peft import PeftAdapter
from .promises import check_architecture
from .reader import ALONE
from .records import ExpansionRecord, History, StageRecord
from .source import TEMPLATE, differences, holds_adapter, load_base_config
from .stored import LoadedModel, Place, Source, StoredModel, network_of, places, source_of
from .table import Copy, Mix, New, Rule, check_place, rewrite
from .tokenizer import load_tokenizer
from .writer import DEFAULT_SHARD_SIZE, DTYPE_NAMES

STAGE = "tuned"  # the step's name in a history
_OF_LIBRARY = ("transformers_version", "_from_model_config")
# Fields of a configuration that its computation does not read: a fine-tune's may differ.
_MAY_DIFFER = (
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "history", "task_specific_params", "id2label", "label2id", "problem_type",
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "attention_probs_dropout_prob", "hidden_dropout_prob", "router_aux_loss_coef", "output_router_logits",
    "unsloth_version", "unsloth_fixed", "pretraining_tp",
)  # fmt: skip
_UNRELATED = 1.0  # the least relative change of weights that have nothing to do with the base's


@dataclass
class FineTune:
    """A fine-tune of the base `home`, whole; `number` is that of its `source` in the operation, and `dtype` the type to
    which it is converted."""

    source: Source
    home: Source
    number: int
    settings: TunedSettings
    dtype: str | None
    _factors: tuple[str, Any] = ("", None)

    @property
    def name(self) -> str:
        return self.source.origin[0]

    @property
    def folder(self) -> Path:
        return self.source.folder

    @cached_property
    def changed(self) -> list[str]:
        """The tensors that differ from the base's, by their names in the dense model; refuses other types, and weights
        that have nothing to do with the base's."""
        if ALONE.get():  # all may differ
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
        layer_names, decoder = layer_places(network), decoder_of(network)
        layers: list[Maps] = [{} for _ in layer_names]
        others: dict[str, Maps] = {"outside": {}, "head": {}}
        for name in [name for name in owned if not any(name.startswith(f"{other}.") for other in owned)]:
            if name in ("", decoder, *layer_names):
                tensor = ".".join(filter(None, (name, sorted(owned[name])[0])))
                raise InputError(f"{self.name}: {tensor} belongs to no module inside a layer: no language has it.")
            update = self._update(network, name, owned[name])
            if (layer := layer_of(name, layer_names)) is not None:
                layers[layer][name.removeprefix(f"{layer_names[layer]}.")] = update
            elif decoder and name.startswith(f"{decoder}."):
                others["outside"][name.removeprefix(f"{decoder}.")] = update
            else:
                others["head"][name] = update
        return {**entry_of(layers), **{where: maps for where, maps in others.items() if maps}}

    def _update(self, network: Any, name: str, tensors: set[str]) -> list | None:
        """Rank, scaling and whether the bias changed, of a language's own module; None if it is whole."""
        module = network.get_submodule(name)
        is_map = isinstance(module, nn.Linear | Conv1D | nn.Embedding) and takes_hidden_states_alone(type(module))  # type: ignore[arg-type]
        rank = self.settings.rank
        if rank is None or not is_map or "weight" not in tensors:
            return None
        if rank > (narrowest := min(module.weight.shape)):  # type: ignore[arg-type]
            raise InputError(f"rank is {rank}: must be at most {narrowest}, the narrowest side of {name}.")
        return [rank, 1.0, *([True] if "bias" in tensors else [])]

    def rule(self, own: Iterable[Place], network: Any) -> Rule:
        """Of what the tensors of its language's own modules are made; `network` is the dense model."""
        weight = self.settings.weight

        def made(place: Place) -> Copy | Mix | New | None:
            dense = place.dense or place.updates or ""
            base, here = Copy(self.home.base.get(dense, dense)), Copy(dense, self.number)
            if place.update is None:
                is_tied = dense not in self.source
                if is_tied or (weight == 1 and self.source[dense].dtype == self.home[base.key].dtype):
                    return here
                return Mix([base, here], [1 - weight, weight])
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
        return {"model": self.name, "revision": self.source.origin[1], **self.settings.model_dump(), **converted}

    def _difference(self, dense: str) -> torch.Tensor:
        ours, theirs = (tensor.load().double() for tensor in (self.home[self.home.base[dense]], self.source[dense]))
        return self.settings.weight * (theirs - ours)

    def _factor(self, dense: str, which: str, is_conv: bool) -> torch.Tensor:
        """A or B of the truncated SVD of a difference `[out, in]`."""
        if self._factors[0] != dense:  # both are written one after the other
            difference = self._difference(dense)
            B, A = best_update(difference.T if is_conv else difference, self.settings.rank or 0)
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


def _fine_tune(home: Source, tuned: Any, number: int, settings: TunedSettings, dtype: str | None) -> FineTune:
    """A fine-tune, checked against the base's configuration, shapes and vocabulary."""
    source = source_of(tuned, load=load_base_config)
    one = FineTune(source, home, number, settings, dtype)
    base = home.config if not isinstance(home.config, ExpandedConfig) else dense_config(home.config)
    for what, ours, theirs in [
        ("model_type", base.model_type, source.config.model_type), *differences(base, source.config, _MAY_DIFFER)
    ]:  # fmt: skip
        if ours != theirs:
            raise InputError(f"{one.name}: {what} is {theirs!r}, but {ours!r} in {home.name}.")
    for dense, key in home.base.items():
        if home.shapes[key] != source.shapes.get(dense):
            has = source.shapes.get(dense, "no such tensor")
            raise InputError(f"{one.name}: tensor {dense!r}: {has}, but {home.shapes[key]} in {home.name}.")
    if isinstance(source, StoredModel):
        _check_vocabulary(home, source)
    return one


def _check_vocabulary(home: Source, source: Source) -> None:
    """Refuses other tokens, where both have a tokenizer in one file."""
    files = [one.folder / "tokenizer.json" for one in (home, source)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    # As the library loads them: it adds the end token of a tokenizer's class, and writes it where it saves one.
    ours, theirs = (
        {number: token for token, number in load_tokenizer(one.folder, one.name).get_vocab().items()}
        for one in (home, source)
    )
    for number in sorted({*ours, *theirs}):
        if ours.get(number) != theirs.get(number):
            own, its = ours.get(number), theirs.get(number)
            raise InputError(f"{source.name}: token {number} is {its!r}, but {own!r} in {home.name}.")


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
        old_languages: the base's own languages, as far as they are known.
        rank: keeps of each map's difference, and of embedding and head, the best update of this rank (its truncated
            singular value decomposition, in float64); norms and biases stay whole. None keeps all whole.
        weight: times the difference: 1 is the fine-tune, 0.5 its mean with the base.
        dtype: the base's type, to which a fine-tune in another one is converted.
        gate: the language gate of this base, for these languages (`gate_from_file`).

    Returns an `ExpansionReport`, or the loaded model.

    Raises:
        InputError: a fine-tune is of another base, architecture, configuration, shape, vocabulary or type (the message
            names what differs); the languages contradict each other; or `out` cannot be written.
    """
    home, settings = _home(base, revision), TunedSettings(rank=rank, weight=weight)
    rounds, known = [codes_of(languages) for languages in tuned], History.of(home.config)
    old = _old_languages(home, rounds, old_languages)
    network = network_of(dense_config(home.config)) if len(known) else home.network
    loaded = _loaded(home, tuned.values(), settings, dtype)
    check_place(base, out, overwrite, home.folder, *(one.folder for one in loaded))
    entries, is_loaded = [one.entry(network) for one in loaded], isinstance(home, LoadedModel)
    files = {} if is_loaded else _settings_of(home.folder, rounds, loaded, entries)
    plans, records = _expansions(home, rounds, old, loaded)
    config = _config(home, entries, plans, gate)
    history = History([*known.expansions, *records]).with_last(language_gate=config.language_gate)
    made = rewrite(
        [home, *(one.source for one in loaded if isinstance(one, FineTune))],
        config, _rule(home, config, loaded, network, gate), out, record=history, title=STAGE, files=files,
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip
    if is_loaded:
        return made
    adapters = [one for one in loaded if isinstance(one, PeftAdapter)]
    said = [line for one in adapters for line in one.warnings(history.first)]
    if adapters and (verdict := moved_tensors(home)).moved:  # type: ignore[arg-type]
        said.append(f"warning: {verdict.names} moved since the expansion: an adapter of the base computes otherwise")
    parameters = History.of(config).last.parameters or 0
    return ExpansionReport(Path(out or ""), history.first.base_parameters or 0, parameters, warnings=said)


def _old_languages(home: Source, rounds: Sequence[Sequence[str]], given: Sequence[str]) -> list[str]:
    """The base's own languages, after checking those that the fine-tunes add."""
    history = History.of(home.config)
    if len(history) and given:
        raise InputError(f"old_languages: {home.name} says its own already.")
    old = history.first.old_languages if len(history) else list(given)
    check_old_and_new([*dict.fromkeys([*old, *history.languages])], [code for codes in rounds for code in codes])
    return old


def codes_of(languages: str) -> list[str]:
    """The codes of a fine-tune's languages, which commas join."""
    return [code.strip() for code in languages.split(",")]


def _home(base: Any, revision: str | None) -> Source:
    source = source_of(base, revision=revision)
    config, name = source.config, source.name
    if not isinstance(config, ExpandedConfig):
        check_architecture(config, name)
        if config.is_encoder_decoder:
            raise InputError(f"{name}: is an encoder-decoder, but fine-tunes become languages of decoders alone.")
    elif "languages" not in (config.parts or {}) or not isinstance(config, LayerMoEConfig):
        raise InputError(f"{name}: fine-tunes join a model of `expand --tuned` or of adapters, or a dense base.")
    elif (stage := History.of(config).trained_base) is not None:
        raise InputError(f"{name}: `{stage}` trained the base inside, of which no other model is a fine-tune.")
    return source


def _loaded(
    home: Source, tuned: Iterable[Any], settings: TunedSettings, dtype: str | None
) -> list[FineTune | PeftAdapter]:
    """The fine-tunes and the adapters of PEFT; refuses a type that the base does not have."""
    stored_type = DTYPE_NAMES[getattr(torch, dtype)] if dtype else None
    loaded: list[FineTune | PeftAdapter] = []
    for one in tuned:
        if isinstance(one, PreTrainedModel) != isinstance(home, LoadedModel):
            raise InputError("tuned: give loaded models for a loaded base, and folders or hub ids for a checkpoint.")
        if not isinstance(one, PreTrainedModel) and holds_adapter(one):
            if settings != TunedSettings():
                raise InputError(f"{one}: is an adapter of PEFT, which joins as it is: leave rank and weight out.")
            loaded.append(PeftAdapter.load(one))
        else:
            number = 1 + sum(isinstance(other, FineTune) for other in loaded)
            loaded.append(_fine_tune(home, one, number, settings, stored_type))
    if not loaded:
        raise InputError("tuned is empty: give each language's fine-tune.")
    if stored_type and stored_type not in {home[key].dtype for key in home.tensors}:
        raise InputError(f"dtype is {dtype}, but no tensor of {home.name} is: fine-tunes get the base's type.")
    return loaded


def _settings_of(
    home: Path, rounds: Sequence[Sequence[str]], loaded: Sequence[Any], entries: Sequence[dict]
) -> dict[str, bytes]:
    """The files of own chat templates, by name; own generation settings are written into the entries."""
    files: dict[str, bytes] = {}
    base, template = generation_of(home), home / TEMPLATE
    for codes, one, entry in zip(rounds, loaded, entries, strict=True):
        own = one.folder / TEMPLATE
        if own.is_file() and not (template.is_file() and template.read_bytes() == own.read_bytes()):
            files |= {f"additional_chat_templates/{code}.jinja": own.read_bytes() for code in codes}
        theirs = generation_of(one.folder).items()
        if differ := {key: value for key, value in theirs if value != base.get(key) and key not in _OF_LIBRARY}:
            entry["generation"] = differ
    return files


def _expansions(
    home: Source, rounds: Sequence[Sequence[str]], old: Sequence[str], loaded: Sequence[Any]
) -> tuple[list[Plan], list[ExpansionRecord]]:
    facts = Facts(home.config)
    history, plans, records = facts.history, [], []
    if len(history):
        of_base = {"base_model": history.first.base_model, "base_revision": history.first.base_revision}
    else:
        of_base = home.as_base
    hashes = None if len(history) else base_hashes(home)
    known = list(dict.fromkeys([*old, *history.languages]))
    for number, (codes, one) in enumerate(zip(rounds, loaded, strict=True), start=1):
        counts = [count + number for count in facts.counts]
        plans.append(Plan(STAGE, counts, old=known, new=list(codes), exclusive=True))
        step = StageRecord(stage=STAGE, settings={**one.facts(), "license": _license(one.folder)})
        records.append(
            planned_record(
                plans[-1], old_languages=known, expert_init=STAGE, pack="-".join(codes), stages=[step],
                base_hashes=hashes if number == 1 else None, **of_base,
            )
        )  # fmt: skip
        known = [*known, *codes]
    return plans, records


def _config(home: Source, entries: Sequence[dict], plans: Sequence[Plan], gate: Gate | None) -> Any:
    config: Any
    earlier, counts = [plan.experts_per_layer for plan in plans[:-1]], plans[-1].experts_per_layer
    if not isinstance(home.config, ExpandedConfig):
        kind = ExpertKind("adapter", {"adapters": list(entries)})
        config = planned_config(home.config, plans[-1], kind, gate, earlier_experts_per_layer=earlier or None)
    elif gate is not None:
        raise InputError("gate: a gate of the base knows only the new languages: fit one to the model (`gates`).")
    else:
        config = copy.deepcopy(home.config)
        earlier = [*config.counts_of_expansions, *earlier]
        config.num_experts_per_layer, config.earlier_experts_per_layer = counts, earlier
        set_part(config, "languages", [*config.parts["languages"], *entries])
        set_part(config, "gate", None)  # it knows nothing of the new languages
    set_part(config, "joined", [*Facts(home.config).sizes, *[1] * len(plans)])
    return config


def _license(folder: Path) -> str | None:
    with suppress(Exception):  # of a card that is none
        if (folder / "README.md").is_file():
            value = ModelCard.load(folder / "README.md").data.get("license")
            return value if isinstance(value, str) else None
    return None


def _rule(home: Source, config: Any, loaded: Sequence[Any], network: Any, gate: Gate | None) -> Rule:
    known, own = len(History.of(home.config)), places(network_of(config)).values()
    begin = (lambda place: Copy(place.key)) if known else expansion_rule(home, "copy", 0, gate)
    rules: dict[int | None, Rule] = {
        number: one.rule([place for place in own if place.number == number], network)
        for number, one in enumerate(loaded, start=known + 1)
    }
    return lambda place: rules.get(place.number, begin)(place)
