"""The base classes of router losses, and the batch that they are computed from.

A loss is one small object: its equation, its coefficient and the metrics that it logs. A new loss is a subclass of
`LayerLoss` (the mean over layers of a function of one layer's routing) or of `RouterLoss` (any other loss); the
trainers do not change for it.

Shape suffixes: T tokens of a micro-batch, N experts of a layer.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from ...core.errors import InputError
from ...modeling import LayerRouting

OLD = 0  # class of the base model's languages


def where_counted(mask_T: torch.Tensor, values_T: torch.Tensor) -> torch.Tensor:
    """The values `[T, ...]` of counted tokens, and 0 for the others, whatever they are. For `values_T[mask_T]` the host
    would wait, to know from the device how many they are."""
    return values_T.where(mask_T.view(-1, *[1] * (values_T.dim() - 1)), 0)


class TokenCounts(NamedTuple):
    """Numbers of tokens, 0-dimensional tensors: all but padding, tokens of old languages, tokens of known language."""

    counted: torch.Tensor
    old: torch.Tensor
    tagged: torch.Tensor


@dataclass(frozen=True)
class TokenMasks:
    """Masks of a micro-batch's tokens, in the order of the flattened batch."""

    counted_T: torch.Tensor  # bool, every token but padding
    old_T: torch.Tensor  # bool, counted tokens of old languages (class 0)
    tagged_T: torch.Tensor  # bool, counted tokens whose language is known
    class_T: torch.Tensor  # int64, the class of each token's language; arbitrary if the language is not known

    @property
    def new_T(self) -> torch.Tensor:
        """Bool, counted tokens of the languages that expansions added."""
        return self.tagged_T & ~self.old_T

    def counts(self) -> torch.Tensor:
        """`[3]` float64, in the order of `TokenCounts`."""
        return torch.stack([mask.sum() for mask in (self.counted_T, self.old_T, self.tagged_T)]).double()


@dataclass(frozen=True)
class LossBatch:
    """One micro-batch after its forward pass, the argument of each loss.

    In evaluation `micro_batch` and `step` are the counts of this rank's batch, and `sum_over_ranks` does nothing.
    """

    routing: Sequence[LayerRouting]  # of each expanded layer, without virtual tokens of prompt tuning
    tokens: TokenMasks
    local: TokenCounts  # of this rank's micro-batch
    micro_batch: TokenCounts  # of the micro-batch over all ranks, at least 1
    step: TokenCounts  # of the optimizer step over all its micro-batches and ranks, at least 1
    selections: Sequence[
        torch.Tensor
    ]  # of each layer [N], the micro-batch's tokens, over all ranks, that select each expert
    # Sums a tensor over the ranks. Every rank must call it equally often, with equal shapes.
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
    # `record(name, numerator, denominator)` adds to a metric, which is logged as the ratio of the sums over
    # micro-batches and ranks, unless the denominator is 0. Every rank must record the same names.
    record: Callable[[str, torch.Tensor, torch.Tensor], None]
    model: Any = None  # the expanded model itself, without its wrappers for training
    inputs: Mapping[str, Any] | None = None  # of the trainer's own loss, such as `input_ids` and `labels`
    outputs: Any = None  # the model's (`outputs.logits`), if a loss has `needs_outputs`
    # Of an encoder-decoder, whose losses are computed for its encoder and for its decoder, the routing of the other
    # one's layers, on other tokens: a mean over layers counts them.
    others: Sequence[LayerRouting] = ()

    @property
    def has_choice(self) -> bool:
        """Whether some layer leaves a choice; else shares and balance cannot change."""
        return any(routing.has_choice for routing in (*self.routing, *self.others))


@dataclass(frozen=True)
class RouterLoss(ABC):
    """A loss that `RouterLossMixin` adds to a trainer's own loss, `coef` times. At 0 it is only logged, even if the
    languages are not known: all masks but `counted_T` may be empty then.

    Raises:
        InputError: the coefficient is negative or not a number.
    """

    coef: float

    name: ClassVar[str]  # in messages
    metrics: ClassVar[tuple[str, ...]]  # the names that it records
    needs_languages: ClassVar[bool] = False  # whether it trains on tokens of known language
    needs_groups: ClassVar[bool] = False  # whether the classes are language groups, of which group g has expert g
    needs_outputs: ClassVar[bool] = False  # whether it reads `LossBatch.outputs`
    # Whether it does without `outputs.logits`, which a large batch then never has at once: it reads `outputs.in_pieces`
    # and `outputs.hidden_of_head` (`trainers/pieces.py`) where they are set.
    in_pieces: ClassVar[bool] = False
    logged_at_zero: ClassVar[bool] = True  # whether a stage computes it, for the log, where its coefficient is 0
    # A trainer computes it twice for an encoder-decoder, for the source's tokens in the encoder's layers and for the
    # target's in the decoder's, and adds both up.
    for_encoder_decoders: ClassVar[bool] = True
    over: ClassVar[Literal["counted", "old", "tagged"]] = "counted"  # the tokens over which it is a mean

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coef) and self.coef >= 0):
            raise InputError(f"{type(self).__name__}: coef is {self.coef}: must be a number of at least 0.")

    @abstractmethod
    def __call__(self, batch: LossBatch) -> torch.Tensor:
        """This rank's share of the loss of the optimizer step: a scalar, without the coefficient.

        The shares of all micro-batches and ranks add up to the loss, so a mean over tokens is the sum over this batch's
        tokens divided by the count in `batch.step`.
        """

    def weighted(self, batch: LossBatch) -> torch.Tensor:
        """This rank's share of the loss, times `coef`."""
        return self.coef * self(batch)


class LayerLoss(RouterLoss):
    """The mean of `layer_loss` over the layers to which the loss applies; 0 without any. Logs `{name}_loss`."""

    # Whether the loss is computed for each micro-batch (over all ranks), since it is not linear in the tokens. An
    # optimizer step is then the mean of its micro-batches, weighted by tokens.
    per_micro_batch: ClassVar[bool] = False
    of_choice: ClassVar[bool] = False  # whether it is constant, and not logged, where a token takes all experts

    @abstractmethod
    def layer_loss(self, batch: LossBatch, layer: int, count: torch.Tensor) -> torch.Tensor:
        """This rank's share of the loss of `batch.routing[layer]`: a scalar.

        Args:
            count: the divisor of a sum over tokens: the number of tokens `over` in the step or, with
                `per_micro_batch`, in the micro-batch; over all ranks.
        """

    def applies_to(self, routing: LayerRouting) -> bool:
        """Whether the loss applies to a layer with this routing."""
        return True

    def __call__(self, batch: LossBatch) -> torch.Tensor:
        return self._mean(batch, 1.0)

    def weighted(self, batch: LossBatch) -> torch.Tensor:
        return self._mean(batch, self.coef)

    def _mean(self, batch: LossBatch, coef: float) -> torch.Tensor:
        layers = [layer for layer, routing in enumerate(batch.routing) if self.applies_to(routing)]
        number = len(layers) + sum(map(self.applies_to, batch.others))
        micro_batch, step = getattr(batch.micro_batch, self.over), getattr(batch.step, self.over)
        count, share = (micro_batch, micro_batch / step) if self.per_micro_batch else (step, 1.0)
        total = torch.zeros_like(step)
        for layer in layers:
            loss = self.layer_loss(batch, layer, count)
            # The coefficient is inside the sum: the order of the factors determines the gradient's rounding.
            if coef:  # else a loss that is not finite would count
                total = total + coef * loss * share / number
            if batch.has_choice or not self.of_choice:
                batch.record(f"{self.name}_loss", loss * count, getattr(batch.local, self.over))
        return total


def checked_losses(losses: Iterable[RouterLoss]) -> tuple[RouterLoss, ...]:
    """The losses of a trainer; refuses what is no list of router losses, and two losses that log the same metric."""
    if not isinstance(losses, Iterable):
        raise InputError(f"router_losses is {losses!r}: must be a list of losses, such as [BalanceLoss(0.01)].")
    checked = tuple(losses)
    if wrong := [loss for loss in checked if not isinstance(loss, RouterLoss)]:
        raise InputError(f"router_losses holds {wrong[0]!r}, which is not a RouterLoss.")
    counts = Counter(metric for loss in checked for metric in loss.metrics)
    if twice := [metric for metric, count in counts.items() if count > 1]:
        raise InputError(f"router_losses holds two losses that log {', '.join(twice)}: leave one of them out.")
    return checked
