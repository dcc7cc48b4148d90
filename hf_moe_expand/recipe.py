"""A recipe: one YAML file that says how a model learns new languages, from base checkpoint to evaluation."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from .data.sources import LanguageText, check_languages
from .errors import InputError
from .planning.methods import PlanSettings, read_plan_settings
from .settings import (
    AnalysisSettings,
    DeviationSettings,
    EvaluationSettings,
    ExpandSettings,
    GraftSettings,
    GroupSettings,
    NormalSettings,
    PostPretrainSettings,
    ReviewSettings,
    from_mapping,
    read_yaml,
)

# What follows on an expanded checkpoint, in order: of MoE-LPR and LayerMoE, and of DMoE. All train but the graft.
STAGES = {False: ("post_pretrain", "graft", "review"), True: ("group", "normal", "graft")}


@dataclass(frozen=True)
class Expansion:
    """One expansion: the languages that it adds, and how.

    Attributes:
        new: language to source of training text.
        analysis, post_pretrain, review: of LayerMoE and MoE-LPR; `review` None is the ablation "w/o review".
        deviation, group, normal: of DMoE (`plan: {method: dmoe}`); `normal` None ends after the group stage.
        graft: of DeltaMoE: after `post_pretrain` (of DMoE: at the end), before `review`. For the last expansion only.
    """

    new: dict[str, str]
    analysis: AnalysisSettings = field(default_factory=AnalysisSettings)
    deviation: DeviationSettings = field(default_factory=DeviationSettings)
    plan: PlanSettings = None  # type: ignore[assignment]  # every expansion that runs has one
    expand: ExpandSettings = field(default_factory=ExpandSettings)
    post_pretrain: PostPretrainSettings = field(default_factory=PostPretrainSettings)
    review: ReviewSettings | None = field(default_factory=ReviewSettings)
    group: GroupSettings = field(default_factory=GroupSettings)
    normal: NormalSettings | None = field(default_factory=NormalSettings)
    graft: GraftSettings | None = None

    @property
    def is_dmoe(self) -> bool:
        return self.plan.planner.makes_groups

    @property
    def measures_similarity(self) -> bool:
        """Whether the plan is made from the languages' similarity in each layer."""
        return self.plan.needs == "similarity"

    def stages(self) -> dict[str, Any]:
        """The stages that run, in order, and their settings."""
        return {name: getattr(self, name) for name in STAGES[self.is_dmoe] if getattr(self, name) is not None}

    def training_stages(self) -> dict[str, Any]:
        """Those that train."""
        return {name: settings for name, settings in self.stages().items() if name != "graft"}

    def trained_languages(self, stage: str, old: Iterable[str]) -> list[str]:
        """Which languages a stage reads, `old` being those before this expansion."""
        new_only = self.is_dmoe or (stage == "post_pretrain" and not self.post_pretrain.replay)
        return [*(() if new_only else old), *self.new]

    def analyzed_languages(self, old: Iterable[str], further: bool) -> list[str]:
        """Which languages `analysis.tokens` are read of: for the similarity or, in a further expansion, to find the
        nearest experts."""
        if self.measures_similarity:
            return [*old, *self.new]
        return list(self.new) if further and self.expand.copy_from == "nearest" else []


@dataclass(frozen=True, kw_only=True)
class Recipe(Expansion):
    """Everything that `run` needs. Paths may hold `$VARIABLES` of the environment.

    Attributes:
        base: folder or hub id of the dense checkpoint.
        output: folder for everything that `run` makes.
        old: language to source of training text, of the languages that the base is good at.
        test: language to source of held-out text, for the evaluation; without it nothing is evaluated.
        expansions: several expansions, one after the other, instead of the one that the recipe itself describes. In a
            file the recipe's own settings hold for each that has none of its own (`graft` for the last alone).
        text: of the file that it was read from. No setting: a recipe that `replace` made has none.
    """

    text: ClassVar[str | None] = None

    base: str
    output: str
    new: dict[str, str] = field(default_factory=dict)
    old: dict[str, str] = field(default_factory=dict)
    test: dict[str, str] = field(default_factory=dict)
    revision: str | None = None
    seed: int = 0
    expansions: list[Expansion] = field(default_factory=list)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)

    def __post_init__(self) -> None:
        known = dict(self.old)
        if self.expansions and self.new:
            raise InputError("new: say in each of `expansions` which languages it adds, not here too.")
        for number, expansion in enumerate(self.rounds, start=1):
            if expansion.plan is None:
                raise InputError(f"expansion {number}: `plan` is missing.")
            check_languages(known, expansion.new)
            known |= expansion.new
            if expansion.is_dmoe and len(self.rounds) > 1:
                raise InputError(
                    f"expansion {number}: a DMoE model grows by `train adapt`, a language at a time: make it the only "
                    "expansion."
                )
            copied = expansion.expand.copy_from
            if copied != "nearest" and (isinstance(copied, str) or copied < 0):
                raise InputError(
                    f"expansion {number}: expand.copy_from: {copied!r} is neither an expert's number nor `nearest`."
                )
            if number == 1 and copied not in (0, "nearest"):
                raise InputError(f"expand.copy_from: {copied}: in the first expansion there is expert 0 alone to copy.")
            if expansion.graft is not None and number < len(self.rounds):
                raise InputError(
                    f"expansion {number}: graft: the later expansions would train a fine-tuned model on plain text; a "
                    f"delta is added once, in the last expansion. Move `graft` to expansion {len(self.rounds)}."
                )
        if unknown := sorted(set(self.test) - set(known)):
            raise InputError(f"test: {', '.join(unknown)} is neither an old nor a new language of this recipe.")
        first = self.rounds[0]
        if not self.old and not first.is_dmoe and (first.review is not None or first.measures_similarity):
            raise InputError(
                "old: no old language: the review stage and the layer-moe plan need text of the languages that the "
                "base is good at. Give some, or set `review: null` and another plan method."
            )

    @property
    def rounds(self) -> list[Expansion]:
        """The expansions, in order: those listed, or the recipe itself as the only one."""
        return self.expansions or [self]

    @classmethod
    def load(cls, path: str | Path, unset_ok: bool = False) -> "Recipe":
        """Reads a recipe.

        Args:
            unset_ok: leave variables that the environment does not have as they are.

        Raises:
            InputError: the file is missing or wrong; the message says where.
        """
        mapping = read_yaml(path)
        text = Path(path).read_text(encoding="utf-8")
        for key in ("base", "output"):
            if isinstance(mapping.get(key), str):
                mapping[key] = _expanded(mapping[key], f"{path}: {key}", unset_ok)
        for kind in ("old", "new", "test"):
            _expand_sources(mapping, kind, str(path), unset_ok)
        _expand_stages(mapping, str(path), unset_ok)
        if isinstance(mapping.get("expansions"), list):
            shared = {f.name: mapping[f.name] for f in fields(Expansion) if f.name != "new" and f.name in mapping}
            graft = {"graft": shared.pop("graft")} if "graft" in shared else {}
            for number, expansion in enumerate(mapping["expansions"], start=1):
                if isinstance(expansion, dict):
                    where = f"{path}: expansions[{number - 1}]"
                    _expand_sources(expansion, "new", where, unset_ok)
                    _expand_stages(expansion, where, unset_ok)
                    last = graft if number == len(mapping["expansions"]) else {}
                    mapping["expansions"][number - 1] = {**shared, **last, **expansion}
        expansions = mapping["expansions"] if isinstance(mapping.get("expansions"), list) else []
        for part, where in [(mapping, "plan"), *((e, f"expansions[{i}].plan") for i, e in enumerate(expansions))]:
            if isinstance(part, dict) and "plan" in part:
                part["plan"] = read_plan_settings(part["plan"], f"{path}: {where}")
        try:
            recipe = from_mapping(cls, mapping, "")
        except InputError as error:
            raise InputError(f"{path}: {str(error).removeprefix(': ')}") from None
        object.__setattr__(recipe, "text", text)
        return recipe

    @property
    def training_sources(self) -> dict[str, LanguageText]:
        """Training text of every language, old and new."""
        return {text.language: text for key, text in self.keyed_sources() if not key.startswith("test.")}

    @property
    def test_sources(self) -> dict[str, LanguageText]:
        """Held-out text."""
        return {code: LanguageText(code, source) for code, source in self.test.items()}

    def keyed_sources(self) -> Iterator[tuple[str, LanguageText]]:
        """Every text, with the key under which the recipe has it."""
        parts = {"old": self.old}
        parts |= {f"expansions[{i}].new": e.new for i, e in enumerate(self.expansions)} or {"new": self.new}
        for part, sources in {**parts, "test": self.test}.items():
            yield from ((f"{part}.{code}", LanguageText(code, source)) for code, source in sources.items())


def unset_variable(text: str) -> str | None:
    """The first environment variable in `text` that is not set."""
    unset = re.search(r"\$\{?\w+\}?", os.path.expandvars(text))
    return unset.group() if unset else None


def _expand_sources(mapping: dict[str, Any], kind: str, where: str, unset_ok: bool) -> None:
    if isinstance(mapping.get(kind), Mapping):
        # YAML 1.1 reads the unquoted language code `no` as false.
        if any(not isinstance(code, str) for code in mapping[kind]):
            raise InputError(f"{where}: {kind}: put language codes in quotes: YAML reads `no` as false.")
        mapping[kind] = {
            code: _expanded(source, f"{where}: {kind}.{code}", unset_ok) for code, source in mapping[kind].items()
        }


def _expand_stages(mapping: dict[str, Any], where: str, unset_ok: bool) -> None:
    """Of every stage: the graft's model, curriculum and held-out text."""
    for name in {name for stages in STAGES.values() for name in stages}:
        stage = mapping.get(name)
        if not isinstance(stage, dict):
            continue
        for key in ("instruct", "curriculum"):
            if isinstance(stage.get(key), str):
                stage[key] = _expanded(stage[key], f"{where}: {name}.{key}", unset_ok)
        if isinstance(stage.get("validation"), dict):
            _expand_sources(stage["validation"], "texts", f"{where}: {name}.validation", unset_ok)


def _expanded(source: Any, where: str, unset_ok: bool) -> str:
    if not isinstance(source, str):
        raise InputError(f"{where}: {source!r} is not a file, a folder or hub:NAME.")
    if not unset_ok and (unset := unset_variable(source)):
        raise InputError(f"{where}: the environment variable {unset} is not set.")
    return os.path.expandvars(source)
