"""What a step of a run finds before anything runs, and what it leaves."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..checkpoint.source import resolve_checkpoint
from ..core.disk import StepOutput
from ..inference.models import load_tokenizer
from ..planning.plan import Plan


@dataclass(frozen=True)
class StepResult:
    """The result of a step: a line for the user, and facts for steps.json."""

    summary: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outlook:
    """What is known of the model before a step, while nothing has run yet.

    Attributes:
        base, revision: folder or hub id of the dense base.
        config: the base's configuration; None if it is not on this machine.
        offline: download nothing; skip checks that need an absent file, with a line that says so.
        here: refuse what this machine cannot do; else another one may be the one that trains.
        plan: a plan with the sizes of the last expansion's; before the analysis the numbers of experts are right, but
            not which layers have them. None if the base is not on this machine.
        least: experts that every layer is certain to have.
        network: the expanded model of this plan, without weights; None if the base is not on this machine.
    """

    base: str
    revision: str | None
    config: Any
    offline: bool
    plan: Plan | None = None
    least: int = 0
    network: Any = None
    here: bool = True

    @cached_property
    def tokenizer(self) -> Any:
        """The base's tokenizer; None where nothing may be downloaded."""
        return None if self.offline else load_tokenizer(resolve_checkpoint(self.base, self.revision), self.base)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint of `network` in the base's type."""
        dtype = self.config.dtype or torch.float32
        return dtype.itemsize * sum(parameter.numel() for parameter in self.network.parameters())


@dataclass
class Found:
    """What a step's check found.

    Attributes:
        outlook: what is known after the step.
        lines: a line for each check that passed or was skipped.
        written: what the step writes to the disk.
    """

    outlook: Outlook
    lines: list[str] = field(default_factory=list)
    written: list[StepOutput] = field(default_factory=list)
