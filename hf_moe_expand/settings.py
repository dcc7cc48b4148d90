"""The settings of each step, and how they are read from YAML: a mistyped key is an error that names the nearest."""

import difflib
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from .errors import InputError
from .planning.methods import PlanSettings as PlanSettings

T = TypeVar("T")


def _at_least(settings: Any, **least: float) -> None:
    """Refuses a number below its least; a field that is None passes."""
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= low:
            raise InputError(f"{name} is {value}: must be at least {low}.")


@dataclass(frozen=True)
class AnalysisSettings:
    """`analyze similarity`: tokens a language (Q), and how they are batched."""

    tokens: int = 100_000
    block_size: int = 1024
    batch_size: int = 8

    def __post_init__(self) -> None:
        _at_least(self, tokens=1, block_size=1, batch_size=1)


@dataclass(frozen=True)
class DeviationSettings:
    """`analyze deviation`: `batch_size` blocks a step, and over how many of the last layers languages are compared."""

    steps: int = 10
    learning_rate: float = 8e-6
    batch_size: int = 2048
    block_size: int = 512
    micro_batch_size: int = 8
    last_layers: int = 3

    def __post_init__(self) -> None:
        _at_least(self, steps=1, batch_size=1, block_size=2, micro_batch_size=1, last_layers=1)


@dataclass(frozen=True)
class ExpandSettings:
    """`expand`. `conditional_routing` makes expert 0 a shared FFN and gives each expanded layer a gate (CMR);
    `expert_kind: lora` makes the new experts low-rank updates of expert 0 (MoLA, LoRAMoE). `copy_from` is of a further
    expansion: which expert its new ones copy, or `nearest`: in each layer the one that the new languages' text is
    routed to most."""

    expert_init: str = "copy"
    copy_from: int | str = 0
    conditional_routing: bool = False
    expert_kind: str = "ffn"
    lora_rank: int = 8
    lora_alpha: float = 16.0
    max_shard_size: str = "5GB"

    def __post_init__(self) -> None:
        _at_least(self, lora_rank=1)


@dataclass(frozen=True)
class MaskingSettings:
    """What a stage masks while it trains, so that low-resource languages over-fit less: the share of a token's experts
    (EOM), of tokens (FOM), of the gates of conditional routing (CMR), and of batches (gating dropout)."""

    expert_output: float = 0.0
    final_output: float = 0.0
    conditional_routing: float = 0.0
    gating_dropout: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not 0 <= value < 1:
                raise InputError(f"{f.name} is {value}: a probability is at least 0 and less than 1.")


@dataclass(frozen=True)
class ValidationSettings:
    """Held-out text, language to file, that is scored every so many steps of a stage and at its end; `max_tokens` of
    each language at most."""

    texts: dict[str, str] = field(default_factory=dict)
    every: int = 50
    max_tokens: int | None = 20_000

    def __post_init__(self) -> None:
        _at_least(self, every=1, max_tokens=2)


@dataclass(frozen=True)
class PostPretrainSettings:
    """Stage 1. `training` goes to `transformers.TrainingArguments` as it is.

    `curriculum` is a file that says when each language enters. At `temperature` T languages are drawn in proportion to
    `n ** (1 / T)`, n their blocks: as the data is at 1, the more alike the higher.

    `budget` weighs the loss that holds the gates of conditional routing at `gate_budget` on average, and
    `localized_balance` LoRAMoE's localized balancing constraint.
    """

    block_size: int = 1024
    tokens_per_language: int | None = None
    balance: float = 0.01
    language_prior: float = 0.0
    replay: bool = False
    everything: bool = False
    masking: MaskingSettings = field(default_factory=MaskingSettings)
    budget: float = 0.1
    gate_budget: float = 0.8
    localized_balance: float = 0.0
    curriculum: str | None = None
    temperature: float = 1.0
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(self, block_size=2, tokens_per_language=1, balance=0, language_prior=0, budget=0, localized_balance=0)
        if not 0 <= self.gate_budget <= 1:
            raise InputError(f"gate_budget is {self.gate_budget}: a share is at least 0 and at most 1.")


@dataclass(frozen=True)
class ReviewSettings:
    """Stage 2. `old_documents` of each old language, `new_per_old` times as many of each new one."""

    block_size: int = 512
    old_documents: int | None = None
    new_per_old: float = 2.0
    language_prior: float = 0.1
    classifier: float = 0.1
    balance: float = 0.0
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(self, block_size=2, old_documents=1, language_prior=0, classifier=0, balance=0)
        if not self.new_per_old > 0:
            raise InputError(f"new_per_old is {self.new_per_old:g}: must be larger than 0.")


@dataclass(frozen=True)
class GraftSettings:
    """`graft`: what fine-tuning changed in the base, instruct - base, is added `scale` times (DeltaMoE).

    `instruct` is a folder or hub id of the fine-tune; its tokenizer and chat template replace the model's, unless
    `keep_tokenizer`.
    """

    instruct: str
    scale: float = 1.0
    keep_tokenizer: bool = False


@dataclass(frozen=True)
class GroupSettings:
    """DMoE's extension stage: each batch holds one language group and trains its expert; `group` is lambda."""

    block_size: int = 2048
    tokens_per_language: int | None = None
    group: float = 1.28
    balance: float = 0.0
    curriculum: str | None = None
    temperature: float = 1.0
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(self, block_size=2, tokens_per_language=1, group=0, balance=0)


@dataclass(frozen=True)
class NormalSettings:
    """DMoE's normal training: everything trains on mixed batches, routed to the top experts."""

    block_size: int = 2048
    tokens_per_language: int | None = None
    balance: float = 0.02
    masking: MaskingSettings = field(default_factory=MaskingSettings)
    curriculum: str | None = None
    temperature: float = 1.0
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(self, block_size=2, tokens_per_language=1, balance=0)


@dataclass(frozen=True)
class AdaptSettings:
    """DMoE's adaptation to a new language. `sample_tokens` of its text choose the expert that is copied."""

    block_size: int = 2048
    tokens_per_language: int | None = None
    sample_tokens: int = 100_000
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(self, block_size=2, tokens_per_language=1, sample_tokens=2)


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters of `train dense`: their rank, and the modules that get one (`all-linear` or names)."""

    r: int = 16
    alpha: int = 32
    target_modules: str | list[str] = "all-linear"

    def __post_init__(self) -> None:
        _at_least(self, r=1)


@dataclass(frozen=True)
class DenseSettings:
    """Continued pre-training of a dense model, the plain baseline. `method` says what trains: `full`, `lora` (low-rank
    adapters, merged at the end) or `new-blocks` (those that `expand-depth` inserted)."""

    block_size: int = 1024
    tokens_per_language: int | None = None
    method: str = "full"
    lora: LoraSettings = field(default_factory=LoraSettings)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(self, block_size=2, tokens_per_language=1)


@dataclass(frozen=True)
class EvaluationSettings:
    """`evaluate`."""

    block_size: int = 1024
    batch_size: int = 8
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, block_size=1, batch_size=1, max_tokens=2)


class _Loader(yaml.SafeLoader):
    """Reads 5e-5 as a number, as YAML 1.2 does; PyYAML's YAML 1.1 takes it for text. Refuses a key that comes twice."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)  # before other mappings are merged into it
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.composer.ComposerError(None, None, f"`{twice[0]}` is there twice", node.start_mark)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping, loaded safely.

    Raises:
        InputError: the file is missing, is not YAML (with the line), or holds something else.
    """
    try:
        value = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {error}.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold `key: value` lines, found {type(value).__name__}.")
    return value


def from_mapping(cls: type[T], mapping: Any, where: str) -> T:
    """An instance of a settings class from a mapping, each key and type checked.

    Raises:
        InputError: an unknown key (names the nearest known one), a missing one, or a value of another type.
    """
    if not isinstance(mapping, Mapping):
        raise InputError(f"{where}: must hold `key: value` lines, found {type(mapping).__name__}.")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in mapping.items():
        if key not in known:
            raise InputError(f"{where}: {unknown_key(str(key), known)}")
        values[key] = checked(value, hints[key], f"{where}.{key}" if where else str(key))
    for name, f in known.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise InputError(f"{where}: `{name}` is missing.")
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}" if where else str(error)) from None


def unknown_key(key: str, known: Any) -> str:
    """`unknown key ...`, with the nearest known one."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}."
    return f"unknown key `{key}`; {hint}"


def checked(value: Any, hint: Any, where: str) -> Any:
    """A value in the type that `hint` asks for: a whole float where that is `int`, a mapping where it is a settings
    class.

    Raises:
        InputError: it is of another type.
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        plain = typing.get_origin(option) or option
        if is_dataclass(plain):
            return from_mapping(typing.cast(type, plain), value, where)
        if plain is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if plain is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if plain is list and isinstance(value, list) and is_dataclass(item := typing.get_args(option)[0]):
            kind = typing.cast(type, item)
            return [from_mapping(kind, entry, f"{where}[{number}]") for number, entry in enumerate(value)]
        if isinstance(value, plain) and not (plain is int and isinstance(value, bool)):
            return value
    names = " or ".join(getattr(typing.get_origin(o) or o, "__name__", str(o)) for o in options)
    raise InputError(f"{where}: {value!r} is not {names.replace('NoneType', 'nothing')}.")
