"""The settings of a plan: a recipe's `plan:` and the options of `hf-moe-expand plan METHOD`.

A method is one class in a file of this package. Its fields are the keys and the options, with their types, defaults and
help; `allocate` is the rule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from ...core.errors import InputError
from ...core.schema import Count, Flag, Schema, Text, Whole, changed, read
from ..layers import CLASSIFIER_CHOICES, ClassifierChoice, check_layer_ranges
from ..plan import MOST_EXPERTS
from ..results import Result

Needs = Literal["similarity", "deviation"]

DEFAULT_METHOD = "layer-moe"
# The methods by name, in the order in which their classes are defined.
METHODS: "dict[str, type[PlanSettings]]" = {}


@dataclass(frozen=True)
class Target:
    """The model that a plan is for.

    Attributes:
        seed: random seed of all choices.
        grows_from: experts of each layer of an expanded model; empty for a dense one.
        analyses: the analyses that were made of it, by name.
        languages: the languages of the plan.
    """

    num_layers: int
    seed: int = 0
    grows_from: Sequence[int] = ()
    analyses: Mapping[str, Result] = field(default_factory=dict)
    languages: Sequence[str] = ()

    @property
    def least(self) -> int:
        """Minimum of experts in a layer: 2, expert 0 and a new one; 1, a new one, for an expanded model."""
        return 1 if self.grows_from else 2

    def measured(self, name: Needs) -> Any:
        """The `SimilarityResult` or the `DeviationResult`; refused if it was not measured."""
        if name not in self.analyses:
            raise InputError(f"The plan needs an analysis: run `analyze {name}` first.")
        return self.analyses[name]


@dataclass(frozen=True)
class Allocation:
    """The result of a method.

    Attributes:
        counts: experts of each layer, expert 0 counted; only new experts for a model that grows.
        details: inputs of the counts, which become the plan's `settings`.
        groups: the languages of each expert, if the method makes a DMoE model.
        drawn: whether the result depends on the seed.
    """

    counts: list[int]
    details: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Sequence[str]] = ()
    drawn: bool = False


def check_total(total: int, num_layers: int, minimum: int, others: int = 0) -> None:
    """Refuses a total below every layer's minimum, or above `MOST_EXPERTS`; `others` are in layers that stay dense."""
    if total > MOST_EXPERTS:
        raise InputError(f"total_experts is {total}: a model may have at most {MOST_EXPERTS:,} experts in all.")
    if total < (least := num_layers * minimum + others):
        dense = f", and {others} of dense layers," if others else ""
        raise InputError(
            f"{total} experts in total are too few: {num_layers} layers with at least {minimum} each (the original FFN "
            f"counts as one){dense} need {least} or more."
        )


@dataclass(frozen=True)
class Option:
    """A command-line option, such as `--by-hand`, for a key that `--key VALUE` does not suit: its type (bool makes a
    switch) and what converts its value to the key's."""

    flag: str
    kind: type
    help: str
    value: Callable[[Any], Any] = lambda value: value


class PlanSettings(Schema):
    """A method of planning and its keys. A subclass with a field `method` is a registered method.

    Attributes:
        title: its name on cards and pages.
        card, tag: template of its model card, in `model_cards/`, and its models' tag on the hub.
        words: a phrase for the card that says how experts are distributed.
        analysis: the analysis that the method needs.
        fixed_counts: whether the settings alone determine each layer's count.
        grows: whether it can plan the further expansion of an expanded model.
        without_classifiers: what to say of its plan without classifiers.
        makes_groups: whether it groups the languages: for DMoE models, which have no classifiers.
    """

    title: ClassVar[str]
    card: ClassVar[str]
    tag: ClassVar[str]
    words: ClassVar[str] = ""
    analysis: ClassVar[Needs | None] = None
    fixed_counts: ClassVar[bool] = False
    grows: ClassVar[bool] = True
    makes_groups: ClassVar[bool] = False
    without_classifiers: ClassVar[str] = ""

    if TYPE_CHECKING:
        method: str

    top_k: Count = Field(2, description="Active experts of a token.")

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if "method" in cls.model_fields:
            METHODS[cls.name()] = cls

    @classmethod
    def name(cls) -> str:
        """The method's name in recipes, plans and on the command line."""
        return str(get_args(cls.model_fields["method"].annotation)[0])

    @classmethod
    def own_keys(cls) -> dict[str, FieldInfo]:
        """The method's own keys."""
        return {name: key for name, key in cls.all_keys().items() if name not in LayerPlan.model_fields}

    @classmethod
    def all_keys(cls) -> dict[str, FieldInfo]:
        """All its keys: its own, then those that methods share."""
        shared = [name for name in (*LayerPlan.__annotations__, "top_k") if name in cls.model_fields]
        own = [name for name in cls.model_fields if name not in (*shared, "method")]
        return {name: cls.model_fields[name] for name in (*own, *shared)}

    def allocate(self, target: Target) -> Allocation:
        """The experts of each layer."""
        raise NotImplementedError

    def largest(self, target: Target) -> Allocation:
        """The largest allocation that `allocate` may give, whatever the analysis that it needs will find."""
        return self.allocate(target)

    def allocate_in(self, layers: Sequence[int], target: Target, measured: bool = True) -> Allocation:
        """The allocation for `layers` alone, or, not `measured`, the largest one; the other layers get nothing, and
        keep their original FFN."""
        if len(layers) == target.num_layers:
            return self.allocate(target) if measured else self.largest(target)
        settings, rest = self, target.least - 1  # what the counts say of a layer that gets nothing
        if (total := getattr(self, "total_experts", None)) is not None:
            others = rest * (target.num_layers - len(layers))
            check_total(total, len(layers), getattr(self, "minimum", None) or target.least, others)
            settings = changed(self, total_experts=total - others)
        some = replace(
            target,
            num_layers=len(layers),
            grows_from=[target.grows_from[layer] for layer in layers] if target.grows_from else (),
            analyses={name: analysis.of_layers(layers) for name, analysis in target.analyses.items()},
        )
        made = settings.allocate(some) if measured else settings.largest(some)
        counts = dict(zip(layers, made.counts, strict=True))
        details = {name: getattr(target.analyses.get(name), name, value) for name, value in made.details.items()}
        return replace(made, counts=[counts.get(layer, rest) for layer in range(target.num_layers)], details=details)

    @property
    def needs(self) -> Needs | None:
        """The analysis that the plan needs."""
        return self.analysis


# Layers such as `4-11`; YAML reads a single one as a number.
_Layers = Annotated[
    Text | None,
    AfterValidator(lambda layers: layers and check_layer_ranges(layers)),
    BeforeValidator(lambda layers: str(layers) if type(layers) is int else layers),
]


class LayerPlan(PlanSettings):
    """A method without language groups: its layers may have classifiers, and some may stay dense. By default it has
    LayerMoE's card and tag."""

    card = "layer_moe"
    tag = "layer-moe"

    only_layers: _Layers = Field(
        None,
        description="Layers that may get experts, such as 4-11, 0,6-8 or 1-11/2 (every second one), in an "
        "encoder-decoder encoder.1,decoder.0-5; the others stay dense. All by default.",
    )
    classifier_layers: Whole = Field(0, ge=0, description="Number of layers with a classifier.")
    classifier_choice: ClassifierChoice = Field(
        "similarity", description=f"Choice of these layers: {CLASSIFIER_CHOICES}."
    )
    classifiers_in: _Layers = Field(
        None, description="Layers with a classifier, by number, such as 4 or 0,6-8: instead of a count and a choice."
    )
    exclusive: Flag = Field(
        False, description="Tokens of a new language take its new expert alone, without the original and a router."
    )

    @model_validator(mode="after")
    def _check_classifiers(self) -> Self:
        choice, count = self.classifier_choice, self.classifier_layers
        if self.classifiers_in and (count or choice != "similarity"):
            raise InputError("classifiers_in names the layers: leave out classifier_layers and classifier_choice.")
        if choice in ("last", "random") and not count:
            raise InputError(f"classifier_choice is {choice!r}, but classifier_layers is 0: say how many layers.")
        return self

    @property
    def needs(self) -> Needs | None:
        return self.analysis or ("similarity" if self.chooses_by_similarity else None)

    @property
    def chooses_by_similarity(self) -> bool:
        """Whether the languages' similarity places its classifiers."""
        counted = self.classifier_layers > 0 and not self.classifiers_in
        return counted and self.classifier_choice in ("similarity", "last")


def method_title(name: str) -> str:
    """The title of a method on cards and pages; the word itself if no method has this name."""
    return METHODS[name].title if name in METHODS else name


def plan_settings(method: str = DEFAULT_METHOD, **keys: Any) -> PlanSettings:
    """`plan_settings("moe-lpr", experts=3)`: the settings of a method, as `read_plan_settings` reads them."""
    return read_plan_settings({"method": method, **keys})


def read_plan_settings(mapping: Any) -> PlanSettings:
    """The settings of the method that the mapping names; settings are returned unchanged."""
    if isinstance(mapping, PlanSettings):
        return mapping
    name = mapping.get("method", DEFAULT_METHOD) if isinstance(mapping, Mapping) else DEFAULT_METHOD
    if not isinstance(name, str) or name not in METHODS:
        raise InputError(f"unknown plan method {name!r}; known: {', '.join(METHODS)}.")
    return read(METHODS[name], mapping)


class _ByMethod:
    """The schema of a field that holds a plan: `method` selects its class."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {name: handler.generate_schema(method) for name, method in METHODS.items()}
        tagged = core_schema.tagged_union_schema(choices, discriminator="method")
        return core_schema.no_info_plain_validator_function(read_plan_settings, json_schema_input_schema=tagged)


# The type of a field that holds the settings of any method.
AnyPlan = Annotated[PlanSettings, _ByMethod()]
