"""What a step of a recipe is, and what steps know of one another before anything runs."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ..data.sources import LanguageText
from ..recipe import Expansion, Recipe


@dataclass(frozen=True)
class Done:
    """What a step did: a line for the user, and facts for the page of the run."""

    summary: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Checks:
    """What is known while the steps of a recipe are checked one after the other, before anything runs.

    Attributes:
        config: configuration of the dense base; None where that is not at hand.
        offline: nothing is downloaded; what needs an absent file is left out, with a line that says so.
        found: what was found to be right, and what was left out, one line each.
        counts: experts of each layer after the expansions so far; which layers have more is not known before the
            analysis, only how many do.
        least: experts that every layer is sure to have.
        copyable: those of them that the expansion at hand may copy: it had them before.
        counted: tokens of each language that are known to be there.
    """

    recipe: Recipe
    config: Any
    offline: bool
    found: list[str] = field(default_factory=list)
    counts: Sequence[int] = ()
    least: int = 0
    copyable: int = 0
    counted: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """One expansion of a run.

    Attributes:
        number: of the expansion, from 1.
        folder: for what it makes.
        start: the checkpoint that it expands; a folder or the base's hub id.
        old: languages before it.
        sources: training text of the old languages and its new ones.
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
        """What stands before the names of its steps."""
        return f"expansion {self.number}: " if len(self.recipe.rounds) > 1 else ""

    @property
    def new(self) -> list[str]:
        return list(self.expansion.new)

    @property
    def revision(self) -> str | None:
        return self.recipe.revision if self.start == self.recipe.base else None

    def texts(self, languages: Iterable[str]) -> dict[str, list[str]]:
        """The documents of each language, shuffled."""
        return {code: self.sources[code].load().shuffle(seed=self.recipe.seed)["text"] for code in languages}

    def contents(self, languages: Iterable[str]) -> dict[str, Any]:
        """What a fingerprint says of the text of these languages: where it is, and a hash of each local file."""
        return contents({code: self.sources[code] for code in languages})


class Step(ABC):
    """One step of a run.

    Attributes:
        name: in the run's record and on the screen.
        output: what it makes.
        every_rank: all ranks work, not the first alone.
        repeatable: is done again where its inputs changed: nothing follows from it.
    """

    every_rank: ClassVar[bool] = False
    repeatable: ClassVar[bool] = False
    name: str
    output: Path

    @abstractmethod
    def inputs(self) -> dict[str, Any]:
        """The part of the recipe, and the contents of the files, that it is made from: JSON."""

    @abstractmethod
    def check(self, checks: Checks) -> None:
        """Checks all that can be known before anything runs, and adds what it found to `checks`.

        Raises:
            InputError: the first mistake found.
        """

    @abstractmethod
    def work(self) -> Done:
        """Makes `output`."""

    def finish(self) -> Done | None:
        """What is left to do where an interruption came after the output; None for all of its work."""
        return None


def contents(sources: dict[str, LanguageText]) -> dict[str, Any]:
    """Source and hashes of each text, for a fingerprint."""
    return {code: [text.source, *text.digests()] for code, text in sources.items()}
