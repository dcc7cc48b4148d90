"""A recipe: one YAML file with all settings, from the base checkpoint to the evaluation."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pydantic
from pydantic import Field, PrivateAttr, model_validator

from ..analysis.settings import AnalysisSettings, DeviationSettings, GateSettings
from ..checkpoint.arguments import ExpandSettings, JoinSettings, NewExperts
from ..core.errors import InputError
from ..core.jsonfile import read_text
from ..core.languages import UNDETERMINED, LanguageCode, check_named_once, check_old_and_new
from ..core.recipe_paths import Located
from ..core.schema import Flag, Schema, Text, Whole, changed, checked, json_schema, loosened, read
from ..data.sources import LanguageText, check_languages
from ..evaluation.scoring_settings import EvaluationSettings
from ..planning.methods import AnyPlan, LayerPlan, PlanSettings
from ..stages import recipe_stages, stages_for
from ..stages.kind import Stage
from .recipes import INHERITS, WholeRecipe

Sources = dict[LanguageCode, Located]
# Keys beside which `join` has no meaning: it makes no new experts.
_NEW_EXPERTS = (
    "plan",
    "expansions",
    "expand",
    "analysis",
    "deviation",
    *(k for k in recipe_stages() if k != "gates"),
)


class _Expansion(Schema):
    """The keys of an expansion besides its stages."""

    new: Sources = Field(description="language: training text, of the languages that this expansion adds")
    analysis: AnalysisSettings = Field(AnalysisSettings(), description="how similarity is measured")
    deviation: DeviationSettings = Field(DeviationSettings(), description="how deviation is measured (DMoE)")
    plan: AnyPlan | None = Field(None, description="which layer gets how many experts")
    expand: ExpandSettings = Field(ExpandSettings(), description="how new experts start")

    @property
    def planned(self) -> PlanSettings:
        """The settings of the plan; an InputError says that there is none."""
        if self.plan is None:
            raise InputError("`plan` is missing: say how many experts each layer gets.")
        later = {"classifier_layers": 0, "classifier_choice": "similarity"}
        return changed(self.plan, **later) if self.classified_later else self.plan

    @property
    def classified_later(self) -> bool:
        """Whether classifiers wait for the model after stage 1, by whose similarity LayerMoE places them (3.3): review
        places them then."""
        plan, review = self.plan, getattr(self, "review", None)
        return isinstance(plan, LayerPlan) and plan.chooses_by_similarity and review is not None

    @property
    def joins(self) -> bool:
        """Whether it joins language packs, or fine-tunes, in place of a plan and of new experts."""
        return False

    @property
    def needs(self) -> str | None:
        """The analysis that its plan needs."""
        return None if self.joins else self.planned.needs

    @property
    def family(self) -> str:
        """The model type of the planned model."""
        return "dmoe" if not self.joins and self.planned.makes_groups else "layer_moe"

    def stages(self) -> list[tuple[type[Stage], Any]]:
        """The stages that run, in order, with their settings."""
        stages = [(stage, getattr(self, stage.key)) for stage in stages_for(self.family)]
        if getattr(self.plan, "exclusive", False) and "review" not in self.model_fields_set:
            stages = [(stage, settings) for stage, settings in stages if stage.key != "review"]  # no routers
        if self.classified_later:
            stages = [(stage, self._placing(own) if stage.key == "review" else own) for stage, own in stages]
        return [(stage, settings) for stage, settings in stages if settings is not None]

    def _placing(self, review: Any) -> Any:
        """The settings of a review that places the plan's classifiers."""
        plan: Any = self.plan
        if review.classifier_layers is not None:
            raise InputError("review.classifier_layers: the plan has classifier_layers too: leave one of them out.")
        return replace(
            review, classifier_layers=plan.classifier_layers, classifier_choice=plan.classifier_choice,
            classifier_tokens=self.analysis.tokens,
        )  # fmt: skip

    def has(self, key: str) -> bool:
        """Whether the stage with this key runs."""
        return any(stage.key == key for stage, _ in self.stages())

    def analyzed_languages(self, old: Iterable[str], further: bool) -> list[str]:
        """The languages of the analysis: for the similarity or, in a further expansion, for the nearest experts."""
        if self.needs == "similarity":
            return [*old, *self.new]
        return list(self.new) if further and self.expand.copy_from == "nearest" else []


def _stage_keys() -> dict[str, Any]:
    """The fields of a recipe for its stages, by key."""
    keys: dict[str, Any] = {}
    for stage in recipe_stages().values():
        settings: Any = stage.settings
        hint = settings | None if stage.optional else settings
        default = read(settings, {}) if stage.is_default else None
        keys[stage.key] = (hint, Field(default=default, description=f"stage `{stage.name}`: {stage.title.lower()}"))
    return keys


class Expansion(pydantic.create_model("_Staged", __base__=_Expansion, **_stage_keys())):  # type: ignore[misc]
    """One expansion: the languages that it adds, and the settings of its steps."""


class Recipe(Expansion):
    """All settings of `run`. Paths may hold `$VARIABLES` of the environment.

    In a file, the recipe's own settings apply to each of its `expansions` that lacks them (`graft` only to the last).

    Attributes:
        text: text of the recipe's file; None for a recipe made in Python.
        values: the values of the file, with all that it inherits.
    """

    _whole: WholeRecipe | None = PrivateAttr(default=None)

    inherits: Text | None = Field(
        None, description="path or name of a recipe, in a file: its keys hold where this recipe does not set them"
    )
    base: Located = Field(description="folder or hub id of the dense checkpoint")
    output: Located = Field(description="folder for everything that `run` makes")
    new: Sources = Field({}, description="language: training text, of the languages to be learned")
    old: Sources = Field({}, description="language: training text, of languages that the base is good at")
    test: Sources = Field(
        {},
        description="language: held-out text, also of languages that are neither old nor new; without any, nothing is "
        "evaluated",
    )
    anchors: Sources = Field(
        {},
        description="language: text of languages that are not new, for `gates`, beside the package's own sentences, or "
        "in the place of those of its language",
    )
    revision: Text | None = Field(None, description="revision of a base on the hub")
    seed: Whole = Field(0, ge=0, lt=2**32, description="random seed")
    allow_lost_text: Flag = Field(
        False, description="take text of which the base's tokenizer loses more than 2 % (unknown tokens, accents), too"
    )
    expansions: list[Expansion] = Field(
        [], description="several expansions, one after the other, each with `new` and settings of its own"
    )
    join: JoinSettings | None = Field(None, description="language packs to join, in place of a plan and of new experts")
    tuned: dict[Text, Located] = Field(
        {},
        description="language (several by comma): a fine-tune of the base, a whole model or a LoRA of PEFT, in place "
        "of a plan and of new experts",
    )
    evaluation: EvaluationSettings = Field(EvaluationSettings(), description="how held-out text is scored")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.inherits is not None:
            raise InputError(f"{INHERITS}: recipes inherit in files: read the file with Recipe.load.")
        if self.joins:
            self._check_join()
        known = dict.fromkeys(self.old, "")
        if self.anchors and not any(expansion.has("gates") for expansion in self.all_expansions):
            raise InputError("anchors: gates alone read them: add the stage `gates: {}`, or leave anchors out.")
        if self.expansions and self.new:
            raise InputError("new: each of `expansions` names its own new languages; leave out the recipe's `new`.")
        for number, expansion in enumerate(self.all_expansions, start=1):
            if not expansion.joins:
                check_languages(known, expansion.new)
            known |= expansion.new
            self._check_expansion(number, expansion)
        check_named_once([*known, *(code for code in self.test if code not in known)])
        check_named_once(list(self.anchors))
        if self.old and self.all_expansions[0].family == "dmoe":
            raise InputError("old: DMoE trains the base too, so that no language stays: name all under `new`.")
        return self

    def _check_join(self) -> None:
        """Refuses settings of new experts beside a join, or a join beside fine-tunes."""
        how = "join" if self.join is not None else "tuned"
        if self.join is not None and self.tuned:
            raise InputError("tuned: a recipe with `join` takes no fine-tunes: join the model that another one makes.")
        for key in _NEW_EXPERTS:
            if key in self.model_fields_set and getattr(self, key) is not None:
                raise InputError(f"{key}: a recipe with `{how}` makes and trains no new experts: leave {key} out.")
        check_old_and_new(list(self.old), list(self.new))

    @property
    def joins(self) -> bool:
        return self.join is not None or bool(self.tuned)

    def stages(self) -> list[tuple[type[Stage], Any]]:
        """The stages that run, in order, with their settings. A join fits the gate alone, where there is new text."""
        if not self.joins:
            return super().stages()
        is_set = "gates" in self.model_fields_set or not self.new
        settings = self.gates if is_set else GateSettings()  # type: ignore[attr-defined]
        return [] if settings is None else [(recipe_stages()["gates"], settings)]

    def _check_expansion(self, number: int, expansion: Expansion) -> None:
        for stage in recipe_stages().values():
            settings = getattr(expansion, stage.key)
            is_asked = settings not in (None, Expansion.model_fields[stage.key].default)
            if is_asked and expansion.family not in stage.families:
                of = "DMoE, whose plan has `method: dmoe`" if "dmoe" in stage.families else "models other than DMoE"
                raise InputError(f"{stage.key}: a stage of {of}: it would not run. Leave it out.")
        if expansion.family == "dmoe" and len(self.all_expansions) > 1:
            raise InputError(f"expansion {number}: a DMoE model grows by `train adapt`: make it the only expansion.")
        plan = expansion.plan
        if expansion.has("gates") and isinstance(plan, LayerPlan) and (plan.classifier_layers or plan.classifiers_in):
            raise InputError(f"expansion {number}: the gate takes the place of the plan's classifiers: leave one out.")
        copied = expansion.expand.copy_from
        if number > 1:
            self._check_further(number, expansion)
        elif copied not in (0, "nearest"):
            raise InputError(f"expand.copy_from is {copied}: the first expansion can copy only expert 0; leave it out.")
        if expansion.graft is not None and number < len(self.all_expansions):
            raise InputError(f"expansion {number}: graft: is for the last expansion, after all training.")

    def _check_further(self, number: int, expansion: Expansion) -> None:
        """Refuses settings of further experts that are other than the first ones'."""
        first = self.all_expansions[0]
        for part, names in {"plan": ["top_k"], "expand": [*NewExperts.model_fields]}.items():
            own, of_first = getattr(expansion, part), getattr(first, part)
            for name in [name for name in names if name in getattr(own, "model_fields_set", ())]:
                if getattr(own, name) != (wanted := getattr(of_first, name, None)):
                    raise InputError(
                        f"expansion {number}: {part}.{name} is {getattr(own, name)!r}, but further experts are as "
                        f"those of the first expansion, which has {wanted!r}: leave it out."
                    )

    def unread(self) -> list[str]:
        """A line for each part that is set, perhaps inherited, and that no step reads."""
        found: dict[str, str] = {}
        if "evaluation" in self.model_fields_set and not self.test:
            found["evaluation"] = "there is no text under `test`"
        for number, expansion in enumerate(self.all_expansions, start=1):
            analyzed = expansion.classified_later or expansion.analyzed_languages(self.old, number > 1)
            for key, is_read in {"analysis": analyzed, "deviation": expansion.needs == "deviation"}.items():
                if key in expansion.model_fields_set and not is_read:
                    found[key] = "the plan is not made by it"
        return [f"no step reads `{key}`: {why}" for key, why in found.items()]

    @property
    def text(self) -> str | None:
        """The text of the recipe's file."""
        return None if self._whole is None else self._whole.text

    @property
    def values(self) -> dict[str, Any] | None:
        """The values of the recipe's file, with all that it inherits; variables are not filled in."""
        return None if self._whole is None else self._whole.mapping

    @property
    def all_expansions(self) -> list[Expansion]:
        """The expansions, in order: those listed, or the recipe itself as the only one."""
        return self.expansions or [self]

    @classmethod
    @checked
    def load(cls, path: str | Path, unset_ok: bool = False) -> "Recipe":
        """Reads a recipe; `unset_ok` keeps `$VARIABLES` that are not set.

        Raises:
            InputError: the file, or one that it inherits, is missing or wrong; the message names file and key.
        """
        return cls.of_text(read_text(path), path, unset_ok)

    @classmethod
    def of_text(cls, text: str, path: str | Path, unset_ok: bool = False) -> "Recipe":
        """Reads a recipe from its text, as `load` does; messages call it `path`. Its own settings go to each
        expansion."""
        whole, context = WholeRecipe.of_text(text, path, keeps_null), {"unset_ok": unset_ok}
        mapping = whole.mapping
        if isinstance(mapping.get("expansions"), list):
            own = {key: value for key, value in mapping.items() if key in Expansion.model_fields}
            read(Expansion, {"new": {}, **own}, whole.where, context)
            mapping = {**mapping, "expansions": _shared(mapping)}
        recipe = read(cls, mapping, whole.where, context)
        recipe._whole = whole
        return recipe

    @property
    def evaluated_languages(self) -> list[list[str]]:
        """The base's languages, then those that each expansion adds. Those under `test` alone are in no group, or the
        base's where text of an undetermined language stands for all of these."""
        new = [list(expansion.new) for expansion in self.all_expansions]
        added = {code for codes in new for code in codes}
        named = [code for code in self.old if code != UNDETERMINED or code in self.test]
        if UNDETERMINED in self.old:
            named = list(dict.fromkeys([*named, *(code for code in self.test if code not in added)]))
        return [named, *new]

    @property
    def training_sources(self) -> dict[str, LanguageText]:
        """Training text of each language, old and new."""
        held = ("test.", "anchors.")
        return {text.language: text for key, text in self.keyed_sources() if not key.startswith(held)}

    @property
    def anchor_sources(self) -> dict[str, LanguageText]:
        """Text of each language that is given as an anchor."""
        return {code: LanguageText(code, source) for code, source in self.anchors.items()}

    @property
    def test_sources(self) -> dict[str, LanguageText]:
        return {code: LanguageText(code, source) for code, source in self.test.items()}

    def keyed_sources(self) -> Iterator[tuple[str, LanguageText]]:
        """Every text, with its key in the recipe."""
        parts = {"old": self.old}
        parts |= {f"expansions[{i}].new": e.new for i, e in enumerate(self.expansions)} or {"new": self.new}
        for part, sources in {**parts, "test": self.test, "anchors": self.anchors}.items():
            yield from ((f"{part}.{code}", LanguageText(code, source)) for code, source in sources.items())


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe, for editors; a recipe that inherits may leave out, and take out, any key."""
    whole = json_schema(Recipe)
    alone = json.loads(json.dumps(whole).replace('"#/', '"#/else/'))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", **loosened(whole), "title": "Recipe",
        "if": {"required": [INHERITS]}, "else": alone,
    }  # fmt: skip


def keeps_null(key: str) -> bool:
    """Whether null is a value of a recipe's key: it leaves out a stage that may be left out. Any other key that is
    inherited it takes out."""
    return any(stage.optional for stage in recipe_stages().values() if stage.key == key)


def _shared(mapping: dict[str, Any]) -> list[Any]:
    """The expansions, each with those of the recipe's own settings that it lacks; `graft` goes only to the last. Where
    the plan of a later one does not say whether its experts are exclusive, they are as those before it."""
    own = set(Expansion.model_fields) - {"new"}
    shared = {key: mapping[key] for key in own if key in mapping}
    graft = {"graft": shared.pop("graft")} if "graft" in shared else {}
    last = len(mapping["expansions"]) - 1
    filled = [
        {**shared, **(graft if number == last else {}), **expansion} if isinstance(expansion, dict) else expansion
        for number, expansion in enumerate(mapping["expansions"])
    ]
    exclusive: dict[str, bool] = {}
    for expansion in filled:
        if isinstance(expansion, dict) and isinstance(plan := expansion.get("plan"), dict):
            expansion["plan"] = plan = {**exclusive, **plan}
            exclusive = {"exclusive": True} if plan.get("exclusive") is True else {}
    return filled
