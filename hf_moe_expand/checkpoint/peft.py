"""Adapters of PEFT: the LoRA of each language becomes an expansion beside a dense base, byte for byte, and an
expansion of adapters is exported in PEFT's format."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import InputError, library_errors_at
from ..core.jsonfile import read_json, write_json
from ..core.progress import Bar
from ..core.schema import checked, shown_value
from .compare import moved_tensors
from .export import StoredUpdate, dense_config, experts_of, own_places, updates_of
from .facts import kind_of
from .new_experts import adapter_of, lora_maps
from .reader import TORCH_DTYPES, StoredTensor, tensors_of_file
from .records import ExpansionRecord, History, without_folders
from .source import ADAPTER, load_expanded_config, own_name, resolve_adapter
from .stored import Place, StoredModel, network_of, stored_tensors
from .table import Given, Rule, given_tensor
from .writer import OutputTensor, check_apart, check_output, new_folder, write_tensors

WEIGHTS = "adapter_model.safetensors"
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# The fields of a LoRA's configuration that say where its updates are and how they are scaled, or that its training
# alone reads. A field that is not here must have PEFT's default.
_TAKEN = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
))  # fmt: skip
# First weights for which PEFT changes the base's own.
_CHANGE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_NO_ADAPTERS = "its experts are no adapters of PEFT"
_WHOLE = "its languages have whole modules of their own"
REFUSED = {
    **{(kind, "export-to-peft"): _NO_ADAPTERS for kind in ("copies", "lora", "added")},
    ("tuned", "export-to-peft"): _WHOLE,
}
# The ranks that vLLM's --max-lora-rank takes.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA in PEFT's format: its name, the hub's or its folder's; its adapter_config.json, as `fields` and as `lora`
    in PEFT's class; and what its file holds, by the names there."""

    name: str
    folder: Path
    fields: dict[str, Any]
    lora: LoraConfig
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def load(cls, name: str | os.PathLike) -> "PeftAdapter":
        """Reads a folder's or a hub id's adapter, without its weights; refuses more than low-rank updates of linear
        maps."""
        folder = resolve_adapter(name)
        read = read_json(folder / ADAPTER, "an adapter's configuration")
        _check_fields(read, name)
        with library_errors_at(f"{name}: PEFT cannot read its {ADAPTER}"):
            lora = PeftConfig.from_peft_type(**read)
        return cls(own_name(name), folder, read, lora, tensors_of_file(folder / WEIGHTS))

    def factors(self, network: Any) -> dict[str, StoredTensor]:
        """Its tensors by the maps of a dense model: `model.layers.0.self_attn.q_proj.lora_A.weight`."""
        by_factor: dict[str, dict[str, StoredTensor]] = {"A": {}, "B": {}}
        for key, tensor in self.tensors.items():
            match = _FACTOR.fullmatch(key)
            if match is None:
                raise InputError(f"{self.name}: holds more than low-rank updates of linear maps ({key}).")
            by_factor[match[2]][f"{match[1]}.weight"] = tensor
        return {
            f"{key.removesuffix('.weight')}.lora_{factor}.weight": tensor
            for factor, tensors in by_factor.items()
            for key, tensor in stored_tensors(SimpleNamespace(tensors=tensors), network).items()  # type: ignore[arg-type]
        }

    def entry(self, network: Any) -> dict[str, Any]:
        """The entry of `languages` in a configuration; `network` is the dense model, here and below."""
        return adapter_of(network, self.lora, self.name)

    def rule(self, own: Iterable[Place], network: Any) -> Rule:
        """Of what the tensors of its language's own modules are made; refuses one that is left over or missing."""
        factors, found = self.factors(network), {}
        for place in own:
            factor = f"{str(place.updates).rpartition('.')[0]}.{place.factor}"
            if factor not in factors:
                raise InputError(f"{self.name}: {WEIGHTS} lacks {factor}, which {ADAPTER} names.")
            found[place.key] = Given(factors.pop(factor))
        for factor in factors:
            raise InputError(f"{self.name}: updates {factor}, which {ADAPTER} does not name in the base.")
        return lambda place: found[place.key]

    def facts(self) -> dict[str, Any]:
        return {"model": self.name, ADAPTER: without_folders(self.fields)}

    def warnings(self, expansion: ExpansionRecord) -> list[str]:
        """What its configuration says of its base that differs from an expansion's, by name and by commit."""
        base, commit = expansion.base_model or "", expansion.base_revision
        own, revision = self.fields.get("base_model_name_or_path"), self.fields.get("revision")
        if isinstance(own, str) and own and own_name(own).rpartition("/")[2].lower() != base.rpartition("/")[2].lower():
            return [f"warning: {self.name} was trained on {without_folders(own)}, by its name another base than {base}"]
        if isinstance(revision, str) and re.fullmatch("[0-9a-f]{40}", revision) and commit not in (None, revision):
            return [f"warning: {self.name} was trained on {own} at commit {revision[:7]}; the base is at {commit[:7]}"]  # type: ignore[index]
        return []


def _check_fields(read: Mapping[str, Any], name: str | os.PathLike) -> None:
    usual = LoraConfig().to_dict()
    wrong = [field for field, value in read.items() if field not in _TAKEN and value and value != usual.get(field)]
    plain = {
        "peft_type": read.get("peft_type") == "LORA",
        "task_type": read.get("task_type") in (None, "CAUSAL_LM"),
        # For these first weights PEFT changed the base itself.
        "init_lora_weights": not str(read.get("init_lora_weights")).lower().startswith(_CHANGE_BASE),
    }
    if wrong := [*wrong, *(field for field, is_plain in plain.items() if not is_plain)]:
        value = shown_value(read.get(wrong[0]))
        raise InputError(f"{name}: {ADAPTER} has {wrong[0]} {value}, which is no plain low-rank update of linear maps.")


# --- out ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LanguageAdapter:
    """The adapter of an expansion.

    Attributes:
        updates: by the name of the map in the dense model; `biases` has the key of B's bias, where a map has one.
        whole: the modules that are no updates, norms alone: the key of each tensor, by its name in the dense model.
        network: the dense model, on the meta device; `base` has its name and its commit.
        kept: the configuration with which `expand --tuned` took it; None without one.
    """

    languages: list[str]
    updates: Mapping[str, StoredUpdate]
    biases: Mapping[str, str]
    whole: Mapping[str, str]
    network: Any
    kept: dict[str, Any] | None
    base: tuple[str | None, str | None]

    @property
    def name(self) -> str:
        return "-".join(self.languages)

    def fields(self) -> dict[str, Any]:
        """Its adapter_config.json: the kept one where that still says what its updates are, else a new one."""
        fields = self.kept
        if fields is None or not self._is_said_by(PeftConfig.from_peft_type(**fields)):
            lora = self._lora(sorted({name.rpartition(".")[2] for name in self.updates}))
            if not self._is_said_by(lora):
                lora = self._lora(sorted(self.updates))  # the same name stands in layers that have no update
            fields = {
                name: sorted(value) if isinstance(value, set) else value for name, value in lora.to_dict().items()
            }
        name, commit = self.base
        known = commit is None and fields.get("base_model_name_or_path")
        return {**fields, "base_model_name_or_path": known or name, "revision": commit or fields.get("revision")}

    def _is_said_by(self, lora: LoraConfig) -> bool:
        said = {name: [update.rank, update.scaling] for name, update in self.updates.items()}
        try:
            return lora_maps(self.network, lora, ADAPTER) == said
        except InputError:  # it names more than maps
            return False

    def tensors(self, source: StoredModel) -> list[OutputTensor]:
        made = []
        for name, update in self.updates.items():
            place, b, a = f"base_model.model.{name}", source[update.lora_B], source[update.lora_A]
            if isinstance(self.network.get_submodule(name), nn.Embedding):
                turned = {"A": b.load().T.contiguous(), "B": a.load().T.contiguous()}  # as PEFT has them
                made += [given_tensor(f"{place}.lora_embedding_{x}", tensor) for x, tensor in turned.items()]
                continue
            made += [OutputTensor.copy_of(tensor, f"{place}.lora_{x}.weight") for x, tensor in (("A", a), ("B", b))]
            if name in self.biases:
                made.append(OutputTensor.copy_of(source[self.biases[name]], f"{place}.lora_B.bias"))
            elif self.biases:
                made.append(given_tensor(f"{place}.lora_B.bias", torch.zeros(b.shape[0], dtype=TORCH_DTYPES[b.dtype])))
        return [*made, *(OutputTensor.copy_of(source[key], f"base_model.model.{n}") for n, key in self.whole.items())]

    def _lora(self, targets: list[str]) -> LoraConfig:
        """A configuration for these updates: one rank and one alpha, and patterns for the maps that differ."""
        (rank, scaling), _ = Counter((one.rank, one.scaling) for one in self.updates.values()).most_common(1)[0]
        plain, stabilised = _alpha(rank, scaling, False), _alpha(rank, scaling, True)
        rslora = not isinstance(plain, int) and isinstance(stabilised, int)
        alpha = stabilised if rslora else plain
        others = {name: one for name, one in self.updates.items() if (one.rank, one.scaling) != (rank, scaling)}
        alphas = {name: _alpha(one.rank, one.scaling, rslora) for name, one in others.items()}
        return LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]
            target_modules=targets,
            use_rslora=rslora,
            rank_pattern={name: one.rank for name, one in others.items() if one.rank != rank},
            alpha_pattern={name: value for name, value in alphas.items() if value != alpha},
            fan_in_fan_out=any(isinstance(self.network.get_submodule(name), Conv1D) for name in self.updates),
            task_type="CAUSAL_LM",
            inference_mode=True,
            lora_bias=bool(self.biases),
            ensure_weight_tying=len({one.lora_A for one in self.updates.values()}) < len(self.updates),
            modules_to_save=sorted({name.rpartition(".")[0] for name in self.whole}) or None,
        )


def _alpha(rank: int, scaling: float, rslora: bool) -> float:
    """The alpha that gives a scaling, a whole number if one does."""
    divisor = sqrt(rank) if rslora else rank
    whole = round(scaling * divisor)
    return whole if whole / divisor == scaling else scaling * divisor


def language_adapters(source: StoredModel, language: str | None) -> Iterator[LanguageAdapter]:
    """The adapter of a language, or of each expansion; refuses other experts, and a base that has trained."""
    config, history = source.config, History.of(source.config)
    if config.expert_kind != "adapter":
        raise InputError(f"{source.folder}: {_NO_ADAPTERS}, but {kind_of(config).words}.")
    verdict = moved_tensors(source)
    changed = next((stage.stage for stage in history.stages if stage.changes_everything), None)
    if verdict.moved or (changed and not verdict.checked):
        moved = f"{verdict.names} moved since the expansion" if verdict.moved else f"`{changed}` trained more"
        raise InputError(f"{source.folder}: {moved}, so that its adapters are none of {history.first.base_model}.")
    network = network_of(dense_config(config))
    having = {code: number for code, number in history.classes.items() if number}
    if language is not None and language not in having:
        raise InputError(f"{source.folder}: has no adapter for {language}; it has some for {', '.join(having)}.")
    for number, record in enumerate(history.expansions, start=1):
        if language is not None and number != having[language]:
            continue
        code = record.new_languages[0]
        kept = next((stage.settings for stage in record.stages if ADAPTER in (stage.settings or {})), None) or {}
        own = own_places(source, *experts_of(source, code))
        updates, whole = updates_of(source, own), {place.dense: place.key for place in own if place.dense}
        tied = [str(one.updates) for one in own if one.factor == "lora_A.weight" and one.key not in source]
        updates |= {key: updates[network.all_tied_weights_keys[key]] for key in tied}
        if not updates or any(len(source.shapes[key]) > 1 for key in whole.values()):
            raise InputError(f"{source.folder}: {code}: {_WHOLE}.")
        biases = {(one.updates or "").rpartition(".")[0]: one.key for one in own if one.factor == "lora_B.bias"}
        maps = [network.get_submodule(key.removesuffix(".weight")) for key in updates]
        if biases and any(isinstance(module, nn.Embedding) for module in maps):
            raise InputError(f"{source.folder}: {code}: PEFT has not the update of an embedding beside biases.")
        yield LanguageAdapter(
            record.new_languages, {key.removesuffix(".weight"): update for key, update in updates.items()},
            biases, whole, network, kept.get(ADAPTER), (history.first.base_model, history.first.base_revision),
        )  # fmt: skip


@dataclass(frozen=True)
class ExportedAdapters:
    """Result of `export_peft`: the base's name, and the folder and largest rank of each adapter, by its languages."""

    base: str | None
    folders: dict[str, Path]
    ranks: dict[str, int]

    def lines(self) -> list[str]:
        wrote = [f"wrote {out}: an adapter of rank {self.ranks[name]}" for name, out in self.folders.items()]
        most = max(self.ranks.values())
        rank = next((taken for taken in _VLLM_RANKS if taken >= most), most)
        modules = " ".join(f"{name}={out}" for name, out in self.folders.items())
        # With a free slot: on a CPU vLLM 0.32 gives requests of the base in a mixed batch the last slot's adapter.
        slots = f"--max-loras {len(self.folders) + 1} --max-lora-rank {rank}"
        return [*wrote, f"vllm serve {self.base} --enable-lora {slots} --lora-modules {modules}"]


@checked
def export_peft(
    model: str | os.PathLike, out: str | os.PathLike, *, language: str | None = None, overwrite: bool = False
) -> ExportedAdapters:
    """Writes ordinary adapters of PEFT, whose model is the expanded one where it is told the language.

    Args:
        model: expanded checkpoint of adapters, whose base has not trained.
        out: folder of the adapter; of several, a folder for each is written in it.
        language: write the adapter of this language alone.
    """
    source = StoredModel(model, load=load_expanded_config)
    check_apart(Path(out), source.folder)
    adapters = list(language_adapters(source, language))
    folders = {one.name: Path(out) if len(adapters) == 1 else Path(out, one.name) for one in adapters}
    for place in folders.values():
        check_output(place, overwrite)
    for one in adapters:
        tensors, fields = one.tensors(source), one.fields()
        # Not by `rewrite`: an adapter is no model with places, and PEFT has its factors under names of its own.
        with new_folder(folders[one.name], overwrite, sum(tensor.nbytes for tensor in tensors)) as partial:
            write_json(partial / ADAPTER, fields)
            with Bar(total=len(tensors), desc="export", unit="tensor") as bar:
                write_tensors(partial / WEIGHTS, tensors, bar)
    ranks = {one.name: max(update.rank for update in one.updates.values()) for one in adapters}
    return ExportedAdapters(History.of(source.config).first.base_model, folders, ranks)
