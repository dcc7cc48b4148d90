"""The history that a checkpoint carries in config.json: one record for each expansion and for each step after it.

All other modules write and read histories through these records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PureWindowsPath
from typing import Any, TypeVar

from .errors import InputError

OLD = 0  # class of the base model's languages

# Steps that may change every tensor, by their names in histories ("everything" and "joint" train all parameters).
CHANGES_EVERYTHING = frozenset({"graft", "average", "everything", "group", "joint"})

# Those of them that train the base model inside.
TRAINS_BASE = frozenset({"everything", "group", "joint"})

R = TypeVar("R", bound="_Record")


@dataclass(frozen=True)
class _Record:
    """A record of known fields that also keeps unknown ones."""

    @classmethod
    def from_dict(cls: type[R], value: Any, where: str) -> R:
        """Reads a record.

        Raises:
            InputError: a field is missing or malformed; the message starts with `where`.
        """
        if not isinstance(value, Mapping):
            raise InputError(f"{where}: must be an object, found {type(value).__name__}.")
        known = {f.name: f for f in fields(cls) if f.name != "other"}
        for name, f in known.items():
            if f.metadata.get("required") and name not in value:
                raise InputError(f"{where}: `{name}` is missing.")
        for name, item in value.items():
            metadata = known[name].metadata if name in known else {}
            check, may_be_null = metadata.get("check"), not metadata.get("required")
            if check is not None and not (item is None and may_be_null) and not check(item):
                raise InputError(f"{where}.{name}: {metadata['wanted']} is needed, found {item!r:.60}.")
        other = {name: item for name, item in value.items() if name not in known}
        return cls(**{name: item for name, item in value.items() if name in known}, other=other)  # type: ignore[call-arg]

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON in config.json, without empty optional fields."""
        written = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "other" and not (f.metadata.get("optional") and value is None):
                written[f.name] = [item.to_dict() for item in value] if f.name == "stages" else value
        return written | self.other  # type: ignore[attr-defined]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list_of(kind: type | tuple[type, ...]) -> Any:
    return lambda value: (
        isinstance(value, list) and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
    )


_KINDS: dict[str, tuple[Any, str]] = {
    "text": (lambda value: isinstance(value, str), "text"),
    "whole": (_is_whole, "an integer of at least 0"),
    "texts": (_is_list_of(str), "a list of texts"),
    "wholes": (_is_list_of(int), "a list of integers"),
    "numbers": (_is_list_of((int, float)), "a list of numbers"),
    "number": (
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value > 0,
        "a number above 0",
    ),
    "list": (lambda value: isinstance(value, list), "a list"),
    "object": (lambda value: isinstance(value, Mapping), "an object"),
}


def _required(kind: str) -> Any:
    check, wanted = _KINDS[kind]
    return field(metadata={"required": True, "check": check, "wanted": wanted})


def _field(kind: str, default: Any = None, optional: bool = True) -> Any:
    check, wanted = _KINDS[kind]
    metadata = {"optional": optional, "check": check, "wanted": wanted}
    if isinstance(default, (list, dict)):
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class StageRecord(_Record):
    """A step on a checkpoint: a training stage, a graft, an average.

    Attributes:
        stage: the step's name.
        steps: optimizer steps.
        documents, tokens: available documents and tokens, by language.
        blocks_seen, tokens_seen: blocks and tokens that passed through the training, over all ranks and attempts; text
            that was seen twice counts twice.
        tokens_seen_by_language: `tokens_seen`, by language, where the batches named the languages.
        written_by: the model that wrote a language's text, by language, where a model wrote all of it.
        seed: random seed.
        settings: the step's settings; local paths are reduced to their last part.
    """

    stage: str = _required("text")
    steps: int | None = _field("whole")
    documents: dict[str, int] | None = _field("object")
    tokens: dict[str, int] | None = _field("object")
    blocks_seen: int | None = _field("whole")
    tokens_seen: int | None = _field("whole")
    tokens_seen_by_language: dict[str, int] | None = _field("object")
    written_by: dict[str, str] | None = _field("object")
    seed: int | None = _field("whole")
    settings: dict[str, Any] | None = _field("object")
    other: dict[str, Any] = field(default_factory=dict)

    @property
    def self_written(self) -> list[str]:
        """One phrase for each language whose text a model wrote."""
        documents, written = self.documents or {}, self.written_by or {}
        return [f"{documents.get(code, 0):,} documents of {code} that {model} wrote" for code, model in written.items()]

    @property
    def changes_everything(self) -> bool:
        """Whether the step may have changed every tensor, the base model's own included."""
        return self.stage in CHANGES_EVERYTHING


@dataclass(frozen=True)
class ExpansionRecord(_Record):
    """One expansion of a model.

    Attributes:
        method: the plan's method.
        old_languages, new_languages: languages before this expansion, and languages that it adds.
        base_model: hub id, or the name of the local folder.
        base_revision: commit of a hub model; None for a local folder.
        experts_per_layer: experts of each layer after this expansion, expert 0 counted.
        classifier_layers: layers with a routing classifier, after this expansion.
        pack: name of the language pack that brought the expansion into a joined model.
        router_scale: factor of the pack's router, from a calibration.
        prefix_gate: how the classifiers judge the text so far; None if they judge single tokens.
        gate_languages: the languages that fitted gates tell apart, by class.
        seed: random seed of routers and random experts.
        expert_init: how a first expansion's experts started: `copy`, `random` or `branches`; added experts: `neurons`
            or `random neurons`.
        branches: models that became the experts (Branch-Train-Mix).
        copied_expert: the expert that a DMoE adaptation copied in every layer.
        copied_experts: for each layer, the expert that a further expansion copied (keys are text in JSON).
        base_parameters, parameters: parameter counts of the dense and the expanded model.
        versions: versions of the software that made the expansion.
        separability: for each layer, how well it told old text from new, if the plan went by it.
        stages: the steps after this expansion.
    """

    method: str = _required("text")
    old_languages: list[str] = _required("texts")
    new_languages: list[str] = _required("texts")
    base_model: str | None = _field("text", optional=False)
    base_revision: str | None = _field("text", optional=False)
    experts_per_layer: list[int] = _field("wholes", [], optional=False)
    classifier_layers: list[int] = _field("wholes", [], optional=False)
    pack: str | None = _field("text")
    router_scale: float | None = _field("number")
    prefix_gate: dict[str, Any] | None = _field("object")
    gate_languages: list[Any] | None = _field("list")
    seed: int | None = _field("whole")
    expert_init: str | None = _field("text")
    branches: list[str] | None = _field("texts")
    copied_expert: int | None = _field("whole")
    copied_experts: dict[Any, int] | None = _field("object")
    base_parameters: int | None = _field("whole")
    parameters: int | None = _field("whole")
    versions: dict[str, str] | None = _field("object")
    separability: list[float] | None = _field("numbers")
    stages: list[StageRecord] = field(default_factory=list)
    other: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, value: Any, where: str = "expansions") -> "ExpansionRecord":
        stages = value.get("stages", []) if isinstance(value, Mapping) else []
        if not isinstance(stages, list):
            raise InputError(f"{where}.stages: a list is needed, found {type(stages).__name__}.")
        read = [StageRecord.from_dict(stage, f"{where}.stages[{i}]") for i, stage in enumerate(stages)]
        bare = super().from_dict({**value, "stages": []} if isinstance(value, Mapping) else value, where)
        object.__setattr__(bare, "stages", read)
        return bare


@dataclass(frozen=True)
class History:
    """The expansions of a model, in order; empty for a model that was never expanded."""

    expansions: Sequence[ExpansionRecord] = ()

    @classmethod
    def of(cls, config: Any) -> "History":
        """The history in a configuration, or in config.json's mapping.

        Raises:
            InputError: the history is malformed; the message names the entry.
        """
        value = config.get("expansions") if isinstance(config, Mapping) else getattr(config, "expansions", None)
        if value is not None and not isinstance(value, list):
            raise InputError(f"config.json: expansions: a list is needed, found {type(value).__name__}.")
        return cls(
            [ExpansionRecord.from_dict(entry, f"config.json: expansions[{i}]") for i, entry in enumerate(value or [])]
        )

    def write(self, config: Any) -> None:
        """Writes the history into a configuration."""
        config.expansions = [record.to_dict() for record in self.expansions]

    def __len__(self) -> int:
        return len(self.expansions)

    @property
    def first(self) -> ExpansionRecord:
        """The first expansion.

        Raises:
            InputError: there is none.
        """
        return self._known()[0]

    @property
    def last(self) -> ExpansionRecord:
        """The last expansion.

        Raises:
            InputError: there is none.
        """
        return self._known()[-1]

    def _known(self) -> Sequence[ExpansionRecord]:
        if not self.expansions:
            raise InputError(
                "config.json records no expansion, so the base model and the languages are not known: make the "
                "checkpoint with `hf-moe-expand expand`."
            )
        return self.expansions

    @property
    def stages(self) -> list[StageRecord]:
        """All steps of all expansions."""
        return [stage for expansion in self.expansions for stage in expansion.stages]

    @property
    def trained_base(self) -> str | None:
        """The first stage that trained the base model inside, expert 0 included; None if it is as it was."""
        return next((stage.stage for stage in self.stages if stage.stage in TRAINS_BASE), None)

    @property
    def by_expansion(self) -> list[list[str]]:
        """The base model's languages, then those that each expansion added; empty for an empty history."""
        return [self.first.old_languages, *(e.new_languages for e in self.expansions)] if len(self) else []

    @property
    def languages(self) -> list[str]:
        """All languages of the model, the base model's first."""
        return list(dict.fromkeys(code for codes in self.by_expansion for code in codes))

    @property
    def classes(self) -> dict[str, int]:
        """The class of each language: 0 for the base model's, g for those that expansion g added."""
        return {code: number for number, codes in enumerate(self.by_expansion) for code in codes}

    def with_expansion(self, record: ExpansionRecord) -> "History":
        """This history with one more expansion."""
        return History([*self.expansions, record])

    def with_stage(self, record: StageRecord) -> "History":
        """This history with one more step on the last expansion."""
        last = self.last.to_dict()
        last["stages"] = [*last["stages"], record.to_dict()]
        return History([*self.expansions[:-1], ExpansionRecord.from_dict(last)])


def add_stage(config: Any, record: StageRecord) -> None:
    """Adds a step to a configuration's history: to the last expansion of an expanded model, to the field `history` of
    a dense one."""
    history = History.of(config)
    if len(history):
        history.with_stage(record).write(config)
    else:
        config.history = [*(getattr(config, "history", None) or []), record.to_dict()]


def without_folders(value: Any) -> Any:
    """Settings for publication: absolute paths are reduced to their last part."""
    if isinstance(value, dict):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    absolute = isinstance(value, str) and (value.startswith(("/", "~")) or PureWindowsPath(value).is_absolute())
    return PureWindowsPath(value).name if absolute else value
