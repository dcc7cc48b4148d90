"""Checks a stage before it trains: for `validate`, for `train_stage` and for the Trainers alike."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.training_args import OptimizerNames
from transformers.utils import is_liger_kernel_available

from ..core.errors import InputError, errors_at, first_line
from ..core.recipe_paths import unset_variable
from ..data.curriculum import Curriculum
from ..data.lost import check_lost
from ..data.packing import PackedText, amounts_of, first_tokens
from ..data.pairs import check_pairs, lost_of_each
from ..data.sources import LanguageText
from ..data.tokens import encode_documents, tokens_at_hand
from ..evaluation.validation import validation_sources
from ..inference.models import check_block_size, longest_block
from ..trainers.freezing import Trained
from ..trainers.masking import check_masking
from ..trainers.router_losses import CHECKPOINTING, NOT_REENTRANT
from .config import StageConfig
from .distributed import check_sharding
from .keywords import refused_by_the_library
from .mixing import is_mixed, read_curriculum
from .streaming import is_streamed, streamed

# Optimizers that choose among the modules of the model, which is not there yet.
_CHOOSE_MODULES = ("galore", "apollo", "lomo", "adalomo")
# Tokens that the beginning of each long text has at least; the characters for each token of a block below which a text
# may be less than a block.
_OF_BEGINNINGS, _SHORT = 10_000, 50
# Settings by which a review takes documents, whose tokens are not counted before.
_BY_DOCUMENTS = ("old_documents", "new_per_old", "fewer_documents")
# Fewer steps hardly teach anything; more passes over the text teach it by heart.
_TOO_FEW_STEPS, _MOST_PASSES = 50, 4
# Steps that are done again without much loss.
_FEW_STEPS = 100


@dataclass(frozen=True)
class Prepared:
    """A stage that may train.

    Attributes:
        name: its name in the history.
        trains: the parts of the model that train.
        texts: text of each language: a `LanguageText`, or a data set.
        model: configuration of the model.
        curriculum: the step at which each language enters; None without one.
        lines: what could not be checked, and what the settings mean.
    """

    config: StageConfig
    model: Any
    texts: Mapping[str, Any]
    name: str
    trains: Trained
    curriculum: Curriculum | None
    lines: Sequence[str]

    @property
    def streams(self) -> bool:
        """Whether it reads its text while it trains."""
        return is_streamed(self.config, self.texts, self.model)

    def pack(self, tokenizer: Any, allow_lost_text: bool = False) -> PackedText:
        """The text, read and in blocks, or as a stream of them; refused if the tokenizer loses much of it, unless that
        is allowed."""
        if self.streams:
            found = streamed(self.config, self.texts, tokenizer, self.model, allow_lost_text)
            return replace(found, is_of_stage=True)
        pairs = self.model.is_encoder_decoder
        loaded = {
            code: text.load(pairs) if isinstance(text, LanguageText) else text for code, text in self.texts.items()
        }
        check_lost(lost_of_each(loaded, tokenizer, pairs, self.config.seed), allow_lost_text)
        return replace(self.config.pack(loaded, tokenizer, self.model), is_of_stage=True)

    def check_enough(self, tokenizer: Any) -> None:
        """Refuses local text that is too little for one block, or has fewer tokens than asked for: packs the beginnings
        of short texts as training packs the texts."""
        pairs, config = self.model.is_encoder_decoder, copy.copy(self.config)
        if self.streams or not all(text.files() for text in self.texts.values()):
            return  # text that is not at hand is taken to be enough
        beginnings = {code: list(text.beginnings(pairs)) for code, text in self.texts.items()}
        rows = {code: [row for one in of for row in one.rows] for code, of in beginnings.items()}
        whole = [code for code, of in beginnings.items() if all(one.read == 1 for one in of)]
        all_whole = len(whole) == len(rows)
        wanted, counts = getattr(config, "tokens_per_language", None), getattr(config, "old_documents", None)
        share = getattr(config, "replay_share", None)
        replayed = config.amounts(self.texts, self.model).get("replay", ((), 0))[0] if wanted else ()
        for code in whole if wanted and not pairs else ():
            if code in replayed:  # its share is of the others' tokens
                continue
            first_tokens(code, map(len, encode_documents([row["text"] for row in rows[code]], tokenizer)), wanted)
        short = any(sum(len(str(row)) for row in rows[code]) < _SHORT * config.block_size for code in whole)
        some = counts or share
        if (some and not all_whole) or not (some or short or (wanted and wanted < config.block_size)):
            return
        if wanted and not all_whole:
            vars(config)["tokens_per_language"] = min(wanted, _OF_BEGINNINGS)
        config.pack({code: Dataset.from_list(of) for code, of in rows.items()}, tokenizer, self.model)

    def length(self, name: str, tokenizer: Any = None) -> list[str]:
        """About how many steps it has, passes over the text and tokens by language, as far as that is known; and a
        warning of few steps or many passes. Without a tokenizer, the text is not counted."""
        config, words, taken = self.config, list[str](), 0
        texts = {} if tokenizer is None else self.texts
        counts = {code: tokens_at_hand(text, tokenizer) for code, text in texts.items()}
        known = {code: count for code, count in counts.items() if count is not None}
        by_documents = any(getattr(config, name, None) for name in _BY_DOCUMENTS)
        if known and len(known) == len(counts) and not by_documents:
            taken = sum(amounts_of(known, **config.amounts(self.texts, self.model)).values())
        of_step = config.per_device_train_batch_size * config.block_size * config.gradient_accumulation_steps
        steps = config.max_steps if self.curriculum is None else self.curriculum.steps
        warnings = list[str]()
        if wanted := steps * of_step if steps > 0 else config.tokens or int(taken * config.num_train_epochs):
            steps = max(wanted // of_step, 1)
            words.append(f"about {steps:,} steps of {of_step:,} tokens")
            words += [f"passes over the text: {wanted / taken:.3g}"] if taken else []
            if steps < _TOO_FEW_STEPS:
                warnings.append(
                    f"warning: {name}: fewer than {_TOO_FEW_STEPS} steps hardly teach anything: take smaller ones "
                    "(gradient_accumulation_steps), or more tokens; `recipes new --tokens` chooses a batch and a rate"
                )
            if taken and wanted > _MOST_PASSES * taken:
                warnings.append(
                    f"warning: {name}: after more than {_MOST_PASSES} passes it learns the text by heart: give "
                    "more text, or train on fewer tokens"
                )
        if known:
            words.append(f"tokens at hand, about: {', '.join(f'{code} {count:,}' for code, count in known.items())}")
        return [*([f"{name}: {'; '.join(words)}"] if words else []), *warnings]


def prepare(
    config: StageConfig,
    model: Any,
    texts: Mapping[str, Any],
    key: str = "",
    offline: bool = False,
    tokenizer: Any = None,
) -> Prepared:
    """Checks a stage with its model and its text.

    Args:
        config: the stage's configuration, or the keywords that will make it (`StageConfig.of_keywords`).
        model: configuration of the model that trains: of a checkpoint, or of what a recipe plans.
        texts: text of each language: a `LanguageText`, or a data set.
        key: the stage's key in a recipe, which messages name.
        offline: skip checks that need an absent file.
        tokenizer: of an encoder-decoder, to check its held-out text.

    Raises:
        InputError: a setting contradicts the text, the model or another setting.
    """
    prefix = f"{key}." if key else ""
    old, new = config.known_languages(model, texts)
    if unknown := sorted({*texts} - {*old, *new}):
        raise InputError(
            f"{', '.join(unknown)}: not a language of this expansion (old: {', '.join(old) or 'none'}; new: "
            f"{', '.join(new) or 'none'}). Languages are set by the plan (--old and --new of `plan`)."
        )
    with errors_at(key):
        check_arguments(config, model.is_encoder_decoder)
        lines = config.check(model, texts)
        if config.stream:
            is_streamed(config, texts, model)
    check_masking(getattr(config, "masking", None), model, f"{prefix}masking")
    check_block_size(config.block_size, longest_block(model), f"{prefix}block_size")
    if config.given.get("save_strategy") == "no" and not 0 < config.max_steps <= _FEW_STEPS:
        lines.append('save_strategy is "no": after an interruption the stage starts anew')
    validation = getattr(config, "validation", None)
    held_out = {} if validation is None else validation_sources(validation)
    named = [*(text.source for text in held_out.values()), getattr(config, "curriculum", None)]
    if offline and (unset := next(filter(None, map(unset_variable, filter(None, named))), None)):
        lines = [*_at(key, lines), f"skipped: {key}: {unset} is not set"]
        return Prepared(config, model, texts, *config.trained(), None, lines)
    for code, source in held_out.items():
        with errors_at(f"{prefix}validation.texts.{code}"):
            if model.is_encoder_decoder and tokenizer is not None:
                check_pairs(source, tokenizer)
            else:
                source.check()
    file, skipped = config.deepspeed, list[str]()
    if isinstance(file, str) and Path(file).suffix and not Path(file).is_file():
        if not offline:
            raise InputError(f"{prefix}deepspeed: {file}: no such file: give DeepSpeed's settings, or their file.")
        skipped.append(f"skipped: {key}: deepspeed: {file} is not on this machine")
    curriculum = checked_order(config, list(texts), key) if is_mixed(config) else None
    return Prepared(config, model, texts, *config.trained(), curriculum, [*_at(key, lines), *skipped])


def _at(key: str, lines: Sequence[str]) -> list[str]:
    return [f"{key}: {line}" if key else line for line in lines]


def check_arguments(config: StageConfig, is_encoder_decoder: bool | None) -> None:
    """Refuses training arguments that would drop a gradient, and those that the library would refuse or misread only
    while it trains."""
    options = getattr(config, f"{CHECKPOINTING}_kwargs") or {}
    if not isinstance(options, Mapping):
        raise InputError(f"{CHECKPOINTING}_kwargs: expected `key: value` lines, found {options!r}.")
    if options.get("use_reentrant"):
        raise InputError(f"{CHECKPOINTING}_kwargs: {NOT_REENTRANT}")
    check_sharding(config.given)
    if config.label_smoothing_factor and is_encoder_decoder is False:
        # Of a decoder, Trainer would smooth the unshifted labels.
        raise InputError("label_smoothing_factor is not supported for decoders; set it to 0.")
    if config.tokens is not None:
        if is_encoder_decoder:
            raise InputError("tokens: counts the tokens of blocks, but an encoder-decoder reads pairs: give max_steps.")
        for other in ("max_steps", "num_train_epochs", "curriculum"):
            if config.given.get(other) in (None, -1):
                continue
            raise InputError(f"tokens and {other} both say how long the training is: leave one of them out.")
    if config.max_steps == 0 or (config.max_steps < 0 and not config.num_train_epochs):
        raise InputError("max_steps and num_train_epochs give no step: set one of them above 0.")
    reporters = [config.report_to] if isinstance(config.report_to, str) else config.report_to or []
    with refused_by_the_library("report_to: "):
        for integration in get_reporting_integration_callbacks(
            [one for one in reporters if one not in ("none", "all")]
        ):
            integration()  # raises if its library is not installed
    _check_optimizer(config)
    if config.use_liger_kernel and not is_liger_kernel_available():
        raise InputError("use_liger_kernel: the package liger-kernel is not installed (pip install liger-kernel).")
    if not config.is_built:
        _check_together(config)


def _check_together(config: StageConfig) -> None:
    """Tries the keywords on the library, which refuses unknown values and arguments that exclude one another. What only
    the machine that trains can tell is left to it."""
    here, launched = torch.accelerator.is_available(), "RANK" in os.environ
    left = {"tf32": here, "deepspeed": here and launched, "ddp_backend": launched}
    given = {name: value for name, value in config.given.items() if left.get(name, True)}
    config.of_keywords(**given).built("", 0)


def _check_optimizer(config: Any) -> None:
    """Makes the optimizer and the schedule of the learning rate of a single weight, as the Trainer will."""
    config = copy.copy(config)
    with refused_by_the_library("optim: "):
        vars(config)["optim"] = OptimizerNames(config.optim)
    if config.optim.value.startswith(_CHOOSE_MODULES):
        try:
            Trainer.get_optimizer_cls_and_kwargs(config)
        except ImportError as error:
            raise InputError(f"optim: {first_line(error)}") from None
        except Exception:  # it asks for the model
            pass
        return
    weight = torch.nn.Parameter(torch.zeros(1))
    with refused_by_the_library("optim: "):
        kind, options = Trainer.get_optimizer_cls_and_kwargs(config)
        optimizer = kind([{"params": [weight], "weight_decay": config.weight_decay}], **options)
    with refused_by_the_library("lr_scheduler_type: "):
        warmup = config.get_warmup_steps(1000)
        get_scheduler(config.lr_scheduler_type, optimizer, warmup, 1000, config.lr_scheduler_kwargs)


def checked_order(config: StageConfig, languages: Sequence[str], key: str = "") -> Curriculum | None:
    """The curriculum of a mixed stage; refuses arguments that contradict it, or the order of the batches."""
    given, at = config.given, f"{key}: " if key else ""
    accelerator = given.get("accelerator_config")
    if isinstance(accelerator, str):
        raise InputError(f"{at}accelerator_config: must be a mapping with a curriculum or a temperature.")
    if given.get("ignore_data_skip") or (accelerator or {}).get("split_batches"):
        raise InputError(
            f"{at}ignore_data_skip and split_batches cannot be used with a curriculum or a temperature, whose batches "
            "have an order; leave them out."
        )
    curriculum = read_curriculum(config, languages)
    if curriculum is None:
        return None
    if "num_train_epochs" in given or given.get("max_steps", curriculum.steps) != curriculum.steps:
        raise InputError(
            f"{config.curriculum} is for {curriculum.steps} steps, but {key or 'the configuration'} sets another "  # type: ignore[attr-defined]
            "length: leave max_steps and num_train_epochs out, or make the curriculum again with --steps."
        )
    return curriculum
