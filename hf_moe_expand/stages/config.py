"""The configuration of a stage that trains: `transformers.TrainingArguments` with the stage's own fields.

A field is declared once: its type is the check, its `help` the documentation. A recipe's stage, a `--config` file and
Python give the same keywords. In YAML they are checked by the fields alone, and the object is made where it trains.
"""

import copy
import os
import re
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from datasets import Dataset
from pydantic import Field, GetCoreSchemaHandler, PlainValidator
from pydantic_core import core_schema
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from ..checkpoint.facts import Facts
from ..checkpoint.source import TOKENIZER_FILES, load_expanded_config
from ..core.errors import InputError, errors_at
from ..core.extensions import extensions
from ..core.recipe_paths import Place
from ..core.schema import (
    MOST,
    Coefficient,
    Count,
    Flag,
    Number,
    Positive,
    Schema,
    Text,
    Whole,
    check_keys,
    check_seed,
    check_types,
    read,
)
from ..data.packing import PackedText, pack_texts
from ..data.pairs import pack_pairs
from ..data.sources import LanguageText
from ..data.stream_reader import OnBadShard
from ..evaluation.validation import VALIDATION, ValidationCallback
from ..trainers.bfloat16 import NO_BFLOAT16, has_bfloat16
from ..trainers.freezing import Trained, freeze
from ..trainers.losses import RouterLoss
from ..trainers.router_losses import CHECKPOINTING, CHECKPOINTING_NAMES
from ..trainers.samplers import LanguageMix
from ..trainers.watching import check_full_evaluation
from .base import Stage
from .distributed import SHARDING
from .keywords import (
    BOUNDED,
    LOOSE,
    Help,
    as_json,
    default_value,
    flat,
    from_json,
    known_losses,
    mapping,
    plain,
    refused_by_the_library,
    setting,
    strict,
)

# Bytes of text, as the files have them, from which a stage streams: to pack so much takes 20 s (docs/distributed.md).
STREAMED = 32 << 20
BlockSize = Annotated[Whole, Field(ge=2)]
ReplayShare = Annotated[Number, Field(gt=0, lt=1)] | None
REPLAY_SHARE = "share of all tokens that the old languages have, each the same; all of their text by default"

_NOT_FROZEN = "has no frozen expert for old languages to return to"
REFUSED = {("dmoe", stage): _NOT_FROZEN for stage in ("review", "distillation")}

_CHECKPOINTING = re.compile(f"^({'|'.join(CHECKPOINTING_NAMES)})(?=$|_kwargs$)")
# What a run sets itself, with the arguments on which the losses rely.
_LOOSE = (*LOOSE, "accelerator_config", "debug")  # which take more than their types say
_SET = ("output_dir", "seed", "data_seed", "remove_unused_columns", "label_names")
_SCORED = ("eval_strategy", "do_eval", "eval_on_start", "load_best_model_at_end")
_PUBLISHED = ("push_to_hub", "hub_token", "hub_model_id", "hub_strategy", "hub_private_repo")  # a token is a secret


class ValidationSettings(Schema):
    """Held-out text that is scored during a stage."""

    texts: dict[Text, Place] = Field(default_factory=dict, description="language: held-out text")
    every: Count = Field(50, description="steps between two scores; the model is scored at the end too")
    max_tokens: Annotated[Whole, Field(ge=2)] | None = Field(
        20_000, description="maximum of tokens to score of each language"
    )


Validation = Annotated[ValidationSettings | str | None, mapping(ValidationSettings)]


@dataclass
class StageConfig(TrainingArguments, Stage):
    """A stage that trains: its settings are fields, and its losses stand in their types.

    Every argument of `TrainingArguments` works. Besides those that are declared here, five have other defaults:
    `logging_steps` 10, `save_total_limit` 1, `report_to` none, `seed` 0, and `use_cpu` where there is no accelerator.

    Attributes:
        trains: the parts of the model that it trains.
        trainer_class: its Trainer, set where the Trainer is defined.
        companions: patterns of files that are copied to the trained model.

    Raises:
        InputError: a field has another type, is out of range, or contradicts another field.
    """

    trains: ClassVar[Trained]
    trainer_class: ClassVar[Any] = None
    companions: ClassVar[Sequence[str]] = TOKENIZER_FILES
    is_built = False  # no field: whether the library has taken the arguments
    _VALID_DICT_FIELDS = (*TrainingArguments._VALID_DICT_FIELDS, SHARDING)  # type: ignore[assignment]

    logging_steps: float = 10
    save_total_limit: int | None = 1
    report_to: None | str | list[str] = "none"  # noqa: RUF036 (HfArgumentParser reads this order alone)
    seed: int = 0
    use_cpu: bool | None = None  # type: ignore[assignment]
    distributed_config: dict | str | None = field(
        default=None, metadata={"help": "how transformers itself splits the model over ranks, such as {fsdp_size: 8}"}
    )
    block_size: BlockSize = setting(1024, "tokens in a block")
    tokens: Count | None = setting(None, "tokens to train on in all, in place of `max_steps` and `num_train_epochs`")
    stream: Flag | None = setting(
        None,
        "read, tokenise and pack the text while the model trains, so that training begins at once. By default for "
        f"files of more than {STREAMED >> 20} MB together, and for text on the hub or elsewhere where `tokens`, "
        "`tokens_per_language` or `max_steps` is set",
    )
    dataset_num_proc: Count | None = setting(None, "processes that tokenise text before training; one by default")
    on_bad_shard: OnBadShard = setting(
        "stop", "what a file does that is broken, empty or of another schema in a stream: `stop`, or `skip` its rest"
    )
    losses: Annotated[dict | str | None, PlainValidator(known_losses, json_schema_input_type=dict[str, float])] = (
        setting(dict, "name: weight of losses that other packages register")
    )
    num_train_epochs: Annotated[Coefficient, Field(le=MOST)] = setting(
        1.0, "passes over the text, where `max_steps` does not say the steps"
    )
    per_device_train_batch_size: Count = setting(8, "blocks in a forward pass of a device")
    learning_rate: Positive = setting(5e-5, "highest learning rate; a base below 1.8 B wants more (docs/choose.md)")
    lr_scheduler_type: SchedulerType | str = setting(
        "cosine", "how the learning rate changes: a schedule of the library"
    )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.settings = cls
        cls.__repr__ = TrainingArguments.__str__  # type: ignore  # a dataclass's shows the token

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        self = super().__new__(cls)
        names = [f.name for f in fields(cls) if f.init]
        self.given = cls._unlike_defaults(dict(zip(names, args, strict=False)) | keywords)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_built and name in self.__dataclass_fields__:
            self.given = self.given | {name: value}
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        checked = {name: getattr(self, name) for name in (*own_fields(type(self)), *BOUNDED)}
        hints = {name: hint for name, hint in _hints(type(self)).items() if name not in (*checked, *_LOOSE)}  # type: ignore[arg-type]
        check_types({name: from_json(self.given[name]) for name in hints if name in self.given}, hints)
        read_values = read(type(self), {name: plain(value) for name, value in checked.items()})
        for name in checked:
            setattr(self, name, getattr(read_values, name))
        self._settle()
        check_seed(self.seed)
        check_seed(self.data_seed, "data_seed")
        with refused_by_the_library():
            super().__post_init__()
            self.get_process_log_level()
        if self.bf16 and not has_bfloat16():
            warnings.warn(f"{NO_BFLOAT16}leave `bf16: true` out here, or give `fp16: true` on a GPU.", stacklevel=3)
        self.is_built = True

    def _settle(self) -> None:
        """Defaults that depend on other fields."""
        if self.report_to is None:
            self.report_to = "none"
        if self.data_seed is None:
            self.data_seed = self.seed
        if self.use_cpu is None:
            self.use_cpu = not torch.accelerator.is_available()
        if self.distributed_config is not None and "save_strategy" not in self.given:
            self.save_strategy = "no"

    # --- keywords -------------------------------------------------------------------------------------------------

    @classmethod
    def of_keywords(cls, **keywords: Any) -> Self:
        """The configuration that keywords will make, with the defaults of all other fields: nothing is made for which a
        device, an output folder or a library of a reporter is needed. `made` makes it."""
        plan = cls.__new__(cls, **keywords)
        plan.given = keywords
        for f in fields(cls):
            vars(plan)[f.name] = keywords[f.name] if f.name in keywords else default_value(f)
        plan._settle()
        return plan

    def but(self, **keywords: Any) -> Self:
        """The configuration that the same keywords will make, but for these."""
        return read(type(self), {**self.given, **keywords})

    def built(self, output_dir: Any, seed: int, where: str = "") -> Self:
        """The configuration with which training starts, of the keywords that were given.

        Raises:
            InputError: the library refuses a keyword, here or on this machine; the message begins with `where`.
        """
        keywords = {**copy.deepcopy(self.given), "output_dir": str(output_dir), "seed": seed, "data_seed": seed}
        with errors_at(where):
            made = type(self)(**keywords)
        made.given = {**made.given, **self.given}  # the library adds keys to mappings
        return made

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """In YAML: a mapping of keywords, which becomes a configuration that is not made yet."""
        own, keys = own_fields(cls), {}
        for name, hint in cls.keyword_types().items():
            f = cls.__dataclass_fields__[name]
            shown = {"default": plain(f.default)} if name in own and f.default is not MISSING else {}
            about = f.metadata.get("help", "an argument of transformers.TrainingArguments").partition(". ")[0]
            hint = Annotated[hint, Field(description=about, json_schema_extra=shown)]
            keys[name] = core_schema.typed_dict_field(handler.generate_schema(hint), required=False)
        return core_schema.no_info_wrap_validator_function(
            cls._read,
            core_schema.typed_dict_schema(keys, extra_behavior="forbid"),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda stage: stage.keywords()),
        )

    @classmethod
    def _read(cls, value: Any, handler: Callable[[Any], dict[str, Any]]) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping) and "training" in value:
            value = flat({name: inner for name, inner in value.items() if name != "training"}, value["training"])
        if isinstance(value, Mapping):
            keys = {str(name): _CHECKPOINTING.sub(CHECKPOINTING, str(name)) for name in value}
            if both := next((key for key in value if keys[str(key)] != key and keys[str(key)] in value), None):
                raise InputError(f"`{both}` is another name of `{keys[both]}`, which is given too: leave one out.")
            value = {keys[str(name)]: inner for name, inner in value.items()}
            if name := next((name for name in _SET if name in value), None):
                raise InputError(f"`{name}` is set by hf-moe-expand; leave it out.")
            own = own_fields(cls)
            check_keys(value, cls.keyword_types(), len(own), " and those of transformers.TrainingArguments")
        plan = cls.of_keywords(**handler(value))
        plan.check_alone()
        return plan

    def check_alone(self) -> None:
        """Refuses keywords for what a run does itself, where no Trainer is at hand that could do it."""
        for name, value in self.given.items():
            if name in _SCORED and value not in (False, "no", None):
                raise InputError(f"leave `{name}` out; held-out text is scored by `validation`.")
            if name in _PUBLISHED and value and value != default_value(self.__dataclass_fields__[name]):
                raise InputError(f"leave `{name}` out; `hf-moe-expand push` publishes the finished checkpoint.")
        if self.given.get("save_strategy") == "best":
            raise InputError("save_strategy is 'best', but a stage scores no checkpoints: leave it out.")
        check_full_evaluation(self)
        if self.save_only_model:
            raise InputError("leave `save_only_model` out; an interrupted run could not resume exactly.")

    @classmethod
    @cache
    def keyword_types(cls) -> dict[str, Any]:
        """The type of each keyword in YAML, the stage's own first."""
        hints, own = typing.get_type_hints(cls, include_extras=True), own_fields(cls)
        others = [f.name for f in fields(cls) if f.init and f.name not in (*own, *_SET)]
        return {name: BOUNDED.get(name) or LOOSE.get(name) or strict(hints[name]) for name in (*own, *others)}

    @classmethod
    def _unlike_defaults(cls, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords with another value than the default's: a command line's parser gives all of them. To it the
        library's "no" is false."""
        found = {}
        for name, value in keywords.items():
            default = default_value(cls.__dataclass_fields__[name]) if name in cls.__dataclass_fields__ else MISSING
            if value != default and any(one and one != "no" for one in (value, default)):
                found[name] = from_json(value) if name in cls._VALID_DICT_FIELDS else value
                if isinstance(found[name], dict):
                    found[name] = dict(found[name])  # the library adds keys to its own
        return found

    def keywords(self) -> dict[str, Any]:
        """The keywords that were given, as JSON."""
        return {name: as_json(value) for name, value in self.given.items()}

    def recorded(self) -> dict[str, Any]:
        """The stage's settings for its history, JSON: its declared fields, and all other keywords that were given."""
        own = {name: getattr(self, name) for name in own_fields(type(self))}
        left_out = (*_SET[:3], *_PUBLISHED)  # places and secrets, and the seed, which has its own place
        return {name: as_json(value) for name, value in {**self.given, **own}.items() if name not in left_out}

    def to_dict(self) -> dict[str, Any]:
        """As `TrainingArguments.to_dict`, with the stage's own fields: JSON."""
        own = {name: as_json(getattr(self, name)) for name in own_fields(type(self))}
        return {**super().to_dict(), **own}

    # --- what the stage does --------------------------------------------------------------------------------------

    def trained(self) -> tuple[str, Trained]:
        """Its name in a history, and the parts of the model that train."""
        return self.name, self.trains

    @classmethod
    def languages(cls, settings: Any, old: Iterable[str], new: Iterable[str]) -> list[str]:
        return list(new)

    def check(self, model: Any, texts: Mapping[str, Any]) -> list[str]:
        """Refuses text in languages for which the stage is not made, missing text, and settings that contradict them
        or the model. Returns what else there is to say, one line each.

        Args:
            model: configuration of the expanded model, or of what is planned.
            texts: text of each language: a `LanguageText` or a data set.
        """
        self.check_settings(model)
        if not texts:
            raise InputError("No text was given: name files with --data.")
        return []

    def check_settings(self, model: Any) -> None:
        """Refuses settings that contradict one another or the model, whatever the text."""

    def place_classifiers(
        self, folder: Path, model_config: Any, texts: Mapping[str, LanguageText], resume: str | None
    ) -> bool:
        """Places classifiers in the configuration of the model that trains, if the stage does; returns whether."""
        return False

    @classmethod
    def check_model(cls, model_config: Any) -> None:
        """Refuses a model of another family."""
        if model_config.model_type in cls.families:
            return
        if "dmoe" in cls.families:
            raise InputError(
                f"The checkpoint has no language groups (model_type {model_config.model_type!r}): `train {cls.name}` "
                "is for DMoE; expand the base with a dmoe plan."
            )
        raise InputError(
            f"This is a DMoE checkpoint, which {_NOT_FROZEN}: use `train group`, `train joint` or `train adapt`."
        )

    @classmethod
    def load_config(cls, folder: Path) -> Any:
        """The configuration of a checkpoint that the stage trains; refuses other kinds."""
        config = load_expanded_config(folder)
        cls.check_model(config)
        return config

    @classmethod
    def known_languages(cls, model: Any, texts: Iterable[str]) -> tuple[list[str], list[str]]:
        """The old and the new languages of a model."""
        return Facts(model).languages

    def saved_parameters(self, network: Any) -> tuple[int, int]:
        """The number of parameters in a training checkpoint, and of those among them that train.

        Args:
            network: the model without its weights.
        """
        total = sum(parameter.numel() for parameter in network.parameters())
        return total, freeze(network, self.trained()[1]).trainable

    def scoring(
        self, folder: Path, tokenizer: Any, languages: Sequence[str], model_config: Any
    ) -> list[ValidationCallback]:
        """What scores the held-out text that the settings name, and writes the scores to the folder."""
        validation = getattr(self, "validation", None)
        if validation is None or not validation.texts:
            return []
        if tokenizer is None:
            raise InputError("validation names held-out text: pass the tokenizer as processing_class.")
        path = folder / VALIDATION
        return [ValidationCallback(validation, tokenizer, path, self.block_size, languages, model_config)]

    def make_trainer(self, network: Any, packed: PackedText, callbacks: list[Any]) -> Any:
        """The Trainer of a loaded model."""
        return self.trainer_class(network, self, train_dataset=packed, callbacks=callbacks)

    def to_write(self, folder: Path, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """The weights to write, from the whole weights of a finished training; on the first rank."""
        return weights

    def pack(self, texts: Mapping[str, Dataset], tokenizer: Any, model_config: Any, whole: bool = False) -> PackedText:
        """Blocks of the stage's text.

        Args:
            texts: documents of each language (column `text`); for an encoder-decoder, sentence pairs to and from it.
            model_config: configuration of the expanded model, whose history orders the languages.
            whole: take all of the text, whatever the settings take of a training's.
        """
        old, new = Facts(model_config).languages
        texts = {code: texts[code] for code in (*old, *new) if code in texts}
        amounts = {} if whole else self.amounts(texts, model_config)
        if model_config.is_encoder_decoder:
            return pack_pairs(texts, tokenizer, self.block_size, self.seed, languages=[*old, *new], **amounts)
        groups = self.block_groups(texts, model_config)
        if groups is not None and whole:  # of some languages alone
            groups = [group for group in groups if {*group} & {*texts}]
        return pack_texts(
            texts, tokenizer, self.block_size, self.seed, languages=[*old, *new], groups=groups,
            num_proc=self.dataset_num_proc, **amounts,
        )  # fmt: skip

    def amounts(self, texts: Mapping[str, Dataset], model_config: Any) -> dict[str, Any]:
        """The amount of text to take of each language: arguments of `pack_texts`."""
        return {"tokens_per_language": getattr(self, "tokens_per_language", None)}

    def block_groups(self, texts: Iterable[str], model_config: Any) -> list[list[str]] | None:
        """Languages that may share a block; None for all."""
        return None

    def groups_of_languages(self, languages: Sequence[str], model_config: Any) -> list[int] | None:
        """The group of each language, if a batch must hold only one group."""
        return None

    def mix(self, packed: PackedText, model_config: Any) -> LanguageMix | None:
        """The weights and schedule of languages; None for shuffled rows."""
        return None

    @classmethod
    def language_classes(cls, model_config: Any, languages: Sequence[str]) -> list[int] | None:
        """The class of each language for the losses: 0 for the base model's languages, g for those of expansion g."""
        classes = Facts(model_config).history.classes
        return [classes.get(code, 0) for code in languages]

    def router_losses(self) -> list[RouterLoss]:
        """The losses whose coefficients are fields of the configuration, in the order of the fields, then those of
        `losses`. A field of the loss itself, such as `GateBudgetLoss.gate_budget`, takes the value of the stage's field
        of this name."""
        losses, types = [], self.keyword_types()
        for name in own_fields(type(self)):
            for loss in getattr(types[name], "__metadata__", ()):
                if not (isinstance(loss, type) and issubclass(loss, RouterLoss)):
                    continue
                if (coef := getattr(self, name)) or loss.logged_at_zero:
                    others = [f.name for f in fields(loss) if f.name != "coef" and f.name in types]
                    losses.append(loss(coef, **{other: getattr(self, other) for other in others}))
        named: Any = self.losses or {}
        return losses + [extensions("losses")[name](coef) for name, coef in named.items()]


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return {**typing.get_type_hints(cls), "output_dir": str | os.PathLike | None}


def own_fields(cls: Any) -> dict[str, Any]:
    """The fields that a stage declares with `setting`, by name; those of the library last."""
    declared = [f for f in fields(cls) if isinstance(f.metadata.get("help"), Help)]
    return {f.name: f for f in sorted(declared, key=lambda f: f.name in TrainingArguments.__dataclass_fields__)}
