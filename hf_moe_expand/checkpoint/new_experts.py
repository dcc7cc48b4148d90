"""What an expansion adds: the kind of the new experts, as the user chooses it, and the first weights of routers,
classifiers, gates, LoRA updates, added experts and random experts.

Each tensor's place (seed, layer, ...) decides its values, which depend neither on other tensors nor on their order.
"""

import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psutil
import torch
from peft import LoraConfig
from torch import nn

from ..core.disk import readable_size
from ..core.errors import InputError
from ..modeling import DecoderFFN, decoder_ffns, layer_names
from ..modeling.routing import init_router
from ..modeling.updates import init_kaiming
from ..planning.plan import Plan
from .adapter_maps import ALL_LINEAR, adapter_of
from .kinds import KINDS, AdapterKind, AddedKind, ExpertKind, LoraKind
from .settings import LORA_ALPHA, LORA_RANK
from .stored import Place

EXPERT_INITS = ("copy", "random")
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
_NAMES = re.compile(r"[\w.]+(,[\w.]+)*")
_DRAWN = (".gate_proj.weight", ".up_proj.weight", ".lora_A.weight")


def check_kinds(expert_init: str, expert_kind: str) -> None:
    """Refuses an unknown expert_init or expert_kind."""
    if expert_init not in EXPERT_INITS:
        raise InputError(f"expert_init is {expert_init!r}; known: {', '.join(EXPERT_INITS)}.")
    if expert_kind not in KINDS:
        raise InputError(f"expert_kind is {expert_kind!r}; known: {', '.join(KINDS)}.")


def chosen_kind(
    network: Any,
    plan: Plan,
    expert_init: str,
    expert_kind: str,
    lora_rank: int,
    lora_alpha: float,
    expert_width: int | None,
    target_modules: str | Sequence[str] | None = None,
) -> ExpertKind:
    """The kind of the new experts of the dense model `network`, with its settings."""
    if target_modules is not None and expert_kind != "adapter":
        raise InputError(
            f"target_modules is {target_modules!r}, but expert_kind is {expert_kind!r}: only adapters choose the maps "
            "that they update; leave it out, or set expert_kind to 'adapter'."
        )
    if expert_kind not in ("lora", "adapter") and (lora_rank, lora_alpha) != (LORA_RANK, LORA_ALPHA):
        raise InputError(
            f"lora_rank is {lora_rank} and lora_alpha {lora_alpha:g}, but expert_kind is {expert_kind!r}: leave them "
            "out, or set expert_kind to 'lora' or 'adapter'."
        )
    ffns = decoder_ffns(network)
    grown = [layer for layer, count in enumerate(plan.experts_per_layer) if count > 1]
    if expert_width is not None and expert_kind != "added":
        raise InputError(
            f"expert_width is {expert_width}, but expert_kind is {expert_kind!r}: only added experts have a width of "
            "their own; leave it out, or set expert_kind to 'added'."
        )
    mixtures = [layer for layer in grown if ffns[layer].is_mixture]
    if mixtures and expert_kind not in ("added", "adapter"):
        names = layer_names(network.config)
        raise InputError(
            f"Layers {', '.join(names[layer] for layer in mixtures)}: {_OF_MIXTURES}: take --expert-kind added with an "
            "--expert-width (expert_kind: added), adapters (expert_kind: adapter), or give these layers 1 expert in "
            "the plan."
        )
    if expert_kind == "ffn":
        return ExpertKind()
    feature = "adapters" if expert_kind == "adapter" else expert_kind
    if plan.groups:
        raise InputError(
            f"expert_kind is {expert_kind!r}, but {REFUSED[feature, 'dmoe']}: leave it out, or take another method."
        )
    if expert_init != "copy":
        raise InputError(f"expert_init is {expert_init!r}, but {REFUSED[feature, 'random']}: leave it out.")
    if expert_kind == "adapter":
        return _adapters(network, plan, lora_rank, lora_alpha, target_modules)
    if expert_kind == "lora":
        _check_lora(ffns, grown, lora_rank, lora_alpha)
        return LoraKind(lora_rank, float(lora_alpha))
    _check_width(network, plan, expert_width)
    return AddedKind(int(expert_width or 0))


def _adapters(
    network: Any, plan: Plan, rank: int, alpha: float, target_modules: str | Sequence[str] | None
) -> AdapterKind:
    if not plan.exclusive or set(plan.experts_per_layer) - {1, 2}:
        raise InputError(
            f"expert_kind is 'adapter', but the plan has {plan.counts_in_words} experts"
            f"{'' if plan.exclusive else ' and a router'}: a language has one adapter and no router; take the plan "
            "`exclusive` (`plan exclusive`; `plan: {method: exclusive}`)."
        )
    if alpha <= 0 or rank < 1:
        raise InputError(f"lora_rank is {rank} and lora_alpha {alpha:g}: rank must be at least 1, and alpha above 0.")
    targets = ALL_LINEAR if target_modules is None else target_modules
    if isinstance(targets, str) and targets != ALL_LINEAR and _NAMES.fullmatch(targets):  # else PEFT takes a pattern
        targets = targets.split(",")
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)  # type: ignore[arg-type]
    kind = AdapterKind([adapter_of(network, lora, f"target_modules {targets!r}")])
    if not any(kind.maps(0, layer) for layer, count in enumerate(plan.experts_per_layer) if count > 1):
        raise InputError(
            f"target_modules {targets!r}: updates nothing in the plan's layers ({plan.counts_in_words} experts): name "
            "maps of layers that the plan expands."
        )
    return kind


def _check_lora(ffns: Sequence[DecoderFFN], grown: Sequence[int], rank: int, alpha: float) -> None:
    ffn = ffns[grown[0]].module if grown else next(ffn.module for ffn in ffns if not ffn.is_mixture)
    narrowest = min(min(parameter.shape) for parameter in ffn.parameters() if parameter.dim() > 1)
    if not 1 <= rank < narrowest:
        raise InputError(
            f"lora_rank is {rank}: must be at least 1 and below {narrowest}, the narrowest side of the FFN's linear "
            "layers."
        )
    if alpha <= 0:
        raise InputError(f"lora_alpha is {alpha:g}: must be above 0.")


def _check_width(network: Any, plan: Plan, width: int | None) -> None:
    """Refuses a width that is missing, below 1, or too large for the new experts of one layer to fit into memory."""
    if width is None:
        raise InputError("expert_kind is 'added', but there is no expert_width: give the width of the added FFNs.")
    if width < 1:
        raise InputError(f"expert_width is {width}: must be at least 1.")
    memory, hidden = psutil.virtual_memory().total, network.config.hidden_size
    most = max(plan.experts_per_layer) - 1
    if 3 * 4 * hidden * width * most > memory:
        raise InputError(
            f"expert_width is {width:,}: the new experts of one layer ({most} of 3 x {hidden:,} x {width:,} weights in "
            f"float32) would not fit into this machine's memory of {readable_size(memory)}."
        )


def _place_seed(*numbers: int) -> int:
    value = 0
    for number in numbers:
        value = (value * 1_000_003 + number + 1) % ((1 << 61) - 1)
    return value


def _place_generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(_place_seed(*numbers))


def new_weight(inner: str, shape: Sequence[int], place: tuple[int, ...]) -> torch.Tensor:
    """First weights, in float32, of tensors that the dense model lacks: a router (`init_router`), a LoRA expert's A and
    an added expert's `gate` and `up` (`init_kaiming`); a LoRA expert's B, an added expert's `down`, classifiers and
    gates are zero.

    Args:
        inner: name of the tensor inside the layer's FFN block.
        place: seed, layer and so on, which decide the weights.
    """
    weight = torch.zeros(tuple(shape))
    if inner == "router.weight":
        init_router(weight, _place_generator(*place))
    elif inner.endswith(_DRAWN):
        init_kaiming(weight, _place_generator(*place, *inner.encode()))
    return weight


def first_weight(
    network: Any, ffn: DecoderFFN, place: Place, expert_init: str, seed: int
) -> Callable[[], torch.Tensor] | None:
    """A function that makes a tensor of the expanded model which the dense one lacks, or one of a random expert; None
    for the dense model's own and copies of them.

    Args:
        network: the dense model.
        ffn: its FFN in the tensor's layer.
    """
    if place.dense is None:
        return partial(new_weight, place.inner, place.shape, (seed, place.layer))
    if expert_init == "random" and place.expert:
        rest = place.dense.removeprefix(f"{ffn.name}.")
        return partial(_random_weight, network, ffn.module, rest, (seed, place.layer, place.expert))
    return None


def _random_weight(network: Any, ffn: nn.Module, rest: str, place: tuple[int, ...]) -> torch.Tensor:
    """The tensor `rest` of a random expert, on the CPU, drawn as the backbone's own initialisation draws it."""
    module_name, _, parameter_name = rest.rpartition(".")
    modules = [(ffn.get_submodule(module_name), parameter_name, (*place, *module_name.encode()))]
    if network.config.is_encoder_decoder:  # T5 initialises its FFN as a whole, others do so layer by layer
        modules.insert(0, (ffn, rest, place))
    for module, name, numbers in modules:
        drawn = _drawn(network, module, name, _place_seed(*numbers))
        if not drawn.isnan().any():
            return drawn
    raise InputError(
        f"expert_init: {type(network).__name__} has no random first weights of {rest!r}: take `copy` instead."
    )


def _drawn(network: Any, module: nn.Module, name: str, seed: int) -> torch.Tensor:
    """A parameter of a copy of the module that the backbone has initialised; NaN if it leaves the parameter alone."""
    module = copy.deepcopy(module).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
        torch.manual_seed(seed)
        network._init_weights(module)
    return module.get_parameter(name).detach()
