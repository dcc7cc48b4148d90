"""The history that a checkpoint carries in config.json: one record for each expansion and for each step after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from ..core.errors import InputError
from ..core.schema import Flag, Schema, Text, Whole, changed, read

# Steps that may change every tensor, by their names in histories ("everything" and "joint" train all parameters).
CHANGES_EVERYTHING = frozenset({"graft", "average", "everything", "group", "joint"})

# Those of them that train the base model inside.
TRAINS_BASE = frozenset({"everything", "group", "joint"})

_Count = Annotated[Whole, Field(ge=0)]


class _Record(Schema):
    """A record in config.json; fields that this version does not know are kept."""

    model_config = ConfigDict(extra="allow")

    def to_dict(self) -> dict[str, Any]:
        """As JSON in config.json, without its own empty fields."""
        own = type(self).model_fields
        return {name: value for name, value in self if not (value is None and name in own)}


class StageRecord(_Record):
    """A step on a checkpoint: a training stage, a graft, an average.

    Attributes:
        stage: the step's name.
        documents, tokens: available, by language.
        blocks_seen, tokens_seen: blocks and tokens that passed through the training, over all ranks and attempts; text
            that was seen twice counts twice.
        tokens_seen_by_language: `tokens_seen`, by language, where the batches named the languages.
        written_by: the model that wrote a language's text, by language, where a model wrote all of it.
        trained: the parts of the model that trained, where the stage's name does not say them: `base`, `experts`, ….
        settings: the step's settings; local paths are reduced to their last part.
    """

    stage: Text
    steps: _Count | None = None
    documents: dict[Text, _Count] | None = None
    tokens: dict[Text, _Count] | None = None
    blocks_seen: _Count | None = None
    tokens_seen: _Count | None = None
    tokens_seen_by_language: dict[Text, Any] | None = None
    written_by: dict[Text, Any] | None = None
    seed: _Count | None = None
    trained: list[Text] | None = None
    settings: dict[Text, Any] | None = None

    @property
    def sampled(self) -> list[str]:
        """One phrase for each language whose text a model wrote."""
        documents, written = self.documents or {}, self.written_by or {}
        return [f"{documents.get(code, 0):,} documents of {code} that {model} wrote" for code, model in written.items()]

    @property
    def changes_everything(self) -> bool:
        """Whether the step may have changed every tensor, the base model's own included."""
        return self.stage in CHANGES_EVERYTHING or self.trains_base

    @property
    def trains_base(self) -> bool:
        return self.stage in TRAINS_BASE or "base" in (self.trained or ())


class ExpansionRecord(_Record):
    """One expansion of a model.

    Attributes:
        method: the plan's.
        old_languages, new_languages: languages before this expansion, and languages that it adds.
        base_model, base_revision: hub id and commit, or the name of the local folder and None.
        experts_per_layer, classifier_layers: after this expansion; expert 0 counted.
        pack: name of the language pack that brought the expansion into a joined model.
        exclusive: whether tokens of the new languages take its experts alone.
        seed: random seed of routers and random experts.
        expert_init: how new experts started: `copy`, `random`, `branches`.
        branches: models that became the experts (Branch-Train-Mix).
        copied_expert: the expert that a DMoE adaptation copied in every layer.
        copied_experts: for each layer, the expert that a further expansion copied (keys are text in JSON).
        base_parameters, parameters: parameter counts of the dense and the expanded model.
        base_hashes: a hash of each of the base's tensors (`base_tensors`), in the first expansion; None if unknown.
        versions: versions of the software that made the expansion.
        stages: the steps after this expansion.
    """

    method: Text
    old_languages: list[Text]
    new_languages: list[Text]
    base_model: Text | None = None
    base_revision: Text | None = None
    experts_per_layer: list[Whole] = Field([])
    classifier_layers: list[Whole] = Field([])
    pack: Text | None = None
    language_gate: dict[Text, Any] | None = None
    exclusive: Flag | None = None
    seed: _Count | None = None
    expert_init: Text | None = None
    branches: list[Text] | None = None
    copied_expert: _Count | None = None
    copied_experts: dict[Any, Any] | None = None
    base_parameters: _Count | None = None
    parameters: _Count | None = None
    base_hashes: list[Text] | None = None
    versions: dict[Text, Any] | None = None
    stages: list[StageRecord] = Field([])

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "stages": [stage.to_dict() for stage in self.stages]}

    def copies(self, added: Sequence[int]) -> str:
        """Which experts a further expansion's new experts, `added` in each layer, are copies of."""
        if self.copied_expert is not None:
            return f"copies of expert {self.copied_expert}"
        # JSON has no integers as keys.
        known = {int(layer): expert for layer, expert in (self.copied_experts or {}).items()}
        experts = [str(known.get(layer, 0)) if count else "-" for layer, count in enumerate(added)]
        alike = {*experts} - {"-"}
        return f"copies of expert {alike.pop()}" if len(alike) == 1 else f"copies of experts {' '.join(experts)}"


@dataclass(frozen=True)
class History:
    """The expansions of a model, in order; empty for a model that was never expanded."""

    expansions: Sequence[ExpansionRecord] = ()

    @classmethod
    def of(cls, config: Any) -> "History":
        """The history in a configuration, or in config.json's mapping."""
        value = config.get("expansions") if isinstance(config, Mapping) else getattr(config, "expansions", None)
        if value is not None and not isinstance(value, list):
            raise InputError(f"config.json: expansions: a list is needed, found {type(value).__name__}.")
        entries = enumerate(value or [])
        return cls([read(ExpansionRecord, entry, f"config.json: expansions[{number}]") for number, entry in entries])

    def write(self, config: Any) -> None:
        """Writes the history into a configuration."""
        config.expansions = [record.to_dict() for record in self.expansions]

    def __len__(self) -> int:
        return len(self.expansions)

    @property
    def first(self) -> ExpansionRecord:
        """The first expansion; refuses a model that records none."""
        return self._known()[0]

    @property
    def last(self) -> ExpansionRecord:
        return self._known()[-1]

    def _known(self) -> Sequence[ExpansionRecord]:
        if not self.expansions:
            raise InputError("config.json records no expansion: the base model and the languages are not known.")
        return self.expansions

    @property
    def stages(self) -> list[StageRecord]:
        return [stage for expansion in self.expansions for stage in expansion.stages]

    @property
    def trained_base(self) -> str | None:
        """The first stage that trained the base model inside, expert 0 included; None if it is as it was."""
        return next((stage.stage for stage in self.stages if stage.trains_base), None)

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

    def with_last(self, **fields: Any) -> "History":
        return History([*self.expansions[:-1], changed(self.last, **fields)])

    def with_stage(self, record: StageRecord) -> "History":
        return self.with_last(stages=[*self.last.stages, record])


def add_stage(config: Any, record: StageRecord) -> None:
    """Adds a step to the last expansion of an expanded model's configuration, or to `history` of a dense one's."""
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
