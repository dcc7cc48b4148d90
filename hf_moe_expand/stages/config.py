"""The configuration of a stage that trains: its fields, and what it does.

`__post_init__` refuses what the fields alone tell, `check` what model and text tell, `begun` what the machine tells.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import torch
from datasets import Dataset
from pydantic import Field, PlainValidator
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import SaveStrategy, SchedulerType
from transformers.utils import is_liger_kernel_available

from ..checkpoint.facts import Facts
from ..checkpoint.source import load_expanded_config
from ..core.errors import InputError, errors_at, library_errors_at
from ..core.extensions import extensions
from ..core.recipe_paths import Located, unset_variable
from ..core.schema import MOST, Coefficient, Count, Flag, Number, Positive, Schema, Text, Whole
from ..data.curriculum import Curriculum
from ..data.packing import PackedText, pack_texts
from ..data.pairs import check_pairs, pack_pairs
from ..data.sources import LanguageText
from ..data.stream_reader import OnBadShard
from ..evaluation.validation import VALIDATION, ValidationCallback, validation_sources
from ..inference.models import check_block_size, longest_block
from ..trainers.freezing import FreezeReport, Trained, freeze
from ..trainers.losses import RouterLoss
from ..trainers.masking import check_masking
from ..trainers.router_losses import check_arguments
from ..trainers.samplers import LanguageMix
from .keywords import CheckedArguments, known_losses, mapping, own_fields, plain, setting
from .kind import Stage
from .streaming import STREAMED, is_streamed

BlockSize = Annotated[Whole, Field(ge=2)]
ReplayShare = Annotated[Number, Field(gt=0, lt=1)] | None
REPLAY_SHARE = "share of all tokens that the old languages have, each the same; all of their text by default"

_NOT_FROZEN = "has no frozen expert for old languages to return to"
REFUSED = {("dmoe", stage): _NOT_FROZEN for stage in ("review", "distillation")}
_FEW_STEPS = 100  # that are done again without much loss
_CHOOSE_MODULES = ("galore", "apollo", "lomo", "adalomo")  # optimizers, of the modules of the model


class ValidationSettings(Schema):
    """Held-out text that is scored during a stage."""

    texts: dict[Text, Located] = Field(default_factory=dict, description="language: held-out text")
    every: Count = Field(50, description="steps between two scores; the model is scored at the end too")
    max_tokens: Annotated[Whole, Field(ge=2)] | None = Field(
        20_000, description="maximum of tokens to score of each language"
    )


Validation = Annotated[ValidationSettings | str | None, mapping(ValidationSettings)]


@dataclass
class StageConfig(CheckedArguments, Stage):
    """A stage that trains: its settings are fields, and its losses stand in their types.

    Every argument of `TrainingArguments` works. `use_cpu` is true where there is no accelerator, and
    `dataloader_num_workers` 2 for a stream and else 0.

    Raises:
        InputError: a field has another type, is out of range, or contradicts another field.
    """

    trains: ClassVar[Trained]  # the parts of the model that it trains
    trainer_class: ClassVar[Any] = None  # set where the Trainer is defined

    logging_steps: float = 10
    save_total_limit: int | None = 1
    report_to: None | str | list[str] = "none"  # noqa: RUF036 (HfArgumentParser reads this order alone)
    seed: int = 0
    use_cpu: bool | None = None  # type: ignore[assignment]
    dataloader_num_workers: int | None = None  # type: ignore[assignment]
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

    def _check_arguments(self) -> None:
        super()._check_arguments()
        for other in self._unlike("max_steps", "num_train_epochs", "curriculum") if self.tokens is not None else ():
            raise InputError(f"tokens and {other} both say how long the training is: leave one of them out.")

    def trained(self) -> tuple[str, Trained]:
        """Its name in a history, and the parts of the model that train."""
        return self.name, self.trains

    @classmethod
    def languages(cls, settings: Any, old: Iterable[str], new: Iterable[str]) -> list[str]:
        return list(new)

    def check(
        self,
        model: Any,
        texts: Mapping[str, Any] | None,
        packed: bool = False,
        offline: bool = False,
        tokenizer: Any = None,
    ) -> list[str]:
        """Refuses what the model and the text tell: a Trainer calls it before it trains, `validate` before anything
        runs. Returns what there is to say, one line each.

        Args:
            model: configuration of the model that trains.
            texts: text of each language, a `LanguageText` or a data set; None where no language is known.
            packed: the text is in blocks already.
            offline: skip what needs an absent file, with a line that says so.
            tokenizer: of an encoder-decoder, to check its held-out text.
        """
        self.check_model(model)
        if texts and not packed:
            old, new = self.known_languages(model, texts)
            if unknown := sorted({*texts} - {*old, *new}):
                raise InputError(
                    f"{', '.join(unknown)}: not a language of this expansion (old: {', '.join(old) or 'none'}; new: "
                    f"{', '.join(new) or 'none'}). Languages are set by the plan (--old and --new of `plan`)."
                )
        _check_libraries(self)
        check_arguments(self, model.is_encoder_decoder)
        if self.tokens is not None and model.is_encoder_decoder:
            raise InputError("tokens: counts the tokens of blocks, but an encoder-decoder reads pairs: give max_steps.")
        self.check_settings(model)
        lines = [] if texts is None else self.check_texts(model, texts)
        check_masking(getattr(self, "masking", None), model)
        if not packed:
            is_streamed(self, texts or {}, model)
            check_block_size(self.block_size, longest_block(model))
        saves = self.save_strategy != SaveStrategy.NO or self.distributed_config
        if not saves and not 0 < self.max_steps <= _FEW_STEPS:
            lines.append('save_strategy is "no": after an interruption the stage starts anew')
        return lines + self._check_files(model, texts, offline, tokenizer)

    def _check_files(self, model: Any, texts: Iterable[str] | None, offline: bool, tokenizer: Any) -> list[str]:
        """Refuses missing files: of held-out text, of a curriculum, of DeepSpeed; says what it skips."""
        validation = getattr(self, "validation", None)
        held_out = {} if validation is None else validation_sources(validation)
        named = [*(text.source for text in held_out.values()), getattr(self, "curriculum", None)]
        if offline and (unset := next(filter(None, map(unset_variable, filter(None, named))), None)):
            return [f"skipped: {unset} is not set"]
        for code, source in held_out.items():
            with errors_at(f"validation.texts.{code}"):
                if model.is_encoder_decoder and tokenizer is not None:
                    check_pairs(source, tokenizer)
                else:
                    source.check()
        if texts is not None:
            self.order(list(texts))
        file = self.deepspeed
        if not isinstance(file, str) or not Path(file).suffix or Path(file).is_file():
            return []
        if offline:
            return [f"skipped: deepspeed: {file} is not on this machine"]
        raise InputError(f"deepspeed: {file}: no such file: give DeepSpeed's settings, or their file.")

    def check_settings(self, model: Any) -> None:
        """Refuses settings that contradict the model, whatever the text."""

    def check_texts(self, model: Any, texts: Mapping[str, Any]) -> list[str]:
        """Refuses text in other languages than the stage's, missing text, and settings that contradict it; returns what
        else there is to say, one line each."""
        if not texts:
            raise InputError("No text was given: name files with --data.")
        return []

    def order(self, languages: Sequence[str]) -> Curriculum | None:
        """The curriculum by which these languages enter; None without one."""
        return None

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
            raise InputError(f"The checkpoint has no language groups: `train {cls.name}` is for those of a dmoe plan.")
        raise InputError(f"This is a DMoE checkpoint, which {_NOT_FROZEN}: use `train group`, `joint` or `adapt`.")

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
        """The number of parameters in a training checkpoint, and of those among them that train, of a model without its
        weights."""
        self.freeze(network)
        parameters = list(network.parameters())
        return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)

    def freeze(self, network: Any) -> FreezeReport | None:
        """Freezes the parameters that the stage does not train."""
        name, trained = self.trained()
        return freeze(network, trained, name)

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
        """The losses whose coefficients are fields, in the order of the fields, then those of `losses`. A field of the
        loss itself, such as `GateBudgetLoss.gate_budget`, takes the value of the stage's field of this name."""
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


def _check_libraries(config: StageConfig) -> None:
    """Refuses reporters, kernels, an optimizer and a schedule that are not installed, or do not take their arguments:
    makes those of a single weight, as the Trainer will."""
    with library_errors_at("report_to"):
        for integration in get_reporting_integration_callbacks(config.report_to):
            integration()  # raises if its library is not installed
    if config.use_liger_kernel and not is_liger_kernel_available():
        raise InputError("use_liger_kernel: the package liger-kernel is not installed (pip install liger-kernel).")
    if plain(config.optim).startswith(_CHOOSE_MODULES):
        try:
            with library_errors_at("optim", ImportError):
                Trainer.get_optimizer_cls_and_kwargs(config)
        except InputError:
            raise
        except Exception:  # it asks for the model
            pass
        return
    weight = torch.nn.Parameter(torch.zeros(1))
    with library_errors_at("optim"):
        kind, options = Trainer.get_optimizer_cls_and_kwargs(config)
        optimizer = kind([{"params": [weight], "weight_decay": config.weight_decay}], **options)
    with library_errors_at("lr_scheduler_type"):
        warmup, given = config.get_warmup_steps(1000), cast(dict[str, Any] | None, config.lr_scheduler_kwargs)
        get_scheduler(config.lr_scheduler_type, optimizer, warmup, 1000, given)
