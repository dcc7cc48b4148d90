"""What only training masks: Elbayad et al.'s EOM, FOM and CMR masking, and gating dropout.

Shape suffixes as in `modeling/routing.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field

from ..errors import InputError
from ..modeling.routing import Choice
from ..schema import Probability, settings

# Decisions that gating dropout remembers: layers times forward passes that still wait for their backward pass.
_REMEMBERED = 4096


@settings
class Masking:
    """What training masks (Elbayad et al.), and gating dropout.

    Raises:
        InputError: a value is no probability of at least 0 and less than 1.
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
        Field(description="probability of each token to have its gate closed, so that expert 0 runs alone (CMR)"),
    ] = 0.0
    gating_dropout: Annotated[
        Probability,
        Field(description="probability of each batch to have its tokens sent to experts by their place in it"),
    ] = 0.0


def check_gates(masking: Masking | None, has_gates: bool, where: str = "masking") -> None:
    """Refuses to mask the gates of a model without gates.

    Args:
        where: what the message calls the settings.

    Raises:
        InputError: `conditional_routing` is masked, but no layer has a gate.
    """
    if masking is not None and masking.conditional_routing and not has_gates:
        raise InputError(
            f"{where}.conditional_routing masks a gate, and the checkpoint has none: expand with "
            "--conditional-routing (`expand: {conditional_routing: true}` in a recipe)."
        )


@contextmanager
def mask_routing(model: Any, masking: Masking | None) -> Iterator[None]:
    """Inside, an expanded model that trains masks what `masking` says; in evaluation mode it does not.

    The backward pass belongs inside too: gradient checkpointing runs the forward pass again there, with the same draws.

    Raises:
        InputError: gates are to be masked, and the model has none.
    """
    if masking is None or masking == Masking():
        yield
        return
    check_gates(masking, model.config.conditional_routing)
    control = model.routing_control
    before = control.change_choice
    control.change_choice = _MaskedChoice(masking, min(model.expanded_ffns()))
    try:
        yield
    finally:
        control.change_choice = before


class MaskingMixin:
    """Put in front of a Trainer class: its training steps mask the routing of an expanded model.

    Args:
        masking: what is masked; None masks nothing.

    Raises:
        InputError: gates are to be masked, and the model has none.
    """

    def __init__(self, model: Any, *args: Any, masking: Masking | None = None, **kwargs: Any) -> None:
        if masking is not None:
            check_gates(masking, model.config.conditional_routing)
        self.masking = masking
        super().__init__(model, *args, **kwargs)  # type: ignore[call-arg]

    def training_step(self, model: Any, inputs: dict, num_items_in_batch: Any = None) -> torch.Tensor:
        expanded = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        with mask_routing(expanded, self.masking):
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]


class _MaskedChoice:
    """Changes the choices of one model's layers; for `RoutingControl.change_choice`."""

    def __init__(self, masking: Masking, first_layer: int) -> None:
        self.masking = masking
        self.first_layer = first_layer
        self.taken = False  # whether gating dropout took the batch of the last forward pass
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
        """Drawn in the first layer, for all layers.

        Gradient checkpointing runs a later layer again when another forward pass may have come in between, but with
        the state of the random number generator in which the layer ran first: that state names the forward pass.
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
    """Elbayad et al.'s expert output masking and final output masking.

    Each assignment's output is zero with probability `expert_output`, each token's whole output with probability
    `final_output`. The other weights stay as they are. Index `none` means "no expert": what is masked does not run.
    """
    for probability, drawn in ((expert_output, weights_TK), (final_output, weights_TK[:, :1])):
        if probability:
            masked = torch.rand(drawn.shape, device=drawn.device) < probability
            weights_TK, index_TK = weights_TK.masked_fill(masked, 0), index_TK.masked_fill(masked, none)
    return weights_TK, index_TK


def local_experts(weights_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing of a batch whose tokens may not leave their device (gating dropout), as if each of N devices held an
    expert and an Nth of the tokens: weights 1 and expert indices, `[T, 1]`; `weights_TK` are those it replaces."""
    T = weights_TK.shape[0]
    index_T = torch.arange(T, device=weights_TK.device) * num_experts // T
    return torch.ones_like(weights_TK[:, :1]), index_T.unsqueeze(-1)
