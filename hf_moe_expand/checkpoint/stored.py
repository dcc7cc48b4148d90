"""A checkpoint's tensors under the model's own names, and the place of each in the model."""

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.integrations import deepspeed

from ..core.errors import InputError, library_errors_at
from ..modeling import ExpandedConfig, auto_class, count_layers, decoder_ffns
from ..modeling.expanded_ffn import ExpandedLayer, copy_ffn
from ..modeling.language_modules import Choosing
from ..modeling.part_mixture import mixture_rules
from ..modeling.updates import LoraUpdate
from .reader import CheckpointReader, StoredTensor
from .source import load_base_config, load_config, name_and_commit, resolve_checkpoint
from .writer import DTYPE_NAMES, OutputTensor

GATE_ROWS = ("language_gate.weight", "language_gate.bias")
# What decides the computation of a dense model although the shapes are the same.
BASE_FIELDS = (
    "model_type", "layers", "tie_word_embeddings", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "hidden_activation", "activation_function",
)  # fmt: skip
_SNAPSHOT = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})[/\\]?$")
# In a model of several kinds of input, the prefix of the text decoder's tensors.
_OF_TEXT = re.compile(r"^(model\.)?language_model\.")


def load_any_config(folder: Path) -> Any:
    """The configuration of an expanded checkpoint, or of a dense one that can be expanded."""
    config = load_config(folder)
    return config if isinstance(config, ExpandedConfig) else load_base_config(folder)


class Source:
    """The tensors of a model under the model's own names, of a checkpoint or of a loaded model.

    Attributes:
        name: the name that the user gave, without this machine's folders; a hub id with its commit.
        origin: the name for histories, and its commit on the hub.
        folder: folder of the checkpoint, or what messages call the loaded model.
        network: the model; of a checkpoint, on the meta device.
        shapes: the shape of each tensor of the model.
    """

    name: str
    origin: tuple[str, str | None]
    folder: Path
    config: Any
    network: Any
    shapes: dict[str, tuple[int, ...]]
    _stored: dict[str, StoredTensor]
    _tied: dict[str, str]

    @property
    def tensors(self) -> list[str]:
        """The names of the tensors that it holds; usually only one of several tied tensors."""
        return [key for key in self.shapes if key in self]

    @cached_property
    def places(self) -> dict[str, "Place"]:
        """The place of each tensor in the model."""
        return places(self.network)

    @cached_property
    def base(self) -> dict[str, str]:
        """The name of each tensor that it holds of the base, which expert 0 is, by its name in the base."""
        return {
            place.dense: key
            for key, place in self.places.items()
            if place.dense is not None and not place.expert and key in self
        }

    @property
    def as_base(self) -> dict[str, Any]:
        """What the record of an expansion says of it, its base."""
        size = sum(self[key].numel for key in self.tensors)
        return {"base_model": self.origin[0], "base_revision": self.origin[1], "base_parameters": size}

    def __contains__(self, key: str) -> bool:
        return key in self._stored

    def __getitem__(self, key: str) -> StoredTensor:
        """A tensor; for a tied tensor that is not stored, its stored partner."""
        for candidate in (key, self._tied.get(key, "")):
            if candidate in self:
                return self._stored[candidate]
        raise InputError(f"{self.folder}: tensor {key!r} is missing from the checkpoint.")

    def copies(self, key: str, name: str | None, whole: bool) -> list[OutputTensor]:
        """A byte-for-byte copy of a tensor, under its name in the files or under `name`; of a tensor whose parts are
        stored, a mixture's, copies of its parts under the names of the same layout, unless it is to be `whole`."""
        parts = self._parts(key)
        if whole or not parts:
            return [OutputTensor.copy_of(self[key], name)]
        name = name or key
        same = 0  # characters at the end of both names, which are the tensor's name in the block
        while same < len(key) and key[-same - 1 :] == name[-same - 1 :]:
            same += 1
        old, new = key[: len(key) - same], name[: len(name) - same]
        return [OutputTensor.copy_of(stored, new + part.removeprefix(old)) for part, stored in parts.items()]

    def in_files(self, key: str) -> list[StoredTensor]:
        """A tensor or, of a mixture's, its parts; none of a tensor that the library puts together otherwise."""
        if parts := self._parts(key):
            return list(parts.values())
        return [self[key]] if self[key].compute is None else []

    def _parts(self, key: str) -> Mapping[str, StoredTensor]:
        """The parts of a mixture's tensor, by their names in the model, if the files hold it in parts."""
        parts = self[key].parts
        return parts if all(name.startswith(self._mixtures) for name in (key, *parts)) else {}

    @cached_property
    def _mixtures(self) -> tuple[str, ...]:
        return tuple(f"{ffn.place}." for ffn in decoder_ffns(self.network) if ffn.is_mixture)


class StoredModel(Source):
    """A checkpoint, and its model without weights; `load` reads the configuration, if none is given. `reader` has the
    tensors under their names in the files.

    Raises:
        InputError: no model can be built from the configuration; or a tensor is missing, has another shape, or is
            stored in a quantised type. The message names the tensor.
    """

    def __init__(
        self, name: str | os.PathLike, config: Any = None, revision: str | None = None,
        load: Callable[[Path], Any] = load_any_config,
    ) -> None:  # fmt: skip
        self.folder = resolve_checkpoint(name, revision)
        self.origin = name_and_commit(name, self.folder)
        self.name = "@".join(filter(None, self.origin))
        self.config = config if config is not None else load(self.folder)
        self.reader = CheckpointReader(self.folder)
        self._read()
        if self._untied() and not self.config.is_encoder_decoder:
            # So does transformers read the files, and what is written says so. (T5's kin are told to be tied always.)
            self.config.tie_word_embeddings = False
            self._read()
        for key in self._untied():
            del self._tied[key], self.network.all_tied_weights_keys[key]
        self.shapes = {key: tuple(value.shape) for key, value in self.network.state_dict().items()}
        self._check_complete()

    def _read(self) -> None:
        self.network = network_of(self.config, self.reader)
        self._stored = stored_tensors(self.reader, self.network)
        self._tied = dict(getattr(self.network, "all_tied_weights_keys", None) or {})

    def _untied(self) -> list[str]:
        """The tensors that are tied by the configuration, but have other values in the files than their partners."""
        return [key for key, source in self._tied.items() if key in self._stored and source in self._stored]

    def _check_complete(self) -> None:
        computed_keys: list[str] = []
        if self.config.is_encoder_decoder:  # Marian's positions are computed, and not stored
            ignored = (self.network._keys_to_ignore_on_save, self.network._keys_to_ignore_on_load_missing)
            computed_keys = [pattern for patterns in ignored for pattern in patterns or ()]
        absent = [key for key in self.shapes if not {key, self._tied.get(key)} & self._stored.keys()]
        if missing := [key for key in absent if not any(re.search(pattern, key) for pattern in computed_keys)]:
            raise InputError(f"{self.folder}: tensors are missing from the checkpoint: {', '.join(missing[:5])}.")
        values = self.network.state_dict()
        for key in self.tensors:
            stored = self[key]
            if stored.shape != self.shapes[key]:
                has = f"tensor {stored.name!r} has shape {list(stored.shape)}"
                raise InputError(f"{self.folder}: {has}, but its config asks for {list(self.shapes[key])}.")
            if values[key].is_floating_point():
                _ = stored.torch_dtype  # which refuses a quantised type

    @property
    def unknown(self) -> list[str]:
        """The names in the files of tensors that the model does not have, and names that the index alone has."""
        return sorted([*(own.name for key, own in self._stored.items() if key not in self.shapes), *self.reader.absent])


def base_of(dense: PreTrainedModel) -> tuple[str, str | None]:
    """A loaded model's name and commit on the hub; the folder's name and None if it came from a folder; its class's
    name and None if it was made from a configuration."""
    name = str(dense.config._name_or_path or "")
    if not name:
        return type(dense).__name__, None
    if snapshot := _SNAPSHOT.search(name):  # a folder of the hub's cache
        return snapshot.group(1).replace("--", "/"), snapshot.group(2)
    path = Path(name)
    if path.is_dir() or path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2:
        return path.resolve().name, None
    # Since 5.23 transformers does not keep the commit: it is that of the only one in the hub's cache.
    return name, getattr(dense.config, "_commit_hash", None) or _only_commit(name)


def _only_commit(name: str) -> str | None:
    with suppress(ValueError):  # no hub id
        file = try_to_load_from_cache(name, "config.json")
        commits = [*Path(file).parent.parent.iterdir()] if isinstance(file, str) else []
        return commits[0].name if len(commits) == 1 else None
    return None


def source_of(model: Any, **how: Any) -> Source:
    """A loaded model, or the checkpoint of a name, opened as `how` says."""
    return LoadedModel(model) if isinstance(model, PreTrainedModel) else StoredModel(model, **how)


class LoadedModel(Source):
    """The tensors of a loaded model on one device, tied ones once; `untied` are those that are tied by the
    configuration, but have other values than their partners."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.network = model
        self.config = copy.deepcopy(model.config)
        self.name = str(model.config.name_or_path or type(model).__name__).rstrip("/").rpartition("/")[2]
        self.origin, self.folder = base_of(model), Path(self.name)
        ties, values = self.network.get_expanded_tied_weights_keys(all_submodels=True), model.state_dict()
        self.untied = [key for key, source in ties.items() if not torch.equal(values[key], values[source])]
        if self.untied and not self.config.is_encoder_decoder:
            self.config.tie_word_embeddings = False  # as `StoredModel` has it
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self._tied = {key: source for key, source in tied.items() if key not in self.untied}
        self.shapes = {key: tuple(value.shape) for key, value in values.items()}
        self._stored = {
            key: StoredTensor(
                key, DTYPE_NAMES.get(value.dtype, str(value.dtype)), self.shapes[key], self.folder / key,
                compute=value.detach().cpu, held=value,
            )
            for key, value in values.items()
            if key not in self._tied
        }  # fmt: skip

    @property
    def unknown(self) -> list[str]:
        """The tensors that the backbone does not know, such as an adapter's."""
        return sorted({*self.shapes} - {*network_of(self.config).state_dict()})


def check_size(config: Any, reader: CheckpointReader) -> None:
    """Checks, before a model is built, that the files hold enough tensors for its layers and experts."""
    inner = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    needed = max(count_layers(inner), sum(getattr(inner, "num_experts_per_layer", None) or []))
    if needed > (held := len(reader.tensors)):
        raise InputError(f"{reader.folder}: has {needed:,} layers or experts, but only {held} tensors.")


@contextmanager
def built_whole() -> Iterator[None]:
    """Inside, models are built and loaded whole, where a training's ZeRO-3 would split them over the ranks."""
    zero3 = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = zero3


def network_of(config: Any, reader: CheckpointReader | None = None) -> Any:
    """The model that a configuration describes, on the meta device; `reader` holds its tensors."""
    if reader is not None:
        check_size(config, reader)
    where = reader.folder if reader is not None else config.name_or_path or config.model_type
    with (
        library_errors_at(f"{where}: no model can be built from its configuration"),
        torch.device("meta"),
        built_whole(),
    ):
        return auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=False)


def stored_tensors(reader: CheckpointReader, network: Any) -> dict[str, StoredTensor]:
    """The checkpoint's tensors by the model's keys, renamed and put together as the library does at loading (GPT-NeoX's
    `embed_out`, BLOOM's keys without `transformer.`, fused experts). Of tied tensors, whichever the files hold, the key
    is that of the tensor to which the others are tied; they are two if their values differ."""
    rules: list[Any] = get_model_conversion_mapping(network)
    if isinstance(network.config, ExpandedConfig):  # what the library has under the class's name is the latest model's
        rules = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        rules += mixture_rules(network, decoder_ffns(network))
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known = network.state_dict()
    tensors: dict[str, StoredTensor] = {}
    parts: dict[str, list[tuple[str, str, StoredTensor]]] = {}
    for name in sorted(reader.tensors, key=dot_natural_key):
        for inner in (name, _OF_TEXT.sub("", name)):
            key, pattern = rename_source_key(inner, renamings, converters, network.base_model_prefix, known)
            if key in known:
                break
        if pattern is None or key not in known:
            tensors[key] = reader.tensors[name]
        else:
            renamed, _ = rename_source_key(inner, renamings, [])
            parts.setdefault(key, []).append((pattern, renamed, reader.tensors[name]))
    for key, pieces in parts.items():
        tensors[key] = _put_together(network, key, pieces, converters)
    for target, source in (getattr(network, "all_tied_weights_keys", None) or {}).items():
        if target in tensors and (source not in tensors or tensors[target].same_bytes(tensors[source])):
            tensors[source] = tensors.pop(target)
    return tensors


def _put_together(
    network: Any, key: str, parts: list[tuple[str, str, StoredTensor]], converters: list[WeightConverter]
) -> StoredTensor:
    """By the library's rule: each of the `parts` has the rule's pattern, and its name in the model before the rule."""
    rule = next(rule for rule in converters if parts[0][0] in rule.source_patterns)
    parts = sorted(parts, key=lambda part: rule.source_patterns.index(part[0]))  # stable

    def computed() -> Any:
        convert = copy.deepcopy(rule)
        for pattern, _, part in parts:
            convert.add_tensor(key, part.name, pattern, part.load())  # type: ignore[arg-type]
        return convert.convert(key, model=network, config=network.config)[key]

    first, shape = parts[0][2], tuple(network.state_dict()[key].shape)
    own = {renamed: part for _, renamed, part in parts}
    return StoredTensor(key, first.dtype, shape, first.file, parts=own, compute=computed)


@dataclass(frozen=True)
class Place:
    """Where a tensor of a model belongs.

    Attributes:
        key: its name in the model.
        dense: its name in the dense model, or that of the tensor in whose place an expert or a language has it; None
            for routers, classifiers, gates, updates and added experts.
        layer: number of its expanded layer; -1 outside the expanded layers, where a language's number is its `expert`.
        expert: number of its expert; None outside the experts.
        inner: its name inside the layer's block: the FFN, or the adapters; of a gate, inside the layer.
        number: the class of the language whose own module has it; None elsewhere.
        update: the low-rank update of which it is a factor.
        updates: the name in the dense model of the tensor which that changes.
    """

    key: str
    dense: str | None
    shape: tuple[int, ...]
    layer: int = -1
    expert: int | None = None
    inner: str = ""
    number: int | None = None
    update: LoraUpdate | None = None
    updates: str | None = None

    @property
    def is_routing(self) -> bool:
        """Whether it is of a router, classifier or gate."""
        return self.layer >= 0 and self.expert is None

    @property
    def factor(self) -> str | None:
        """`lora_A.weight`, `lora_B.weight` or `lora_B.bias` of an update; None of any other tensor."""
        return None if self.update is None else ".".join(self.key.rsplit(".", 2)[1:])

    def beside(self, inner: str) -> str:
        return self.key.removesuffix(self.inner) + inner

    def of_expert(self, expert: int) -> str:
        return self.beside(f"experts.{expert}.{self.inner.split('.', 2)[2]}")


def _home_in_base(block: Any, expert: int, inner: str, name: str) -> dict[str, Any]:
    """Fields of the `Place` of an expert's tensor; `name` is that of the layer's FFN in the dense model, or the prefix
    of the names of languages' own modules."""
    rest = inner.split(".", 2)[2]
    update = block.get_submodule(inner.rsplit(".", 2)[0])
    update = update if isinstance(update, LoraUpdate) else None
    if not isinstance(block, Choosing):
        if update is not None:
            return {"update": update, "updates": f"{name}.{update.name}.weight"}
        is_ffn = expert == 0 or block.model_config.make_expert(block.layer_index, expert) is copy_ffn
        return {"dense": f"{name}.{rest}"} if is_ffn else {}
    child, _, tensor = rest.partition(".")
    owned = next(owned for owned, own in block.own[expert].items() if own == child)
    number = next(number for number in range(1, block.classes) if (block.expert_of(number) or 0) == expert)
    if update is not None:
        kind = "bias" if tensor.endswith("bias") else "weight"
        return {"number": number, "update": update, "updates": f"{name}{owned}.{kind}"}
    return {"number": number, "dense": f"{name}{owned}.{tensor}"}


def places(network: Any) -> dict[str, Place]:
    """The place of each tensor of a model, dense or expanded."""
    found = {key: Place(key, key, tuple(value.shape)) for key, value in network.state_dict().items()}
    ffns = decoder_ffns(network) if isinstance(network.config, ExpandedConfig) else []
    owners: dict[str, Any] = {n: m for n, m in network.named_modules() if isinstance(m, ExpandedLayer | Choosing)}
    for name, block in owners.items():
        layer = getattr(block, "layer_index", -1)
        for inner in block.state_dict():
            key, expert, home = f"{name}.{inner}", None, {}
            if inner.startswith("experts."):
                expert = int(inner.split(".")[1])
                owner = name.removesuffix("adapters") if isinstance(block, Choosing) else ffns[layer].name
                home = _home_in_base(block, expert, inner, owner)
            found[key] = Place(key, home.pop("dense", None), found[key].shape, layer, expert, inner, **home)
    if (rule := getattr(network.config, "language_gate", None)) is not None:
        for inner in GATE_ROWS:
            key = f"{gate_home(network, rule['layer'])}.{inner}"
            found[key] = Place(key, None, found[key].shape, rule["layer"], inner=inner)
    return found


def gate_home(network: Any, layer: int) -> str:
    """The name of the module that holds a gate in a layer: the layer."""
    return decoder_ffns(network)[layer].place.rpartition(".")[0]


def check_alike(one: Any, other: Any, fields: Sequence[str] = BASE_FIELDS, keys: Any = None) -> None:
    """Refuses two sources of which a field of the configuration, or the shape of a tensor, differs; `keys` has the
    other's name of each tensor of `one` (None where it has none), by default the same."""
    for name in fields:
        ours, theirs = (field_of(config, name, other.config) for config in (one.config, other.config))
        if ours != theirs:
            raise InputError(f"{name} is {ours!r} in {one.folder}, but {theirs!r} in {other.folder}.")
    for key, home in (keys or {key: key for key in (*one.shapes, *other.shapes)}).items():
        ours, theirs = one.shapes.get(key, "none"), other.shapes.get(home, "none")
        if home is not None and ours != theirs:
            raise InputError(f"Tensor {key!r} has shape {ours} in {one.folder}, but {theirs} in {other.folder}.")


def field_of(config: Any, name: str, base: Any) -> Any:
    """A field of the dense model that a configuration describes, or that was expanded. Layers that it has beyond the
    configuration `base` (`expand --blocks`) do not count."""
    if name == "layers":
        new = () if getattr(base, "new_layers", None) else getattr(config, "new_layers", None) or ()
        return count_layers(config) - len(new)
    backbone = getattr(config, "backbone_model_type", None) if name == "model_type" else None
    return backbone or getattr(config, name, None)


def layer_list(network: Any) -> str:
    """The name of a model's list of layers, such as `model.layers`."""
    return decoder_ffns(network)[0].place.partition(".0.")[0]
