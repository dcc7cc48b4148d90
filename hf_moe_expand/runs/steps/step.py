"""The base class of a recipe's steps, and what a step knows of its expansion."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from ...checkpoint.reader import headers_alone
from ...checkpoint.records import History
from ...data.pairs import texts_for
from ...data.sources import LanguageText, contents
from ...stages.kind import StepResult
from ...stages.trial import Trial
from ..recipe import Expansion, Recipe


def digest_of(path: str | Path | None) -> dict[str, str]:
    """By its name in a step's inputs, the hash of a file of settings, by which a change is noticed; empty without
    one."""
    file = None if path is None else Path(path)
    return {file.name: sha256(file.read_bytes()).hexdigest()} if file is not None and file.is_file() else {}


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

    @property
    def history(self) -> History:
        """The languages that the expanded model will know."""
        new = [expansion.new for expansion in self.recipe.all_expansions[: self.number]]
        return History.planned(list(self.recipe.old), *map(list, new))

    def texts(self, languages: Iterable[str], config: Any) -> dict[str, Any]:
        """The documents of each language, shuffled; for an encoder-decoder, its sentence pairs."""
        return texts_for(config, {code: self.sources[code] for code in languages}, self.recipe.seed)

    def documents(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The shuffled text of all languages, and that of the anchors that the recipe names."""
        sources = {code: self.sources[code] for code in dict.fromkeys([*self.old, *self.new])}
        texts = {code: source.load().shuffle(seed=self.recipe.seed)["text"] for code, source in sources.items()}
        return texts, {code: source.load()["text"] for code, source in self.recipe.anchor_sources.items()} or None

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
        beside: after its check, the most bytes of the files beside its output that it removes at its end.
    """

    every_rank: ClassVar[bool] = False
    repeatable: ClassVar[bool] = False
    read_later: ClassVar[bool] = False
    name: str
    output: Path
    beside = 0

    @abstractmethod
    def inputs(self) -> dict[str, Any]:
        """The inputs of the step as JSON: keys of the recipe, and contents of files."""

    def check(self, trial: Trial) -> list[str]:
        """Refuses wrong settings and texts before anything runs, and writes a checkpoint's headers; by default it does
        its work on checkpoints without tensors. Returns a line for each check that passed or was skipped."""
        with headers_alone():
            self.work()
        return []

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
