"""The registry of planning methods, and their settings in a recipe or on the command line.

A method is one function in a file of this package. Its keyword parameters are the keys of a recipe's `plan:` and the
options of `hf-moe-expand plan METHOD`; the function declares the type, the default and the help of each.
"""

import difflib
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ...errors import InputError
from ...schema import Count, Flag, Positive, Share, Text, Whole, read, unknown_key
from ...schema import settings as checked
from ..layers import check_layer_ranges
from .allocation import Allocation

Needs = Literal["similarity", "deviation"]
PrefixReach = Literal["layer", "later"]
ClassifierChoice = Literal["similarity", "random", "last", "all", "none"]


@dataclass(frozen=True)
class Option:
    """A command-line option for a key that `--key VALUE` does not suit.

    Attributes:
        flag: the option, such as `--by-hand`.
        kind: the type of the option's value; bool makes a switch.
        value: converts the option's value to the key's value.
    """

    flag: str
    kind: type
    help: str
    value: Callable[[Any], Any] = lambda given: given


@dataclass(frozen=True)
class PlanMethod:
    """A registered method.

    Attributes:
        name: its name in recipes, plans and on the command line.
        allocate: the function; its keyword parameters are the method's keys.
        title: its name on cards and pages.
        card: template of its model card, in `model_cards/`.
        tag: its models' tag on the hub.
        words: a phrase for the card that says how experts are distributed.
        needs: the analysis that the plan needs.
        needs_separability: whether it needs the separability of old and new text besides, for the same languages.
        fixed_counts: whether the settings alone determine each layer's count.
        grows: whether it can plan the further expansion of an expanded model.
        makes_groups: whether it groups the languages: for DMoE models, which have no classifiers.
    """

    name: str
    allocate: Callable[..., Allocation]
    title: str
    card: str
    tag: str
    words: str = ""
    needs: Needs | None = None
    needs_separability: bool = False
    fixed_counts: bool = False
    grows: bool = True
    makes_groups: bool = False

    @cached_property
    def own_keys(self) -> dict[str, inspect.Parameter]:
        """The method's own keys; the annotation is the type, and the default `Parameter.empty` means required."""
        parameters = inspect.signature(self.allocate).parameters.values()
        return {parameter.name: parameter for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY}

    @cached_property
    def keys(self) -> dict[str, inspect.Parameter]:
        """All its keys: its own, then those shared by all methods."""
        hints = inspect.get_annotations(PlanSettings)
        own = (  # DMoE chooses its layers by deviation
            "only_layers", "classifier_layers", "classifier_choice", "classifiers_in",
            "prefix_gates", "prefix_decay", "prefix_bound", "prefix_reach",
        )  # fmt: skip
        names = ("top_k",) if self.makes_groups else (*own, "top_k")
        shared = {
            name: inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[name], default=getattr(PlanSettings, name)
            )
            for name in names
        }
        return self.own_keys | shared

    @cached_property
    def settings(self) -> "type[PlanSettings]":
        """The settings class: `method` and the keys."""
        method = Annotated[Literal[self.name], Field(description=self.title)]  # type: ignore[valid-type, name-defined]
        body: dict[str, Any] = {
            "__doc__": (inspect.getdoc(self.allocate) or "").partition("\n")[0],
            "__module__": __name__,
            "__annotations__": {
                "method": method,
                "_": KW_ONLY,
                **{name: key.annotation for name, key in self.keys.items()},
            },
            "__hash__": PlanSettings.__hash__,  # a dataclass would generate another one
            **{name: key.default for name, key in self.keys.items() if key.default is not key.empty},
            **({"method": self.name} if self.name == DEFAULT_METHOD else {}),
        }
        name = f"PlanSettings[{self.name}]"
        return checked(types.new_class(name, (PlanSettings,), exec_body=lambda space: space.update(body)))


DEFAULT_METHOD = "layer-moe"
# The registered methods by name, in the order of registration.
METHODS: dict[str, PlanMethod] = {}


def plan_method(name: str, **attributes: Any) -> Callable[[Callable[..., Allocation]], Callable[..., Allocation]]:
    """Registers the decorated function as a method; `attributes` are those of `PlanMethod`."""

    def register(allocate: Callable[..., Allocation]) -> Callable[..., Allocation]:
        METHODS[name] = PlanMethod(name, allocate, **attributes)
        return allocate

    return register


def find_method(name: str) -> PlanMethod | None:
    """The method with this name; None for any other word."""
    return METHODS.get(name)


def method_title(name: str) -> str:
    """The title of a method on cards and pages; the word itself if no method has this name."""
    method = find_method(name)
    return method.title if method else name


class PlanSettings:
    """A method and its keys: a recipe's `plan:`. `PlanSettings("moe-lpr", experts=3)` has the class of its method.

    Instances are frozen dataclasses; their first field is `method`, as the user wrote it. All methods share the keys
    below; classifiers, prefix gates and `only_layers` are for methods without language groups.

    Raises:
        InputError: the method is unknown, a key is missing or belongs to another method, or a value has another type or
            is out of range.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    method: str
    only_layers: Annotated[
        Text | None,
        AfterValidator(lambda given: given and check_layer_ranges(given)),
        BeforeValidator(lambda given: str(given) if type(given) is int else given),
        Field(
            description="Layers that may get experts, such as 4-11, 0,6-8 or 1-11/2 (every second one), in an "
            "encoder-decoder encoder.1,decoder.0-5; the others stay dense. All by default."
        ),
    ] = None
    classifier_layers: Annotated[Whole, Field(ge=0, description="Number of layers with a classifier.")] = 0
    classifier_choice: Annotated[
        ClassifierChoice,
        Field(description="Choice of these layers: similarity (needs its analysis), random, last, all or none."),
    ] = "similarity"
    classifiers_in: Annotated[
        Text | None,
        AfterValidator(lambda given: given and check_layer_ranges(given, "classifiers_in")),
        BeforeValidator(lambda given: str(given) if type(given) is int else given),
        Field(description="Layers with a classifier, by number, such as 4 or 0,6-8: instead of a count and a choice."),
    ] = None
    prefix_gates: Annotated[
        Flag, Field(description="Classifiers judge the text so far instead of one token: prefix gates.")
    ] = False
    prefix_decay: Annotated[
        Share, Field(description="Factor of a prefix gate's log-odds from token to token.", gt=0)
    ] = 0.95
    prefix_bound: Annotated[Positive, Field(description="Most evidence of one token for a prefix gate, in nats.")] = 4.0
    prefix_reach: Annotated[
        PrefixReach,
        Field(
            description="A prefix gate decides for its own layer (layer), or also for later ones without one (later)."
        ),
    ] = "layer"
    top_k: Annotated[Count, Field(description="Active experts of a token.")] = 2

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, method: str = DEFAULT_METHOD, **keys: Any) -> "PlanSettings":
        return object.__new__(settings_class({"method": method, **keys}) if cls is PlanSettings else cls)

    def __hash__(self) -> int:
        return hash(json.dumps(asdict(self)))

    @property
    def planner(self) -> PlanMethod:
        """The registered method."""
        method = find_method(self.method)
        assert method is not None  # the type of `method` has checked it
        return method

    @property
    def own(self) -> dict[str, Any]:
        """The method's own keys and their values."""
        return {name: getattr(self, name) for name in self.planner.own_keys}

    @property
    def common(self) -> dict[str, Any]:
        """The keys shared by all methods, and their values."""
        return {name: getattr(self, name) for name in self.planner.keys if name not in self.planner.own_keys}

    @property
    def needs(self) -> Needs | None:
        """The analysis that the plan needs."""
        by_similarity = (
            self.classifier_choice == "similarity" and self.classifier_layers > 0 and not self.classifiers_in
        )
        return self.planner.needs or ("similarity" if by_similarity else None)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema for a field of another settings class: `method` selects the settings' class."""
        if cls is not PlanSettings:
            return handler(source)
        choices = {name: handler.generate_schema(method.settings) for name, method in METHODS.items()}
        tagged = core_schema.tagged_union_schema(choices, discriminator="method")
        return core_schema.no_info_plain_validator_function(read_plan_settings, json_schema_input_schema=tagged)


def read_plan_settings(mapping: Any, where: str = "") -> PlanSettings:
    """The settings of the method that the mapping names; settings are returned unchanged.

    Args:
        where: prefix of the keys in messages: a file, or the mapping's own key.

    Raises:
        InputError: see `PlanSettings`.
    """
    if isinstance(mapping, PlanSettings):
        return mapping
    if not isinstance(mapping, Mapping):
        return read(METHODS[DEFAULT_METHOD].settings, mapping, where)  # which refuses it
    return read(settings_class(mapping, where), mapping, where)


def settings_class(mapping: Mapping[str, Any], where: str = "") -> type[PlanSettings]:
    """The settings class of the method that a mapping names.

    Raises:
        InputError: the method is unknown, or a key belongs to another method.
    """
    name = mapping.get("method", DEFAULT_METHOD)
    before = f"{where}: " if where else ""
    method = find_method(name)
    if method is None:
        raise InputError(f"{before}unknown plan method {name!r}; {_nearest(name)}")
    for key in mapping:
        if key == "method" or key in method.keys:
            continue
        others = [other.name for other in METHODS.values() if key in other.keys]
        if not others:
            raise InputError(f"{before}{unknown_key(str(key), ['method', *method.keys])}")
        default = "" if "method" in mapping else ", the default"
        raise InputError(f"{before}`{key}` is a key of {_listed(others)}; this plan is {name}{default}.")
    return method.settings


def _nearest(name: Any) -> str:
    near = difflib.get_close_matches(str(name), METHODS, n=1)
    return f"did you mean `{near[0]}`?" if near else f"known: {', '.join(METHODS)}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
