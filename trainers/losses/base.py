"""What a router loss is, and the value that it is computed from.

A loss is one small object: its equation, its coefficient and the metrics that it logs. A new one is a subclass of
`LayerLoss` (the mean over layers of a function of one layer's routing) or of `RouterLoss` (anything else); the trainers
need not know it.

Shape suffixes: T tokens of a micro-batch, N experts of a layer.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from ...errors import InputError
from ...modeling import LayerRouting
from ...records import OLD as OLD


class TokenCounts(NamedTuple):
    """Numbers of tokens, 0-dimensional tensors: all but padding, those of old languages, those of known language."""

    counted: torch.Tensor
    old: torch.Tensor
    tagged: torch.Tensor


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens of a micro-batch count, in the order of the flattened batch.

    Attributes:
        counted_T: bool, every token but padding.
        old_T: bool, counted tokens of old languages (class 0).
        tagged_T: bool, counted tokens whose language is known.
        class_T: int64, the class of each token's language; any value where the language is not known.
    """

    counted_T: torch.Tensor
    old_T: torch.Tensor
    tagged_T: torch.Tensor
    class_T: torch.Tensor

    @property
    def new_T(self) -> torch.Tensor:
        """Bool, counted tokens of the languages that expansions brought."""
        return self.tagged_T & ~self.old_T

    def counts(self) -> torch.Tensor:
        """`[3]` float64, in the order of `TokenCounts`."""
        return torch.stack([mask.sum() for mask in (self.counted_T, self.old_T, self.tagged_T)]).double()


@dataclass(frozen=True)
class LossBatch:
    """One micro-batch after its forward pass, as each loss gets it.

    In evaluation `micro_batch` and `step` are the counts of this rank's batch, and `sum_over_ranks` changes nothing.

    Attributes:
        routing: of each expanded layer; virtual tokens of prompt tuning are cut off.
        tokens: which tokens count.
        local: counts of this rank's micro-batch.
        micro_batch: counts of the micro-batch over all ranks, at least 1.
        step: counts of the optimizer step over all its micro-batches and ranks, at least 1.
        selections: for each layer `[N]`, how many counted tokens of the micro-batch, over all ranks, select each of its
            routed experts.
        sum_over_ranks: sums a tensor over the ranks. Every rank must call it equally often, with equal shapes.
        record: `record(name, numerator, denominator)` adds to a metric, which is logged as the ratio of the sums over
            micro-batches and ranks; one whose denominator is 0 is left out. Every rank must record the same names.
        model: the expanded model itself, whatever wraps it for training.
        inputs: what the trainer's own loss was computed from, `input_ids` and `labels` among it.
        outputs: what the model returned (`outputs.logits`), if a loss has `needs_outputs`; else None.
    """

    routing: Sequence[LayerRouting]
    tokens: TokenMasks
    local: TokenCounts
    micro_batch: TokenCounts
    step: TokenCounts
    selections: Sequence[torch.Tensor]
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
    record: Callable[[str, torch.Tensor, torch.Tensor], None]
    model: Any = None
    inputs: Mapping[str, Any] | None = None
    outputs: Any = None


@dataclass(frozen=True)
class RouterLoss(ABC):
    """A loss that `RouterLossMixin` adds to a trainer's own, `coef` times.

    With `coef=0` it is logged and adds nothing, whether or not languages are known: all masks but `counted_T` may be
    empty then.

    Args:
        coef: its coefficient, at least 0.

    Attributes:
        name: as messages call it.
        metrics: the names that it records.
        needs_languages: it trains on tokens of known language, so the trainer must be told languages.
        needs_groups: the classes of languages are language groups, of which group g has expert g.
        needs_outputs: it reads `LossBatch.outputs`.

    Raises:
        InputError: the coefficient is negative or no number.
    """

    coef: float

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    needs_languages: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    needs_outputs: ClassVar[bool] = False

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
        """`coef` times the share."""
        return self.coef * self(batch)


class LayerLoss(RouterLoss):
    """The mean of `layer_loss` over the layers that the loss applies to; 0 where there is none. Logs `{name}_loss`.

    Attributes:
        over: the tokens that the loss is a mean over, a field of `TokenCounts`.
        per_micro_batch: the loss is not linear in the tokens. It is computed for each micro-batch (over all ranks), and
            an optimizer step is the mean of its micro-batches, weighted by tokens.
    """

    over: ClassVar[Literal["counted", "old", "tagged"]] = "counted"
    per_micro_batch: ClassVar[bool] = False

    @abstractmethod
    def layer_loss(self, batch: LossBatch, layer: int, count: torch.Tensor) -> torch.Tensor:
        """This rank's share of the loss of `batch.routing[layer]`: a scalar.

        Args:
            count: what a sum over tokens is divided by: the tokens `over` in the step, or in the micro-batch of a loss
                that is computed for each of them; over all ranks.
        """

    def applies_to(self, routing: LayerRouting) -> bool:
        """Whether a layer has what the loss is about."""
        return True

    def __call__(self, batch: LossBatch) -> torch.Tensor:
        return self._mean(batch, 1.0)

    def weighted(self, batch: LossBatch) -> torch.Tensor:
        return self._mean(batch, self.coef)

    def _mean(self, batch: LossBatch, coef: float) -> torch.Tensor:
        layers = [layer for layer, routing in enumerate(batch.routing) if self.applies_to(routing)]
        micro_batch, step = getattr(batch.micro_batch, self.over), getattr(batch.step, self.over)
        count, share = (micro_batch, micro_batch / step) if self.per_micro_batch else (step, 1.0)
        total = torch.zeros_like(step)
        for layer in layers:
            loss = self.layer_loss(batch, layer, count)
            # The coefficient is inside the sum: the order of the factors decides how the gradient is rounded.
            total = total + coef * loss * share / len(layers)
            batch.record(f"{self.name}_loss", loss * count, getattr(batch.local, self.over))
        return total


def checked_losses(losses: Iterable[RouterLoss]) -> tuple[RouterLoss, ...]:
    """The losses of a trainer.

    Raises:
        InputError: `losses` is no list of router losses, or two of them log the same metric.
    """
    if not isinstance(losses, Iterable):
        raise InputError(f"router_losses is {losses!r}: pass a list of losses, such as [BalanceLoss(0.01)].")
    found = tuple(losses)
    for loss in found:
        if not isinstance(loss, RouterLoss):
            raise InputError(
                f"router_losses holds {loss!r}, which is no RouterLoss: pass objects, as BalanceLoss(0.01)."
            )
    twice = [
        metric for metric, count in Counter(metric for loss in found for metric in loss.metrics).items() if count > 1
    ]
    if twice:
        raise InputError(f"router_losses holds two losses that log {', '.join(twice)}: leave one of them out.")
    return found
