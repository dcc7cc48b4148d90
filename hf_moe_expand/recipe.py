"""A recipe: one YAML file that says how a model learns new languages, from base checkpoint to evaluation."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .data.sources import LanguageText, check_languages
from .errors import InputError
from .settings import (
    AnalysisSettings,
    EvaluationSettings,
    ExpandSettings,
    PlanSettings,
    PostPretrainSettings,
    ReviewSettings,
    from_mapping,
    read_yaml,
)


@dataclass(frozen=True)
class Recipe:
    """Everything that `run` needs. Paths may hold `$VARIABLES` of the environment.

    Attributes:
        base: folder or hub id of the dense checkpoint.
        output: folder for everything that `run` makes.
        old, new: language to source of training text.
        test: language to source of held-out text, for the evaluation; without it nothing is evaluated.
        review: None leaves the review stage out (ablation "w/o review").
    """

    base: str
    output: str
    new: dict[str, str]
    old: dict[str, str] = field(default_factory=dict)
    test: dict[str, str] = field(default_factory=dict)
    revision: str | None = None
    seed: int = 0
    analysis: AnalysisSettings = field(default_factory=AnalysisSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    expand: ExpandSettings = field(default_factory=ExpandSettings)
    post_pretrain: PostPretrainSettings = field(default_factory=PostPretrainSettings)
    review: ReviewSettings | None = field(default_factory=ReviewSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)

    def __post_init__(self) -> None:
        check_languages(self.old, self.new)
        if unknown := sorted(set(self.test) - set(self.old) - set(self.new)):
            raise InputError(f"test: {', '.join(unknown)} is neither an old nor a new language of this recipe.")
        if not self.old and (self.review is not None or self.plan.method == "layer-moe"):
            raise InputError(
                "old: no old language: the review stage and the layer-moe plan need text of the languages that the "
                "base is good at. Give some, or set `review: null` and another plan method."
            )

    @classmethod
    def load(cls, path: str | Path) -> "Recipe":
        """Reads a recipe.

        Raises:
            InputError: the file is missing or wrong; the message says where.
        """
        mapping = read_yaml(path)
        for key in ("base", "output"):
            if isinstance(mapping.get(key), str):
                mapping[key] = _expanded(mapping[key], f"{path}: {key}")
        for kind in ("old", "new", "test"):
            if isinstance(mapping.get(kind), Mapping):
                # YAML 1.1 reads the unquoted language code `no` as false.
                if any(not isinstance(code, str) for code in mapping[kind]):
                    raise InputError(f"{path}: {kind}: put language codes in quotes: YAML reads `no` as false.")
                mapping[kind] = {
                    code: _expanded(source, f"{path}: {kind}.{code}") for code, source in mapping[kind].items()
                }
        try:
            return from_mapping(cls, mapping, "")
        except InputError as error:
            raise InputError(f"{path}: {str(error).removeprefix(': ')}") from None

    def sources(self, kind: str) -> dict[str, LanguageText]:
        """The text sources of `old`, `new` or `test`."""
        return {code: LanguageText(code, source) for code, source in getattr(self, kind).items()}

    @property
    def languages(self) -> list[str]:
        """Old languages, then new ones."""
        return [*self.old, *self.new]


def _expanded(source: Any, where: str) -> str:
    if not isinstance(source, str):
        raise InputError(f"{where}: {source!r} is not a file, a folder or hub:NAME.")
    expanded = os.path.expandvars(source)
    if unset := re.search(r"\$\{?\w+\}?", expanded):
        raise InputError(f"{where}: the environment variable {unset.group()} is not set.")
    return expanded
