"""What an expansion adds: the kind of the new experts; the linear maps that adapters update, as PEFT finds them; and
first weights, which a tensor's place (seed, layer, ...) decides, neither other tensors nor their order."""

import copy
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import InputError, library_errors_at
from ..modeling import decoder_ffns, layer_names
from ..modeling.backbone import SeparateFFN
from ..modeling.language_modules import maps_of
from ..modeling.routing import init_router
from ..modeling.updates import init_kaiming
from ..planning.plan import Plan
from .arguments import NewExperts
from .facts import ExpertKind
from .stored import network_of

ALL_LINEAR = "all-linear"
Maps = dict[str, Any]  # rank and scaling by the name of a map in its layer, or None of a whole module


def layer_places(network: Any) -> list[str]:
    """The names of a decoder's layers in the model."""
    return [ffn.place.rpartition(".")[0] for ffn in decoder_ffns(network)]


def all_linear(network: Any) -> list[str]:
    """The linear maps of all layers: of a mixture of experts its shared parts, and not its router; not those of
    state-space blocks and of Gemma 3n's `altup`, which read the weights themselves."""
    mixtures = tuple(f"{ffn.place}." for ffn in decoder_ffns(network) if ffn.is_mixture)
    found = []
    for place in layer_places(network):
        layer = network.get_submodule(place)
        for inner, module in layer.named_modules():
            name, parent = f"{place}.{inner}", layer.get_submodule(inner.rpartition(".")[0])
            if not isinstance(module, nn.Linear | Conv1D) or hasattr(parent, "A_log") or inner.startswith("altup."):
                continue
            is_shared = "shared" in inner and min(module.weight.shape) > 1
            if not name.startswith(mixtures) or is_shared:
                found.append(name)
    return found


def adapter_of(network: Any, lora: LoraConfig, where: str) -> dict[str, Any]:
    """The entry of `adapters` in a configuration for PEFT's configuration of a LoRA of a dense model, whose weights are
    not read; messages call it `where`. An InputError refuses updates outside the layers."""
    if lora.target_modules == ALL_LINEAR:
        lora = copy.deepcopy(lora)
        lora.target_modules = names = all_linear(network)  # type: ignore[assignment]
        found = {name: update for name, update in lora_maps(network, lora, where).items() if name in names}
        # In the layers of some mixtures PEFT takes the names of shared or dense FFNs for those of the experts.
        if left_out := sorted({name.rpartition(".")[2] for name in names} - {n.rpartition(".")[2] for n in found}):
            warnings.warn(
                f"{where}: PEFT knows {', '.join(left_out)} of this model as the experts' alone: they are left out",
                stacklevel=2,
            )
    else:
        found = lora_maps(network, lora, where)
    places = layer_places(network)
    layers: list[Maps] = [{} for _ in places]
    for name, update in found.items():
        layer = layer_of(name, places)
        if layer is None or not isinstance(network.get_submodule(name), nn.Linear | Conv1D):
            raise InputError(f"{where}: updates {name}, which is no linear map of a layer.")
        layers[layer][name.removeprefix(f"{places[layer]}.")] = update
    return entry_of(layers)


def layer_of(name: str, places: Sequence[str]) -> int | None:
    """The number of the layer in which a module is; None outside the layers, whose names are `places`."""
    return next((number for number, place in enumerate(places) if name.startswith(f"{place}.")), None)


def lora_maps(network: Any, lora: LoraConfig, where: str) -> Maps:
    """Rank and scaling of each module that PEFT updates for a LoRA, by its name in the dense model."""
    where = f"{where}: PEFT finds no maps for it in {type(network).__name__}"
    with library_errors_at(where), warnings.catch_warnings(), torch.device("meta"):
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # of GPT-2's maps, which PEFT finds out itself
        warnings.filterwarnings("ignore", ".*alpha_pattern keys did not match")  # its own, for fused experts
        wrapped = inject_adapter_in_model(copy.deepcopy(lora), network_of(network.config))
    updated = {name: module for name, module in wrapped.named_modules() if isinstance(module, LoraLayer)}
    return {name: [*module.r.values(), *module.scaling.values()] for name, module in updated.items()}


def entry_of(layers: list[Maps]) -> dict[str, Any]:
    """The entry of `adapters` for the maps of each layer: those of most layers, and the layers that differ."""
    layers = [dict(sorted(maps.items())) for maps in layers]
    (most, _), *_ = Counter(map(repr, layers)).most_common(1)
    usual = next(maps for maps in layers if repr(maps) == most)
    differ = {str(number): maps for number, maps in enumerate(layers) if maps != usual}
    return {"maps": usual, **({"layers": differ} if differ else {})}


_OF_MIXTURES = "of a base's own mixture of experts no copies or LoRA experts are made"
_WHOLE = "DMoE trains a whole FFN for each group"
_ZERO = "LoRA experts, added experts and adapters start with an update of zero"
# Why a kind of experts does not stand beside another feature.
REFUSED = {
    ("lora", "mixture"): _OF_MIXTURES,
    ("copies", "mixture"): _OF_MIXTURES,
    **{(kind, "dmoe"): _WHOLE for kind in ("lora", "added", "adapters")},
    **{(kind, "random"): _ZERO for kind in ("lora", "added", "adapters")},
}
# The kinds that read a setting.
_READ_BY = {
    "lora_rank": ("lora", "adapter"), "lora_alpha": ("lora", "adapter"), "target_modules": ("adapter",),
    "expert_width": ("added",),
}  # fmt: skip
_NAMES = re.compile(r"[\w.]+(,[\w.]+)*")
_DRAWN = (".gate_proj.weight", ".up_proj.weight", ".lora_A.weight")


def chosen_kind(network: Any, plan: Plan, experts: NewExperts) -> ExpertKind:
    """The kind of the new experts of the dense model `network`, with its settings; refuses a setting that belongs to
    another kind or contradicts the plan, and a model that takes no such experts."""
    name = experts.expert_kind
    for setting, kinds in _READ_BY.items():
        value = getattr(experts, setting)
        is_read = name in kinds or (setting == "lora_alpha" and plan.rank is not None)
        if not is_read and value != NewExperts.model_fields[setting].default:
            raise InputError(
                f"{setting} is {value!r}, but expert_kind is {name!r}: leave it out, or set expert_kind to "
                f"{' or '.join(map(repr, kinds))}."
            )
    owns = plan.modules not in (None, "ffn") or plan.rank is not None
    if owns and name != "ffn":
        raise InputError(f"expert_kind is {name!r}, but the plan says what a language has: leave one of them out.")
    ffns = decoder_ffns(network)
    grown = [layer for layer, count in enumerate(plan.experts_per_layer) if count > 1]
    if name in ("ffn", "lora") and not owns and (mixtures := [layer for layer in grown if ffns[layer].is_mixture]):
        names = layer_names(network.config)
        raise InputError(f"Layers {', '.join(names[layer] for layer in mixtures)}: {_OF_MIXTURES}.")
    if name == "ffn" and not owns:
        return ExpertKind()
    feature = "adapters" if name in ("ffn", "adapter") else name
    if plan.groups:
        raise InputError(f"expert_kind is {name!r}, but {REFUSED[feature, 'dmoe']}: take another method.")
    if experts.expert_init != "copy":
        raise InputError(f"expert_init is {experts.expert_init!r}, but {REFUSED[feature, 'random']}: leave it out.")
    if name in ("ffn", "adapter"):
        return _adapters(network, plan, experts)
    if name == "added":
        return ExpertKind("added", {"width": experts.expert_width})
    return ExpertKind("lora", {"rank": experts.lora_rank, "alpha": float(experts.lora_alpha)})


def _adapters(network: Any, plan: Plan, experts: NewExperts) -> ExpertKind:
    if not plan.exclusive or set(plan.experts_per_layer) - {1, 2}:
        counts = plan.counts_in_words
        raise InputError(f"a language has one expert, but the plan has {counts}: take the plan `exclusive`.")
    by_plan = experts.expert_kind == "ffn"
    targets: Any = (plan.modules or "ffn") if by_plan else experts.target_modules or ALL_LINEAR
    named = f"{'modules' if by_plan else 'target_modules'} {targets!r}"
    if by_plan and targets == "all":
        targets = ALL_LINEAR
    elif by_plan and targets in ("ffn", "attention"):
        targets = [name for name in all_linear(network) if _in_ffn(network, name) == (targets == "ffn")]
    elif targets != ALL_LINEAR and _NAMES.fullmatch(targets):  # else PEFT takes a pattern
        targets = targets.split(",")
    rank = (plan.rank or 1) if by_plan else experts.lora_rank
    lora = LoraConfig(r=rank, lora_alpha=experts.lora_alpha, target_modules=targets)  # type: ignore[arg-type]
    entry = adapter_of(network, lora, named)
    if by_plan and plan.rank is None:  # whole copies
        layers = {layer: dict.fromkeys(maps) for layer, maps in entry.get("layers", {}).items()}
        entry = {"maps": dict.fromkeys(entry["maps"]), **({"layers": layers} if layers else {})}
    if not any(maps_of(entry, layer) for layer, count in enumerate(plan.experts_per_layer) if count > 1):
        raise InputError(f"{named}: updates nothing in the plan's layers ({plan.counts_in_words} experts).")
    return ExpertKind("adapter", {"adapters": [entry]})


def _in_ffn(network: Any, name: str) -> bool:
    places: list[str] = []
    for ffn in decoder_ffns(network):
        layer = ffn.place.rpartition(".")[0]
        places += [f"{layer}.fc1", f"{layer}.fc2"] if isinstance(ffn.module, SeparateFFN) else [ffn.place]
    return f"{name}.".startswith(tuple(f"{place}." for place in places))


def _place_seed(*numbers: int) -> int:
    value = 0
    for number in numbers:
        value = (value * 1_000_003 + number + 1) % ((1 << 61) - 1)
    return value


def new_weight(inner: str, shape: Sequence[int], place: tuple[int, ...]) -> torch.Tensor:
    """First weights, in float32, of tensors that the dense model lacks: a router (`init_router`), a LoRA expert's A and
    an added expert's `gate` and `up` (`init_kaiming`); a LoRA expert's B, an added expert's `down`, classifiers and
    gates are zero. `inner` is the name inside the layer's FFN block; `place` (seed, layer, ...) decides the weights."""
    weight = torch.zeros(tuple(shape))
    if inner == "router.weight":
        init_router(weight, torch.Generator().manual_seed(_place_seed(*place)))
    elif inner.endswith(_DRAWN):
        init_kaiming(weight, torch.Generator().manual_seed(_place_seed(*place, *inner.encode())))
    return weight


def random_weight(network: Any, ffn: nn.Module, rest: str, place: tuple[int, ...]) -> torch.Tensor:
    """The tensor `rest` of a random expert, on the CPU, drawn as the backbone's own initialisation draws it."""
    module_name, _, parameter_name = rest.rpartition(".")
    modules = [(ffn.get_submodule(module_name), parameter_name, (*place, *module_name.encode()))]
    if network.config.is_encoder_decoder:  # T5 initialises its FFN as a whole, others do so layer by layer
        modules.insert(0, (ffn, rest, place))
    for module, name, numbers in modules:
        own = copy.deepcopy(module).to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for parameter in own.parameters():
                parameter.fill_(torch.nan)
            torch.manual_seed(_place_seed(*numbers))
            network._init_weights(own)
        drawn = own.get_parameter(name).detach()
        if not drawn.isnan().any():  # which it left alone
            return drawn
    raise InputError(f"expert_init: {type(network).__name__} has no random first weights of {rest!r}: take `copy`.")
