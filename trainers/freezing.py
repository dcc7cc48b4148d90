"""Which parameters each stage trains. Called after loading: loading resets `requires_grad`."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from torch import nn


class Stage(StrEnum):
    """What trains: new experts and routers; routers and classifiers; or everything."""

    POST_PRETRAIN = "post-pretrain"
    REVIEW = "review"
    EVERYTHING = "everything"


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
    """Sets `requires_grad` of every parameter of an expanded model for `stage`."""
    model.requires_grad_(stage is Stage.EVERYTHING)
    parts = dict.fromkeys(("base", "experts", "routers", "classifiers"), 0)
    for kind, module in _trained_modules(model, stage):
        module.requires_grad_(True)
        parts[kind] += sum(parameter.numel() for parameter in module.parameters())
    parameters = list(model.parameters())
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    parts["base"] = trainable - sum(parts.values())
    return FreezeReport(str(stage), trainable, sum(parameter.numel() for parameter in parameters), parts)


def _trained_modules(model: nn.Module, stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    for ffn in model.expanded_ffns().values():  # type: ignore[operator]
        if stage is not Stage.REVIEW:
            yield from (("experts", expert) for expert in ffn.experts[1:])
        yield "routers", ffn.router
        if ffn.classifier is not None and stage is not Stage.POST_PRETRAIN:
            yield "classifiers", ffn.classifier
