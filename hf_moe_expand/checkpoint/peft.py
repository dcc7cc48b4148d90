"""Adapters of PEFT: the LoRA of each language becomes an expansion beside a dense base, byte for byte, and an
expansion of adapters is exported in PEFT's format."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peft import LoraConfig, PeftConfig, __version__
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from ..core.errors import InputError, first_line
from ..core.jsonfile import read_json, write_json
from ..core.languages import check_old_and_new
from ..core.progress import Bar
from ..core.schema import checked, shown_value
from ..modeling.part_adapters import maps_of
from ..planning.plan import Plan
from .compare import moved_tensors
from .expand import expansion_rule, planned_config, planned_record
from .export import StoredUpdate, dense_config, experts_of, lora_updates
from .gate import Gate
from .kinds import AdapterKind, kind_of
from .new_experts import Maps, adapter_of, entry_of, layer_modules, update_of
from .promises import check_architecture
from .reader import StoredTensor, tensors_of_file
from .records import History, StageRecord, without_folders
from .source import (
    ADAPTER,
    load_base_config,
    load_expanded_config,
    own_name,
    resolve_adapter,
    resolve_checkpoint,
)
from .stored import StoredModel, network_of, stored_tensors
from .table import Given, rewrite
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_apart, check_output, new_folder, write_tensors

WEIGHTS = "adapter_model.safetensors"
STAGE = "from-peft"  # the step's name in a history
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# The fields of a LoRA's configuration that say where its updates are and how they are scaled, or that its training
# alone reads. A field that is not here must have PEFT's default.
_TAKEN = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "use_rslora",
))  # fmt: skip
# First weights for which PEFT changes the base's own.
_CHANGE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_NO_ADAPTERS = "its experts are no adapters of PEFT"
REFUSED = {(kind, "export-to-peft"): _NO_ADAPTERS for kind in ("copies", "lora", "added")}
# The ranks that vLLM's --max-lora-rank takes.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA in PEFT's format.

    Attributes:
        name: its hub id, or the name of its folder.
        fields: its adapter_config.json, and `lora` the same in PEFT's class.
        tensors: what its file holds, by the names there.
    """

    name: str
    folder: Path
    fields: dict[str, Any]
    lora: LoraConfig
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def load(cls, name: str | os.PathLike) -> "PeftAdapter":
        """Reads a folder's or a hub id's adapter, without its weights.

        Raises:
            InputError: there is no adapter, or it is more than low-rank updates of linear maps.
        """
        folder = resolve_adapter(name)
        read = read_json(folder / ADAPTER, "an adapter's configuration")
        _check_fields(read, name)
        if not (folder / WEIGHTS).is_file():
            pickled = ": its weights are pickled, which are not read: load and save it with PEFT"
            raise InputError(f"{name}: has no {WEIGHTS}{pickled if any(folder.glob('adapter_model.bin')) else ''}.")
        try:
            lora = PeftConfig.from_peft_type(**read)
        except Exception as error:  # of PEFT, in many types
            raise InputError(f"{name}: PEFT cannot read its {ADAPTER} ({first_line(error)}).") from None
        return cls(own_name(name), folder, read, lora, tensors_of_file(folder / WEIGHTS))

    def factors(self, network: Any) -> dict[str, StoredTensor]:
        """Its tensors by the maps of a dense model: `model.layers.0.self_attn.q_proj.lora_A.weight`."""
        by_factor: dict[str, dict[str, StoredTensor]] = {"A": {}, "B": {}}
        for key, tensor in self.tensors.items():
            match = _FACTOR.fullmatch(key)
            if match is None:
                raise InputError(
                    f"{self.name}: holds more than low-rank updates of linear maps ({key}), such as new tokens or "
                    "modules that trained whole: train an adapter without them, or merge it into its base."
                )
            by_factor[match[2]][f"{match[1]}.weight"] = tensor
        return {
            f"{key.removesuffix('.weight')}.lora_{factor}.weight": tensor
            for factor, tensors in by_factor.items()
            for key, tensor in stored_tensors(SimpleNamespace(tensors=tensors), network).items()  # type: ignore[arg-type]
        }

    def warnings(self, base: str, commit: str | None) -> list[str]:
        """What its configuration says of its base that differs from the base at hand, by name and by commit."""
        own, revision = self.fields.get("base_model_name_or_path"), self.fields.get("revision")
        if isinstance(own, str) and own and own_name(own).rpartition("/")[2].lower() != base.rpartition("/")[2].lower():
            return [f"warning: {self.name} was trained on {without_folders(own)}, by its name another base than {base}"]
        if isinstance(revision, str) and re.fullmatch("[0-9a-f]{40}", revision) and commit not in (None, revision):
            return [f"warning: {self.name} was trained on {own} at commit {revision[:7]}; the base is at {commit[:7]}"]  # type: ignore[index]
        return []


def _check_fields(read: Mapping[str, Any], name: str | os.PathLike) -> None:
    """Refuses what is no plain LoRA of a language model, by the fields of its configuration."""
    if read.get("peft_type") != "LORA":
        raise InputError(
            f"{name}: {ADAPTER} has the peft_type {shown_value(read.get('peft_type'))}: only LoRA becomes an "
            "expansion: merge the adapter into its base, or train a LoRA."
        )
    first = str(read.get("init_lora_weights", True)).lower()
    if first.startswith(_CHANGE_BASE):
        raise InputError(
            f"{name}: began with init_lora_weights {first!r}, for which PEFT changed the base itself: convert it "
            "to a LoRA of the unchanged base (save_pretrained(..., path_initial_model_for_weight_conversion=...))."
        )
    usual = LoraConfig().to_dict()
    for field, value in {**read, "task_type": read.get("task_type") not in (None, "CAUSAL_LM")}.items():
        if field not in _TAKEN and value and value != usual.get(field):
            known = (
                "is no plain low-rank update of linear maps" if field in usual else f"PEFT {__version__} does not know"
            )
            raise InputError(
                f"{name}: {ADAPTER} has {field} {shown_value(read[field])}, which {known}: train an adapter of a "
                "language model without it, or merge this one into its base."
            )


@dataclass(frozen=True)
class FromPeftReport:
    """Result of `expand_from_peft`: parameters before and after, and what was taken though something speaks against
    it."""

    out: Path
    base_parameters: int
    parameters: int
    warnings: list[str]


@checked
def expand_from_peft(
    base: str | os.PathLike,
    adapters: Mapping[str, Any],
    out: str | os.PathLike,
    old_languages: Sequence[str] = (),
    *,
    revision: str | None = None,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    gate: Gate | None = None,
) -> FromPeftReport:
    """Writes the expanded checkpoint of a dense base and adapters of PEFT: each language's tokens take its adapter, all
    others the base as it was. `export_peft` gives the adapters back, byte for byte.

    Args:
        base: folder or hub id of the dense checkpoint.
        adapters: the folder or hub id of each language's adapter; of an adapter of several languages, the codes are
            joined by commas.
        out: folder to write; appears whole or not at all.
        old_languages: the base's own languages, as far as they are known.
        revision: revision of the base's hub id.
        max_shard_size: size of the largest weight file.
        overwrite: replace `out` if it exists.
        gate: the language gate of this base, for these languages (`gate_from_file`).

    Raises:
        InputError: an adapter is of another base, or more than low-rank updates of linear maps; the base cannot be
            expanded; the languages contradict each other; or `out` cannot be written.
    """
    rounds = [codes_of(languages) for languages in adapters]
    if not rounds:
        raise InputError("adapters is empty: give each language's adapter.")
    check_old_and_new(old_languages, [code for codes in rounds for code in codes])
    folder = resolve_checkpoint(base, revision)
    loaded = [PeftAdapter.load(name) for name in adapters.values()]
    check_output(out, overwrite, folder, *(adapter.folder for adapter in loaded))
    dense_config = load_base_config(folder)
    check_architecture(dense_config, base)
    if dense_config.is_encoder_decoder:
        raise InputError(f"{base}: is an encoder-decoder, but adapters become expansions of decoders alone.")
    dense = StoredModel(base, dense_config, revision)
    kind = AdapterKind([adapter_of(dense.network, one.lora, one.name) for one in loaded])
    config, plans = _planned(dense_config, kind, rounds, old_languages, gate)
    given, begin = _updates(dense, config, loaded), expansion_rule(dense, "copy", 0, gate)
    base_parameters = sum(dense[key].numel for key in dense.tensors)
    name, _, commit = dense.name.partition("@")
    sizes = [sum(tensor.numel for tensor in one.tensors.values()) for one in loaded]
    records = [
        planned_record(
            plan, old_languages=plan.old, base_model=name, base_revision=commit or None,
            expert_init=STAGE, base_parameters=base_parameters, parameters=base_parameters + sum(sizes[: number + 1]),
            stages=[StageRecord(stage=STAGE, settings={"adapter": one.name, ADAPTER: without_folders(one.fields)})],
        )
        for number, (plan, one) in enumerate(zip(plans, loaded, strict=True))
    ]  # fmt: skip
    rewrite(
        [dense], config, lambda place: Given(given[place.key]) if place.key in given else begin(place), out,
        record=History(records).with_last(language_gate=config.language_gate), title=STAGE,
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip
    said = [line for one in loaded for line in one.warnings(name, commit or None)]
    return FromPeftReport(Path(out), base_parameters, History.of(config).last.parameters or 0, said)


def codes_of(languages: str) -> list[str]:
    """The codes of an adapter's languages, which commas join."""
    return [code.strip() for code in languages.split(",")]


def _planned(
    dense_config: PreTrainedConfig, kind: AdapterKind, rounds: Sequence[Sequence[str]], old: Sequence[str],
    gate: Gate | None,
) -> tuple[Any, list[Plan]]:  # fmt: skip
    """The configuration of a model with an expansion of all layers for each adapter, and the plan of each."""
    layers = dense_config.get_text_config(decoder=True).num_hidden_layers
    plans, known = [], list(old)
    for number, codes in enumerate(rounds, start=2):
        plans.append(Plan(STAGE, [number] * layers, old=known, new=list(codes), exclusive=True))
        known = [*known, *codes]
    earlier = [plan.experts_per_layer for plan in plans[:-1]] or None
    return planned_config(dense_config, plans[-1], kind, gate, earlier_experts_per_layer=earlier), plans


def _updates(dense: StoredModel, config: Any, adapters: Sequence[PeftAdapter]) -> dict[str, StoredTensor]:
    """The adapters' tensors by their names in the expanded model; refuses one that is left over or missing."""
    found = {}
    for number, adapter in enumerate(adapters):
        factors = adapter.factors(dense.network)
        for layer, place in enumerate(layer_modules(dense.network)):
            for map_name in maps_of(config.adapters[number], layer):
                for factor in ("lora_A.weight", "lora_B.weight"):
                    if (key := f"{place}.{map_name}.{factor}") not in factors:
                        raise InputError(f"{adapter.name}: {WEIGHTS} lacks {key}, which {ADAPTER} names.")
                    found[f"{update_of(place, map_name, number + 1)}.{factor}"] = factors.pop(key)
        for key in factors:
            raise InputError(
                f"{adapter.name}: updates {key}, which {ADAPTER} does not name in {dense.name}: is it an adapter of "
                "another base?"
            )
    return found


# --- out ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LanguageAdapter:
    """The adapter of an expansion.

    Attributes:
        languages: the codes of the expansion's languages.
        updates: its updates, by the name of the map in the dense model.
        network: the dense model, on the meta device.
        kept: the configuration with which `expand --adapter` took it; None without one.
        base: the dense model's name, and its commit.
    """

    languages: list[str]
    updates: Mapping[str, StoredUpdate]
    network: Any
    kept: dict[str, Any] | None
    base: tuple[str | None, str | None]

    @property
    def name(self) -> str:
        """The name of its folder, where there are several."""
        return "-".join(self.languages)

    def fields(self) -> dict[str, Any]:
        """Its adapter_config.json: the kept one where that still says what its updates are, else a new one."""
        layers: list[Maps] = [
            {
                name.removeprefix(f"{place}."): [update.rank, update.scaling]
                for name, update in self.updates.items()
                if name.startswith(f"{place}.")
            }
            for place in layer_modules(self.network)
        ]
        fields = self.kept
        if fields is None or not self._is_said_by(PeftConfig.from_peft_type(**fields), layers):
            lora = self._lora(sorted({name.rpartition(".")[2] for name in self.updates}))
            if not self._is_said_by(lora, layers):
                lora = self._lora(sorted(self.updates))  # the same name stands in layers that have no update
            fields = {
                name: sorted(value) if isinstance(value, set) else value for name, value in lora.to_dict().items()
            }
        name, commit = self.base
        known = commit is None and fields.get("base_model_name_or_path")
        return {**fields, "base_model_name_or_path": known or name, "revision": commit or fields.get("revision")}

    def _is_said_by(self, lora: LoraConfig, layers: list[Maps]) -> bool:
        """Whether a configuration of PEFT says these updates of the layers."""
        try:
            return adapter_of(self.network, lora, ADAPTER) == entry_of(layers)
        except InputError:  # it names more than maps
            return False

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
        )


def _alpha(rank: int, scaling: float, rslora: bool) -> float:
    """The alpha that gives a scaling, a whole number if one does."""
    divisor = sqrt(rank) if rslora else rank
    whole = round(scaling * divisor)
    return whole if whole / divisor == scaling else scaling * divisor


def language_adapters(source: StoredModel, language: str | None) -> Iterator[LanguageAdapter]:
    """The adapter of a language, or of each expansion.

    Raises:
        InputError: the model has other experts, no adapter for this language, or its base has trained.
    """
    config, history = source.config, History.of(source.config)
    if config.expert_kind != "adapter":
        instead = "`export --language` writes the dense model of a language"
        if config.expert_kind == "added":
            instead = "publish the checkpoint with its own code (`push`)"
        raise InputError(f"{source.folder}: {_NO_ADAPTERS}, but {kind_of(config).words}: {instead}.")
    verdict = moved_tensors(source)
    if verdict.moved:
        raise InputError(
            f"{source.folder}: {verdict.names} moved since the expansion, so that its adapters are none of "
            f"{history.first.base_model}: `export --language` writes the dense model of a language."
        )
    changed = next((stage.stage for stage in history.stages if stage.changes_everything), None)
    if changed and not verdict.checked:
        raise InputError(
            f"{source.folder}: `{changed}` changed the weights beside the adapters, so that they are no adapters of "
            f"{history.first.base_model}: `export --language` writes the dense model of a language."
        )
    network = network_of(dense_config(config))
    wanted = None
    if language is not None:
        wanted = history.classes.get(language)
        if not wanted:
            raise InputError(
                f"{source.folder}: has no adapter for {language}; it has some for "
                f"{', '.join(code for code, number in history.classes.items() if number)}."
            )
    for number, record in enumerate(history.expansions, start=1):
        if wanted not in (None, number):
            continue
        experts = experts_of(source, record.new_languages[0])
        kept = next((stage.settings for stage in record.stages if stage.stage == STAGE and stage.settings), {})
        yield LanguageAdapter(
            record.new_languages,
            {key.removesuffix(".weight"): update for key, update in lora_updates(source, experts).items()},
            network, kept.get(ADAPTER), (history.first.base_model, history.first.base_revision),
        )  # fmt: skip


@dataclass(frozen=True)
class ExportedAdapters:
    """Result of `export_peft`: the base's name, and the folder and largest rank of each adapter, by its languages."""

    base: str | None
    folders: dict[str, Path]
    ranks: dict[str, int]

    def lines(self) -> list[str]:
        """The lines that the command line prints."""
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
        model: expanded checkpoint of adapters.
        out: folder of the adapter; of several, a folder for each is written in it.
        language: write the adapter of this language alone.

    Raises:
        InputError: see `language_adapters`; or `out` cannot be written.
    """
    folder = resolve_checkpoint(model)
    source = StoredModel(model, load_expanded_config(folder))
    check_apart(Path(out), folder)
    adapters = list(language_adapters(source, language))
    folders = {one.name: Path(out) if len(adapters) == 1 else Path(out, one.name) for one in adapters}
    for place in folders.values():
        check_output(place, overwrite)
    for one in adapters:
        tensors = [
            OutputTensor.copy_of(source[key], f"base_model.model.{name}.{factor}.weight")
            for name, update in one.updates.items()
            for factor, key in (("lora_A", update.lora_A), ("lora_B", update.lora_B))
        ]
        fields = one.fields()
        with new_folder(folders[one.name], overwrite, sum(tensor.nbytes for tensor in tensors)) as partial:
            write_json(partial / ADAPTER, fields)
            with Bar(total=len(tensors), desc="export", unit="tensor") as bar:
                write_tensors(partial / WEIGHTS, tensors, bar)
    ranks = {one.name: max(update.rank for update in one.updates.values()) for one in adapters}
    return ExportedAdapters(History.of(source.config).first.base_model, folders, ranks)
