"""Sets the parameters that train (call it after loading, since loading resets `requires_grad`), and lets a model that
trains evaluate for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ..core.errors import InputError
from ..core.schema import shown_value
from ..modeling.language_modules import OuterModules
from ..modeling.part_joined import joins_packs

# The base of the mixins: a type checker lets it have all that the Trainer behind a mixin has.
TrainerBase: Any = object


@dataclass(frozen=True)
class Trained:
    """The parts of an expanded model that a stage trains. The language gate, which is fitted, never trains."""

    everything: bool = False  # all parameters
    # `new`: those of the last expansion, or of all packs of a joined model; `last`: the last alone.
    experts: Literal["none", "new", "last"] = "none"
    routers: bool = True  # and, with conditional routing, what learns the shared expert's share
    classifiers: bool = False  # routing classifiers
    # Only the last expert's row of each router (`kept_rows`); the shared expert's share stays, too.
    last_router_row: bool = False


EVERYTHING = Trained(everything=True, experts="new", classifiers=True)


def check_is_expanded(model: Any) -> None:
    """Refuses what is no expanded model: a dense one, or the name of one."""
    if getattr(model, "expanded_ffns", dict)():
        return
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {shown_value(model)}: give a loaded expanded model.")
    raise InputError(
        f"No layer of the model is expanded (a {type(model).__name__}), so that no expert or router can train: expand "
        "the model first, with expand_model(model, plan)."
    )


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


def freeze(model: nn.Module, trained: Trained, stage: str = "training") -> FreezeReport:
    """Sets `requires_grad` of every parameter of an expanded model, so that these parts train; the report calls the
    training `stage`.

    Raises:
        InputError: the model is not expanded, or has an adapter, whose own configuration determines the trained and
            saved parameters.
    """
    if getattr(model, "peft_config", None):
        raise InputError(
            "The model has a PEFT adapter, which sets the trained parameters and saves only these: merge it first, or "
            "use MoESFTTrainer or RouterLossMixin, which do not freeze."
        )
    check_is_expanded(model)
    model.requires_grad_(trained.everything)
    freeze_fitted(model)
    parts, counted = dict.fromkeys(("base", "experts", "routers", "classifiers"), 0), set[int]()
    for kind, module in _trained_modules(model, trained):
        module.requires_grad_(True)
        own = {id(parameter): parameter for parameter in module.parameters()}  # a head may be tied to an embedding
        parts[kind] += sum(_size(parameter) for key, parameter in own.items() if key not in counted)
        counted |= own.keys()
    parameters = list(model.parameters())
    trainable = sum(_size(parameter) for parameter in parameters if parameter.requires_grad)
    parts["base"] = trainable - sum(parts.values())
    return FreezeReport(stage, trainable, sum(_size(parameter) for parameter in parameters), parts)


def freeze_fitted(model: nn.Module) -> None:
    """Freezes what is fitted, and no pass of a training computes."""
    for module in model.modules():
        if getattr(module, "is_fitted", False):
            module.requires_grad_(False)


def _size(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # DeepSpeed's ZeRO-3 leaves empty shells on the ranks


def _trained_modules(model: nn.Module, trained: Trained) -> Iterator[tuple[str, nn.Module]]:
    joined = joins_packs(model.config)  # its packs count as one expansion
    for outer in (module for module in model.modules() if isinstance(module, OuterModules)):
        first = {"none": len(outer.experts), "last": -1, "new": 1 if joined else -1}[trained.experts]
        yield from (("experts", expert) for expert in outer.experts[first:])
    for ffn in model.expanded_ffns().values():  # type: ignore[operator]
        new = 1 if joined else ffn.experts_after_expansion[-2]
        first = {"none": len(ffn.experts), "last": -1, "new": new}[trained.experts]
        yield from (("experts", expert) for expert in ffn.experts[first:])
        chooses = not ffn.exclusive or joined or trained.everything or len(ffn.experts) - new > 1
        if trained.routers and ffn.router is not None and chooses:
            yield "routers", ffn.router
            others = () if trained.last_router_row else ffn.scorers
            yield from (("routers", module) for module in others if module not in (ffn.router, ffn.classifier))
        if ffn.classifier is not None and trained.classifiers:
            yield "classifiers", ffn.classifier


def kept_rows(model: nn.Module, trained: Trained) -> list[tuple[nn.Module, int]]:
    """Routers of which the first rows stay as they are, and how many: all but the last expert's, if it alone trains;
    with exclusive experts those of earlier languages, whose choice is theirs. `requires_grad` cannot say so."""
    joined, found = joins_packs(model.config), []
    for ffn in () if trained.everything else model.expanded_ffns().values():  # type: ignore[operator]
        earlier = ffn.experts_after_expansion[-2]
        if ffn.router is not None and trained.last_router_row:
            found.append((ffn.router, len(ffn.experts) - 1))
        elif ffn.router is not None and ffn.exclusive and not joined and earlier > 1:
            found.append((ffn.router, earlier))
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards each module is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
