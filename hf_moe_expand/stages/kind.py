"""The base class of the stages of a recipe, and what a stage knows while it is tried."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from ..checkpoint.reader import headers_alone
from ..checkpoint.source import resolve_checkpoint
from ..inference.models import load_tokenizer


@dataclass
class Trial:
    """A recipe that is tried, on checkpoints without their tensors, before anything runs."""

    base: str  # folder or hub id of the dense base
    revision: str | None
    config: Any  # the base's configuration; None if it is not on this machine
    offline: bool  # download nothing; skip checks that need an absent file, with a line that says so
    here: bool = True  # refuse what this machine cannot do; else another one may be the one that trains
    # By a step's name, the most bytes of the files beside its output that it removes at its end.
    beside: dict[str, int] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Any:
        """The base's tokenizer; None where nothing may be downloaded."""
        return None if self.offline else load_tokenizer(resolve_checkpoint(self.base, self.revision), self.base)


@dataclass(frozen=True)
class StepResult:
    """The result of a step: a line for the user, and facts for steps.json."""

    summary: str
    facts: dict[str, Any] = field(default_factory=dict)


class Stage:
    """A step of a recipe on an expanded model; a class with its settings."""

    key: ClassVar[str]  # in a recipe; its folder in a run
    name: ClassVar[str]  # its verb under `train`, and in a history
    title: ClassVar[str]  # its heading on a run's page
    result_name: ClassVar[str]  # of the model after the stage, in an evaluation
    place: ClassVar[int] = 0  # in a recipe, whose stages run from the lowest to the highest; 0 for a command alone
    families: ClassVar[tuple[str, ...]] = ("layer_moe",)  # model types for which it exists
    is_default: ClassVar[bool] = True  # whether it runs, with default settings, if a recipe does not name it
    optional: ClassVar[bool] = False  # whether a recipe may turn it off with `null`
    settings: ClassVar[Any]  # the class of its settings in YAML; a stage that trains is its own
    by_key: ClassVar[dict[str, type["Stage"]]] = {}  # the stages that are imported

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "key" in vars(cls):
            Stage.by_key.setdefault(cls.key, cls)

    @classmethod
    def inputs(cls, settings: Any, run: Any) -> dict[str, Any]:
        """What the step is made from besides the settings and the checkpoint before it, JSON; `run` is the
        `ExpansionRun`."""
        return {}

    @classmethod
    def attempt(cls, settings: Any, run: Any, before: Path, out: Path, trial: Trial) -> list[str]:
        """Does the work on the checkpoint `before` without its tensors, before anything runs; returns lines for the
        user."""
        with headers_alone():
            cls.work(settings, run, before, out)
        return []

    @classmethod
    def work(cls, settings: Any, run: Any, before: Path, out: Path) -> StepResult:
        """Makes the checkpoint `out` of the checkpoint `before`."""
        raise NotImplementedError

    @classmethod
    def languages(cls, settings: Any, old: Iterable[str], new: Iterable[str]) -> list[str]:
        """The languages whose training text it reads."""
        return []
