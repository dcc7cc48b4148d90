"""Which parameters each stage trains. Called after loading: loading resets `requires_grad`."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from torch import nn


class Stage(StrEnum):
    """What trains: the newest experts and the routers (`POST_PRETRAIN`); routers and classifiers (`REVIEW`); the last
    expert and its rows of the routers (`ADAPT`); everything in the others."""

    POST_PRETRAIN = "post-pretrain"
    REVIEW = "review"
    EVERYTHING = "everything"
    GROUP = "group"
    NORMAL = "normal"
    ADAPT = "adapt"

    @property
    def trains_everything(self) -> bool:
        return self in (Stage.EVERYTHING, Stage.GROUP, Stage.NORMAL)


@dataclass(frozen=True)
class FreezeReport:
    """Parameter counts after `freeze`."""

    stage: str
    trainable: int
    total: int
    parts: dict[str, int]

    def __str__(self) -> str:
        share = 100 * self.trainable / self.total
        parts = ", ".join(f"{name} {count:,}" for name, count in self.parts.items() if count)
        return (
            f"{self.stage}: {self.trainable:,} of {self.total:,} parameters train ({share:.2f} %): {parts}; "
            f"{self.total - self.trainable:,} are frozen"
        )


def freeze(model: nn.Module, stage: Stage) -> FreezeReport:
    """Sets `requires_grad` of every parameter of an expanded model for `stage`.

    `ADAPT` trains one row of each router, which `requires_grad` cannot say: `AdaptTrainer` holds the others still.

    Raises:
        ValueError: the model has an adapter, whose own configuration says what trains (and what is saved).
    """
    if getattr(model, "peft_config", None):
        raise ValueError(
            "The model has a PEFT adapter, which itself says what trains, and saves nothing else: use MoESFTTrainer or "
            "`class MyTrainer(RouterLossMixin, Trainer)`, which freeze nothing, or merge the adapter first."
        )
    model.requires_grad_(stage.trains_everything)
    parts = dict.fromkeys(("base", "experts", "routers", "classifiers"), 0)
    for kind, module in _trained_modules(model, stage):
        module.requires_grad_(True)
        parts[kind] += sum(_size(parameter) for parameter in module.parameters())
    parameters = list(model.parameters())
    trainable = sum(_size(parameter) for parameter in parameters if parameter.requires_grad)
    parts["base"] = trainable - sum(parts.values())
    return FreezeReport(str(stage), trainable, sum(_size(parameter) for parameter in parameters), parts)


def _size(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # DeepSpeed's ZeRO-3 leaves empty shells on the ranks


def _trained_modules(model: nn.Module, stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    for ffn in model.expanded_ffns().values():  # type: ignore[operator]
        if stage is Stage.ADAPT:
            yield "experts", ffn.experts[-1]
        elif stage is not Stage.REVIEW:
            yield from (("experts", expert) for expert in ffn.experts[ffn.experts_of_class[-2] :])
        yield "routers", ffn.router
        if ffn.conditional_gate is not None and stage is not Stage.ADAPT:
            yield "routers", ffn.conditional_gate
        if ffn.classifier is not None and (stage is Stage.REVIEW or stage.trains_everything):
            yield "classifiers", ffn.classifier
