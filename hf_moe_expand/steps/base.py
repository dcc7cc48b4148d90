"""The base class of a recipe's steps, and the state that their checks share before anything runs."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..checkpoint.source import resolve_checkpoint
from ..data.pairs import PairEncoder, SentencePair, texts_for
from ..data.sources import LanguageText
from ..disk import StepOutput
from ..models import load_tokenizer
from ..planning.plan import Plan
from ..recipe import Expansion, Recipe
from ..self_written import SelfWrittenText


@dataclass(frozen=True)
class StepResult:
    """The result of a step: a line for the user, and facts for the run's page."""

    summary: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Checks:
    """The state of a recipe's checks, which run step by step before anything else runs.

    Attributes:
        config: configuration of the dense base; None if it is not on this machine.
        offline: download nothing; skip checks that need an absent file, with a line that says so.
        lines: one line for each check that passed or was skipped.
        counts: experts of each layer after the expansions so far; before the analysis, the numbers are right, but not
            which layers have them.
        least: experts that every layer is certain to have.
        copyable: experts that every layer is certain to have had before the expansion that is checked.
        counted: tokens of each language that are known to exist.
        plan: a plan with the sizes of the last expansion's; None if the base is not on this machine.
        network: the expanded model of this plan, without weights; None if the base is not on this machine.
        written: what the steps write to the disk, in order.
    """

    recipe: Recipe
    config: Any
    offline: bool
    lines: list[str] = field(default_factory=list)
    counts: Sequence[int] = ()
    least: int = 0
    copyable: int = 0
    counted: dict[str, int] = field(default_factory=dict)
    plan: Plan | None = None
    network: Any = None
    written: list[StepOutput] = field(default_factory=list)

    @cached_property
    def tokenizer(self) -> Any:
        """The base's tokenizer; asked for where `offline` is false."""
        return load_tokenizer(resolve_checkpoint(self.recipe.base, self.recipe.revision), self.recipe.base)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint of `network` in the base's type."""
        dtype = self.config.dtype or torch.float32
        return dtype.itemsize * sum(parameter.numel() for parameter in self.network.parameters())


@dataclass(frozen=True)
class ExpansionRun:
    """One expansion of a run.

    Attributes:
        number: number of the expansion, from 1.
        folder: folder for its outputs.
        start: the checkpoint that it expands; a folder or the base's hub id.
        old: languages before the expansion.
        sources: training text of the old languages and of its new ones.
    """

    recipe: Recipe
    expansion: Expansion
    number: int
    folder: Path
    start: str
    old: list[str]
    sources: dict[str, LanguageText]

    @property
    def prefix(self) -> str:
        """The prefix of its steps' names."""
        return f"expansion {self.number}: " if len(self.recipe.all_expansions) > 1 else ""

    @property
    def new(self) -> list[str]:
        return list(self.expansion.new)

    @property
    def revision(self) -> str | None:
        return self.recipe.revision if self.start == self.recipe.base else None

    def texts(self, languages: Iterable[str], config: Any) -> dict[str, Any]:
        """The documents of each language, shuffled; for an encoder-decoder, its sentence pairs."""
        return texts_for(config, {code: self.sources[code] for code in languages}, self.recipe.seed)

    def contents(self, languages: Iterable[str]) -> dict[str, Any]:
        """The fingerprint of these languages' text: its sources, and a hash of each local file."""
        return contents({code: self.sources[code] for code in languages})


class Step(ABC):
    """One step of a run.

    Attributes:
        name: its name in the run's record and on the screen.
        output: file or folder that it writes.
        every_rank: whether all ranks work, and not only the first.
        repeatable: whether it runs again if its inputs changed, since no other step depends on it.
        read_later: whether steps read its output besides the checkpoint before them.
    """

    every_rank: ClassVar[bool] = False
    repeatable: ClassVar[bool] = False
    read_later: ClassVar[bool] = False
    name: str
    output: Path

    @abstractmethod
    def inputs(self) -> dict[str, Any]:
        """The inputs of the step as JSON: keys of the recipe, and contents of files."""

    @abstractmethod
    def check(self, checks: Checks) -> None:
        """Refuses wrong settings and texts, as far as possible before anything runs, and adds its lines to `checks`."""

    @abstractmethod
    def work(self) -> StepResult:
        """Runs the step, which writes `output`."""

    def finish(self) -> StepResult | None:
        """Finishes a step that was interrupted after it wrote its output; None if the step must run again."""
        return None


@dataclass
class RunStep(Step):
    """A step of one expansion.

    Attributes:
        title: its name, without the expansion's number.
        writes: the file or folder that it writes in the expansion's folder.
    """

    title: ClassVar[str]
    writes: ClassVar[str]
    run: ExpansionRun

    def __post_init__(self) -> None:
        self.name, self.output = f"{self.run.prefix}{self.title}", self.run.folder / self.writes


def check_pairs(source: LanguageText, checks: Checks) -> None:
    """Refuses an encoder-decoder's text, as far as its first row shows, without translations or in a language that the
    base's tokenizer has no code for."""
    pair = source.first_pair()
    if pair is not None and not checks.offline:
        encoder, direction = PairEncoder(checks.tokenizer), SentencePair(**pair).direction
        encoder.check(filter(encoder.translates, (direction, direction[::-1])))


def contents(sources: dict[str, LanguageText]) -> dict[str, Any]:
    """Source and hashes of each text, for a fingerprint; the run's own text follows from the inputs of its step."""
    return {
        code: [] if isinstance(text, SelfWrittenText) else [text.source, *text.digests()]
        for code, text in sources.items()
    }
