"""Adapters of PEFT become expansions: the LoRA of each language, byte for byte, beside a dense base."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peft import LoraConfig, PeftConfig, __version__
from transformers import PreTrainedConfig

from ..core.errors import InputError, first_line
from ..core.jsonfile import read_json
from ..core.languages import check_old_and_new
from ..core.schema import checked, shown_value
from ..modeling.part_adapters import maps_of
from ..planning.plan import Plan
from .adapter_maps import adapter_of, layer_modules, update_of
from .expand import check_plan_of_gate, expanded_tensors, planned_config, planned_record
from .gate_file import Gate
from .kinds import AdapterKind
from .local import ADAPTER, own_name
from .promises import check_architecture
from .reader import TORCH_DTYPES, StoredTensor, tensors_of_file
from .records import History, StageRecord, without_folders
from .source import TOKENIZER_FILES, load_base_config, resolve_adapter, resolve_checkpoint
from .stored import StoredModel, network_of, stored_tensors
from .writer import DEFAULT_SHARD_SIZE, check_output, copy_of, write_checkpoint

WEIGHTS = "adapter_model.safetensors"
STAGE = "from-peft"  # the step's name in a history
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# The fields of a LoRA's configuration that say where its updates are and how they are scaled, or that its training
# alone reads. A field that is not here must have PEFT's default.
_TAKEN = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
))  # fmt: skip
_NAMES = {
    "alora_invocation_tokens": "an aLoRA, which begins at tokens of its own",
    "arrow_config": "routed by Arrow",
    "bias": "trained biases",
    "kasa_config": "a KaSA, which changes the base's weights",
    "layer_replication": "the base's layers in another order",
    "lora_bias": "updates with biases",
    "modules_to_save": "modules that trained whole",
    "monteclora_config": "a MonteCLoRA, whose updates are drawn",
    "target_parameters": "updates of parameters outside linear maps, such as a mixture's experts",
    "trainable_token_indices": "embeddings of tokens that trained",
    "use_bdlora": "a BD-LoRA, of block-diagonal factors",
    "use_dora": "a DoRA, which scales the weights' columns too",
    "use_qalora": "a QA-LoRA, which reads means of its inputs",
}
# First weights for which PEFT changes the base's own.
_CHANGE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


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
            hint = (
                ": its weights are pickled, which are not read: load and save it with PEFT"
                if any(folder.glob("adapter_model.bin"))
                else ": give the folder that PEFT's save_pretrained wrote"
            )
            raise InputError(f"{name}: has no {WEIGHTS}{hint}.")
        try:
            lora = PeftConfig.from_peft_type(**read)
        except Exception as error:  # of PEFT, in many types
            raise InputError(f"{name}: PEFT cannot read its {ADAPTER} ({first_line(error)}).") from None
        return cls(own_name(name), folder, read, lora, tensors_of_file(folder / WEIGHTS))

    def factors(self, network: Any) -> dict[str, StoredTensor]:
        """Its tensors by the maps of a dense model: `model.layers.0.self_attn.q_proj.lora_A.weight`."""
        by_factor: dict[str, dict[str, StoredTensor]] = {"A": {}, "B": {}}
        others = []
        for key, tensor in self.tensors.items():
            match = _FACTOR.fullmatch(key)
            if match is None:
                others.append(key)
            else:
                by_factor[match[2]][f"{match[1]}.weight"] = tensor
        if others:
            raise InputError(
                f"{self.name}: holds more than low-rank updates of linear maps ({_few(others)}), such as new tokens or "
                "modules that trained whole: train an adapter without them, or merge it into its base."
            )
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
    kind = read.get("peft_type")
    if kind != "LORA":
        named = (
            f"an adapter of the kind {kind}" if isinstance(kind, str) else f"no adapter ({ADAPTER} has no peft_type)"
        )
        raise InputError(
            f"{name}: is {named}: only LoRA becomes an expansion; merge it into its base, or train a LoRA."
        )
    usual = LoraConfig().to_dict()
    for field, value in read.items():
        if field in _TAKEN or not value or value == usual.get(field):
            continue
        if field not in usual:
            raise InputError(
                f"{name}: {ADAPTER} has {field} {shown_value(value)}, which PEFT {__version__} does not know: install "
                "the PEFT that wrote it."
            )
        if field in ("loftq_config", "lora_ga_config", "corda_config", "megatron_core"):
            continue  # by init_lora_weights and megatron_config
        what = _NAMES.get(field, "no plain LoRA")
        raise InputError(
            f"{name}: is or has {what} ({field} {shown_value(value)}): only low-rank updates of linear maps become an "
            "expansion: train an adapter without, or merge this one into its base."
        )
    first = str(read.get("init_lora_weights", True)).lower()
    if first.startswith(_CHANGE_BASE):
        raise InputError(
            f"{name}: began with init_lora_weights {first!r}, for which PEFT changed the base itself: convert it "
            "to a LoRA of the unchanged base (save_pretrained(..., path_initial_model_for_weight_conversion=...))."
        )
    if read.get("task_type") not in (None, "CAUSAL_LM"):
        raise InputError(
            f"{name}: was trained for the task {shown_value(read['task_type'])}: give an adapter of a model that "
            "writes text (CAUSAL_LM)."
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
    config, plans = _planned(dense_config, kind, rounds, old_languages)
    if gate is not None:
        check_plan_of_gate(plans[-1])
        gate.set_in(config)
    given = _updates(dense, config, loaded)
    tensors = expanded_tensors(dense, config, "copy", 0, gate=gate)
    tensors = [copy_of(given[one.name], one.name) if one.name in given else one for one in tensors]
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
    parameters = sum(tensor.numel for tensor in tensors)
    History(records).with_last(parameters=parameters, language_gate=config.language_gate).write(config)
    write_checkpoint(out, config, tensors, [(folder, TOKENIZER_FILES)], STAGE, max_shard_size, overwrite)
    said = [line for one in loaded for line in one.warnings(name, commit or None)]
    return FromPeftReport(Path(out), base_parameters, parameters, said)


def codes_of(languages: str) -> list[str]:
    """The codes of an adapter's languages, which commas join."""
    return [code.strip() for code in languages.split(",")]


def _planned(
    dense_config: PreTrainedConfig, kind: AdapterKind, rounds: Sequence[Sequence[str]], old: Sequence[str]
) -> tuple[Any, list[Plan]]:
    """The configuration of a model with an expansion of all layers for each adapter, and the plan of each."""
    layers = dense_config.get_text_config(decoder=True).num_hidden_layers
    plans, known = [], list(old)
    for number, codes in enumerate(rounds, start=2):
        plans.append(Plan(STAGE, [number] * layers, old=known, new=list(codes), exclusive=True))
        known = [*known, *codes]
    earlier = [plan.experts_per_layer for plan in plans[:-1]] or None
    return planned_config(dense_config, plans[-1], kind, earlier_experts_per_layer=earlier), plans


def _updates(dense: StoredModel, config: Any, adapters: Sequence[PeftAdapter]) -> dict[str, StoredTensor]:
    """The adapters' tensors by their names in the expanded model; refuses one that is left over, missing, or of another
    shape."""
    network = network_of(config)
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    found = {}
    for number, adapter in enumerate(adapters):
        factors = adapter.factors(dense.network)
        of_another = f"is {adapter.name} an adapter of another base than {dense.name}?"
        for layer, place in enumerate(layer_modules(dense.network)):
            for map_name in maps_of(config.adapters[number], layer):
                update = update_of(place, map_name, number + 1)
                for factor in ("lora_A.weight", "lora_B.weight"):
                    key, name = f"{place}.{map_name}.{factor}", f"{update}.{factor}"
                    tensor = factors.pop(key, None)
                    if tensor is None:
                        raise InputError(
                            f"{adapter.name}: {WEIGHTS} lacks {key}, which {ADAPTER} names: the file is incomplete, or "
                            f"{of_another}"
                        )
                    if tensor.shape != shapes[name]:
                        raise InputError(
                            f"{adapter.name}: {tensor.name} has the shape {list(tensor.shape)}, but {dense.name} needs "
                            f"{list(shapes[name])}: {of_another}"
                        )
                    if tensor.dtype not in TORCH_DTYPES:
                        raise InputError(
                            f"{adapter.name}: {tensor.name} is stored as {tensor.dtype}: give the adapter in float32, "
                            "bfloat16 or float16."
                        )
                    found[name] = tensor
        if factors:
            raise InputError(
                f"{adapter.name}: updates maps that {ADAPTER} does not name in {dense.name} ({_few(list(factors))}): "
                f"{of_another}"
            )
    return found
