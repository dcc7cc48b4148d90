"""The kind and the start of new experts, as the user chooses them."""

from collections.abc import Sequence
from typing import Any

from ..errors import InputError
from ..memory import device_memory, gigabytes
from ..modeling import DecoderFFN, decoder_ffns, layer_names
from ..modeling.expert_kinds import KINDS, AddedKind, ExpertKind, LoraKind
from ..planning.plan import Plan

EXPERT_INITS = ("copy", "random")


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
) -> ExpertKind:
    """The kind of the new experts of the dense model `network`, with its settings."""
    ffns = decoder_ffns(network)
    grown = [layer for layer, count in enumerate(plan.experts_per_layer) if count > 1]
    if expert_width is not None and expert_kind != "added":
        raise InputError(
            f"expert_width is {expert_width}, but expert_kind is {expert_kind!r}: only added experts have a width of "
            "their own; leave it out, or set expert_kind to 'added'."
        )
    mixtures = [layer for layer in grown if ffns[layer].is_mixture]
    if mixtures and expert_kind != "added":
        names = layer_names(network.config)
        raise InputError(
            f"Layers {', '.join(names[layer] for layer in mixtures)} are mixtures of experts of the backbone's own, of "
            f"which no {'LoRA experts' if expert_kind == 'lora' else 'copies'} are made: take --expert-kind added with "
            "an --expert-width (expert_kind: added), or give these layers 1 expert in the plan."
        )
    if expert_kind == "ffn":
        return ExpertKind()
    if plan.groups:
        raise InputError(
            f"expert_kind is {expert_kind!r}, but DMoE trains a whole FFN for each group: leave it out, or take "
            "another method."
        )
    if expert_kind == "lora":
        if expert_init != "copy":
            raise InputError(
                f"expert_init is {expert_init!r}, but LoRA experts start as expert 0, with an update of zero: leave it "
                "out."
            )
        _check_lora(ffns, grown, lora_rank, lora_alpha)
        return LoraKind(lora_rank, float(lora_alpha))
    _check_width(network, plan, expert_width)
    return AddedKind(int(expert_width or 0))


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
    memory, hidden = device_memory(), network.config.hidden_size
    most = max(plan.experts_per_layer) - 1
    if memory is not None and 3 * 4 * hidden * width * most > memory:
        raise InputError(
            f"expert_width is {width:,}: the new experts of one layer ({most} of 3 x {hidden:,} x {width:,} weights in "
            f"float32) would not fit into this machine's memory of {gigabytes(memory)}."
        )


def recorded_init(kind: ExpertKind, expert_init: str) -> str:
    """How new experts start, in a history."""
    return {"copy": "neurons", "random": "random neurons"}[expert_init] if kind.name == "added" else expert_init
