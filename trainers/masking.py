"""Masking during training: Elbayad et al.'s EOM, FOM and CMR masking, gating dropout, and the dropout of LoRA experts.

Shape suffixes as in `modeling/routing.py`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from torch import nn

from ..core.errors import InputError
from ..core.schema import Probability, Schema, checked
from ..modeling.routing import Choice
from ..modeling.updates import LoraUpdate
from .freezing import check_is_expanded

# Number of decisions that gating dropout keeps: layers times forward passes whose backward pass is still to come.
_REMEMBERED = 4096


class Masking(Schema):
    """Probabilities of masking (Elbayad et al.) and of dropout during training.

    Raises:
        InputError: a value is not a probability of at least 0 and less than 1.
    """

    expert_output: Annotated[
        Probability, Field(description="probability of each active expert of a token to have its output zeroed (EOM)")
    ] = 0.0
    final_output: Annotated[
        Probability,
        Field(description="probability of each token to have the outputs of all its routed experts zeroed (FOM)"),
    ] = 0.0
    conditional_routing: Annotated[
        Probability,
        Field(description="probability of each token to take the shared expert 0 alone (CMR)"),
    ] = 0.0
    gating_dropout: Annotated[
        Probability,
        Field(description="probability of each batch to send its tokens to experts by position (gating dropout)"),
    ] = 0.0
    lora_dropout: Annotated[
        Probability,
        Field(description="probability of each input of LoRA experts' updates to be zeroed, as PEFT's `lora_dropout`"),
    ] = 0.0

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a `lora_dropout` of 0: runs that began before it was a key go on."""
        return {name: value for name, value in dump(self).items() if name != "lora_dropout" or value}


def check_masking(masking: Masking | None, config: Any, where: str = "masking") -> None:
    """Refuses to mask what a model has not, by its configuration or what is known of it; the message calls the settings
    `where`."""
    if masking is None:
        return
    if masking.lora_dropout and getattr(config, "expert_kind", "lora") != "lora":
        raise InputError(f"{where}.lora_dropout is for LoRA experts, but the checkpoint has none.")
    if masking.conditional_routing and not getattr(config, "conditional_routing", False):
        raise InputError(
            f"{where}.conditional_routing masks the routed experts beside a shared one, but the checkpoint shares "
            "none: expand with --conditional-routing."
        )


@checked
def mask_routing(model: nn.Module, masking: Masking | None) -> AbstractContextManager:
    """Inside, an expanded model in training mode masks its routing by `masking`; in evaluation mode it does not.

    Run the backward pass inside too: gradient checkpointing repeats the forward pass in it, with the same draws.

    Raises:
        InputError: the model has not what is masked.
    """
    if masking is None or masking == Masking():
        return nullcontext()
    check_is_expanded(model)
    expanded: Any = model
    check_masking(masking, expanded.config)
    asking = expanded.routing_control.asking(change_choice=_MaskedChoice(masking, min(expanded.expanded_ffns())))
    return _with_dropout(expanded, masking.lora_dropout, asking) if masking.lora_dropout else asking


@contextmanager
def _with_dropout(model: nn.Module, probability: float, asking: AbstractContextManager) -> Iterator[None]:
    updates = [module for module in model.modules() if isinstance(module, LoraUpdate)]
    before = [update.dropout for update in updates]
    for update in updates:
        update.dropout = probability
    try:
        with asking:
            yield
    finally:
        for update, earlier in zip(updates, before, strict=True):
            update.dropout = earlier


class _MaskedChoice:
    """Changes the choices of one model's layers; for `RoutingRequest.change_choice`."""

    def __init__(self, masking: Masking, first_layer: int) -> None:
        self.masking = masking
        self.first_layer = first_layer
        self.taken = False  # whether gating dropout applied to the batch of the last forward pass
        self.remembered: dict[tuple[int, int], bool] = {}

    def __call__(self, layer: int, choice: Choice) -> Choice:
        masking = self.masking
        weights_TK, index_TK = choice.weights, choice.experts
        if masking.gating_dropout and self._takes_batch(layer):
            weights_TK, index_TK = local_experts(weights_TK, choice.num_experts)
        weights_TK, index_TK = mask_outputs(
            weights_TK, index_TK, choice.num_experts, masking.expert_output, masking.final_output
        )
        closed_T = choice.closed
        if masking.conditional_routing:
            masked_T = torch.rand_like(weights_TK[:, 0]) < masking.conditional_routing
            closed_T = masked_T if closed_T is None else closed_T | masked_T
        return replace(choice, weights=weights_TK, experts=index_TK, closed=closed_T)

    def _takes_batch(self, layer: int) -> bool:
        """Whether gating dropout applies to the batch: drawn in the first layer, for all layers.

        Gradient checkpointing may run a later layer again after another forward pass, but restores the state of the
        random number generator of the layer's first run: this state identifies the forward pass.
        """
        if layer == self.first_layer:
            self.taken = torch.rand(()).item() < self.masking.gating_dropout
            return self.taken
        taken = self.remembered.setdefault((layer, hash(torch.get_rng_state().numpy().tobytes())), self.taken)
        if len(self.remembered) > _REMEMBERED:
            del self.remembered[next(iter(self.remembered))]
        return taken


def mask_outputs(
    weights_TK: torch.Tensor, index_TK: torch.Tensor, none: int, expert_output: float, final_output: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elbayad et al.'s masking: each assignment's output is zero with probability `expert_output`, each token's whole
    output with probability `final_output`. The other weights do not change. Index `none` means "no expert": masked
    experts do not run."""
    for probability, drawn in ((expert_output, weights_TK), (final_output, weights_TK[:, :1])):
        if probability:
            masked = torch.rand(drawn.shape, device=drawn.device) < probability
            weights_TK, index_TK = weights_TK.masked_fill(masked, 0), index_TK.masked_fill(masked, none)
    return weights_TK, index_TK


def local_experts(weights_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing of a batch whose tokens may not leave their device (gating dropout), as if each of N devices held one
    expert and one Nth of the tokens: weights 1 and expert indices, `[T, 1]`, in place of `weights_TK`."""
    T = weights_TK.shape[0]
    index_T = torch.arange(T, device=weights_TK.device) * num_experts // T
    return torch.ones_like(weights_TK[:, :1]), index_T.unsqueeze(-1)
