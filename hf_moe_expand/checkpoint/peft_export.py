"""Exports the adapter of a language in PEFT's format."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig
from transformers.pytorch_utils import Conv1D

from ..core.errors import InputError
from ..core.jsonfile import write_json
from ..core.progress import Bar
from ..core.schema import checked
from .adapter_maps import Maps, adapter_of, entry_of, layer_modules
from .base_tensors import moved_tensors
from .export import StoredUpdate, dense_config, experts_of, lora_updates
from .kinds import kind_of
from .local import ADAPTER
from .peft_adapter import STAGE, WEIGHTS
from .records import History
from .source import load_expanded_config, resolve_checkpoint
from .stored import StoredModel, network_of
from .writer import check_apart, check_output, new_folder, write_tensors

_NO_ADAPTERS = "its experts are no adapters of PEFT"
REFUSED = {(kind, "export-to-peft"): _NO_ADAPTERS for kind in ("copies", "lora", "added")}
# The ranks that vLLM's --max-lora-rank takes.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class LanguageAdapter:
    """The adapter of an expansion.

    Attributes:
        languages: the codes of the expansion's languages.
        updates: its updates, by the name of the map in the dense model.
        network: the dense model, on the meta device.
        kept: the configuration with which `from-peft` took it; None without one.
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
            source.copied(key, f"base_model.model.{name}.{factor}.weight")
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
