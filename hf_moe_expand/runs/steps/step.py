"""A recipe's step, and what a step knows of its expansion."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...data.pairs import texts_for
from ...data.sources import LanguageText, contents
from ...stages.kind import StepResult, Trial
from ..recipe import Expansion, Recipe


@dataclass(frozen=True)
class Step:
    """One step of a run: a function that makes an output of inputs."""

    name: str  # in the run's record and on the screen
    output: Path  # file or folder that it writes, whole or not at all
    inputs: Callable[[], dict[str, Any]]  # what it is made from besides the steps before it, as JSON
    work: Callable[[], StepResult]  # writes `output`
    # Refuses wrong settings and texts before anything runs, and writes a checkpoint's headers; returns a line for each
    # check that passed or was skipped.
    check: Callable[[Trial], list[str]]
    before: Path | None = None  # the checkpoint of an earlier step that it works on
    every_rank: bool = False  # whether all ranks work, and not only the first
    repeatable: bool = False  # whether it runs again if its inputs changed, since no other step depends on it


def digest_of(path: str | Path | None) -> dict[str, str]:
    """A file of settings, by its name in a step's inputs: its hash; empty without one."""
    file = None if path is None else Path(path)
    return {file.name: sha256(file.read_bytes()).hexdigest()} if file is not None and file.is_file() else {}


@dataclass(frozen=True)
class ExpansionRun:
    """One expansion of a run."""

    recipe: Recipe
    expansion: Expansion
    number: int  # from 1
    folder: Path  # for its outputs
    start: str  # the checkpoint that it expands; a folder or the base's hub id
    old: list[str]  # languages before the expansion
    sources: dict[str, LanguageText]  # training text of the old languages and of its new ones

    def step(self, title: str, writes: str, inputs: Any, work: Any, check: Any, **more: Any) -> Step:
        """A step of this expansion, which writes a file or folder of its folder."""
        return Step(self.named(title), self.folder / writes, inputs, work, check, **more)

    def named(self, title: str) -> str:
        """The name of a step, with the expansion's number where the recipe lists its expansions."""
        return f"expansion {self.number}: {title}" if self.recipe.expansions else title

    @property
    def new(self) -> list[str]:
        return list(self.expansion.new)

    @property
    def revision(self) -> str | None:
        return self.recipe.revision if self.start == self.recipe.base else None

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
