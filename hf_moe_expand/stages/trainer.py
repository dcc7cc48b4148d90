"""StageTrainer: a `transformers.Trainer` that freezes, packs, trains and records for a stage."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.compute as pc
import torch
from datasets import Dataset
from pyarrow import types
from torch.utils.data import Sampler
from transformers import Trainer

from ..checkpoint.local import EXPANDED
from ..checkpoint.records import History, StageRecord, add_stage, without_folders
from ..checkpoint.source import text_config
from ..core.errors import DivergedError, InputError
from ..data.packing import PackedText, collate_blocks
from ..data.pairs import PairCollator, pairs_of
from ..trainers.freezing import EVERYTHING, FreezeReport, Trained, freeze
from ..trainers.masking import Masking, check_conditional_gate, mask_routing
from ..trainers.pieces import LogitsInPieces, is_large
from ..trainers.router_losses import RouterLossMixin
from ..trainers.samplers import CurriculumSampler, LanguageMix
from .config import StageConfig, languages_of
from .mixing import is_mixed
from .prepare import prepare
from .recording import Progress, SeenText, took_away_usual


class StageTrainer(RouterLossMixin, Trainer):  # type: ignore[misc]
    """A stage's Trainer: freezes the parameters that the stage does not train, and trains with the stage's losses.

    With the stage's own configuration as `args`, all other arguments follow from it, and the finished training is
    recorded in `model.config.expansions`:

        trainer = PostPretrainTrainer(model, PostPretrainConfig("out"), train_dataset=ds, processing_class=tokenizer)

    `train_dataset` holds text (columns `text` and, if the model has several languages, `language`, a code for each row;
    for an encoder-decoder `translation`, sentences by language, in place of `text`) or packed blocks (`input_ids` and
    `language_ids`; id i is language i of the old languages followed by the new ones, as `pack_texts` numbers them).

    Args:
        router_losses: losses in place of those of the configuration.
        language_classes: the class of each language id; by default 0 for a base language, g for one of expansion g.
        everything: train all parameters.
        mix: the rows of each language, and its weight and schedule; by default rows are shuffled.
        masking: the masking during training.
        allow_lost_text: train on text of which the tokenizer loses more than 2 %, too.

    The next-token loss of a large batch of a decoder is computed in pieces (`trainers/pieces.py`): it and its gradients
    are those of the whole batch, to rounding.

    Attributes:
        packed: the packed text on which it trains, if known.
        trained_as: the training's name in the history.
        settings: the stage's settings as its history has them; None if the arguments are no stage's.
        record: the training's record for the history, after the training.

    Raises:
        InputError: the data set has other columns or languages, or lacks a language; or gate masking is set, but the
            model has no gates.
        DivergedError: the loss or the gradient is not finite.
    """

    stage: ClassVar[type[StageConfig]]
    packed: PackedText | None = None
    settings: dict[str, Any] | None = None
    record: StageRecord | None = None
    _pieces: LogitsInPieces | bool | None = False  # False until the first batch that is large enough

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "stage" in vars(cls):
            cls.stage.trainer_class = cls

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *,
        processing_class: Any = None,
        router_losses: Any = None,
        language_classes: Sequence[int] | None = None,
        everything: bool = False,
        mix: LanguageMix | None = None,
        masking: Masking | None = None,
        allow_lost_text: bool = False,
        **kwargs: Any,
    ) -> None:
        self.allow_lost_text = allow_lost_text
        args = copy.copy(args)  # the caller's stays unchanged
        config = args if isinstance(args, self.stage) else None
        name, trained = config.trained() if config else (self.stage.name, self.stage.trains)
        self.trained_as = "everything" if everything else name
        self.freeze_report = self._freeze(model, EVERYTHING if everything else trained)
        if config is not None:
            self.settings = config.recorded()
            router_losses = config.router_losses() if router_losses is None else router_losses
            masking = getattr(config, "masking", None) if masking is None else masking
        elif router_losses is None:
            router_losses = self.stage.of_keywords().router_losses()
        own_text = train_dataset is not None and not isinstance(train_dataset, PackedText)
        if train_dataset is not None:
            train_dataset, mix, language_classes = self._prepared(
                model, config, train_dataset, processing_class, mix, language_classes
            )
            _check_ids(train_dataset, model.config)
        if masking is not None:
            check_conditional_gate(masking, model.config.conditional_routing)
        self.mix, self.masking = mix, masking
        self._use_cache_before = getattr(model.config, "use_cache", None)
        pairs = model.config.is_encoder_decoder
        collator = PairCollator(model.config.pad_token_id or 0) if pairs else collate_blocks
        super().__init__(
            model, args, data_collator or collator, train_dataset, processing_class=processing_class,
            router_losses=router_losses, language_classes=language_classes, **kwargs,
        )  # fmt: skip
        self.seen = SeenText()
        self.add_callback(Progress(self, shows=took_away_usual(self)))
        self.add_callback(self.seen)
        if config is not None and own_text:
            languages = list(self.packed.tokens if self.packed is not None else History.of(model.config).languages)
            for scoring in config.scoring(Path(str(args.output_dir)), processing_class, languages, model.config):
                self.add_callback(scoring)
        if self.is_world_process_zero() and self.freeze_report is not None:
            print(self.freeze_report)

    def _freeze(self, model: Any, trained: Trained) -> FreezeReport | None:
        """Freezes what does not train; None if that is done already."""
        return freeze(model, trained, self.trained_as)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """The library warns of tied weights, which a training checkpoint holds once."""
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", ())
        missing = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    # --- data -----------------------------------------------------------------------------------------------------

    def _prepared(
        self,
        model: Any,
        config: StageConfig | None,
        data: Any,
        tokenizer: Any,
        mix: LanguageMix | None,
        classes: Sequence[int] | None,
    ) -> tuple[Any, LanguageMix | None, Sequence[int] | None]:
        """The data set in blocks, the languages' weights and schedule, and their classes."""
        columns = set(getattr(data, "column_names", None) or ())
        if isinstance(data, PackedText):
            self.packed = data
        elif {"text", "translation"} & columns:
            self.packed = self._packed(model, config, data, tokenizer)
        if self.packed is None:
            if is_mixed(config):
                raise InputError(
                    "train_dataset is packed already, but a temperature or a curriculum draws each language on its "
                    "own: pass text, or what `pack_texts` returned."
                )
            if config is not None and classes is None and "language_ids" in columns:
                old, new = languages_of(model.config)
                classes = self.stage.language_classes(model.config, [*old, *new])
            return data, mix, classes
        if config is not None and mix is None:
            mix = config.mix(self.packed, model.config)
        if classes is None:
            classes = self.stage.language_classes(model.config, self.packed.languages)
        return self.packed.dataset, mix, classes

    def _packed(self, model: Any, config: StageConfig | None, data: Dataset, tokenizer: Any) -> PackedText:
        if config is None or tokenizer is None:
            raise InputError(
                f"train_dataset holds text: pass {self.stage.__name__}(...) as args, which sets the "
                "packing, and the tokenizer as processing_class."
            )
        old, new = languages_of(model.config)
        texts = _by_language(data, old, new, model.config.is_encoder_decoder)
        config.check_model(model.config)
        prepared = prepare(config, model.config, texts)
        with config.main_process_first(desc="pack"):
            return prepared.pack(tokenizer, self.allow_lost_text)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        if self.mix is None:
            return super()._get_train_sampler(train_dataset)
        training = self.args
        rows = self.get_total_train_batch_size(training)
        if self.mix.entry is not None and training.max_steps <= 0:
            raise InputError("A curriculum needs max_steps, the number of its training steps: set it.")
        if training.max_steps <= 0:  # one epoch of the sampler is the whole training
            training.max_steps = math.ceil(training.num_train_epochs * sum(self.mix.rows) / rows)
        batch = 1 if self.mix.groups is None else self._train_batch_size
        return CurriculumSampler(self.mix, training.max_steps, rows, training.seed, batch)

    # --- training -------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        if self.state.global_step >= self.state.max_steps:  # resumed from the last step's checkpoint
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _languages(self) -> int:
        return super()._languages() if self.packed is None else len(self.packed.languages)

    def _count_step(self, counts: torch.Tensor) -> None:
        self.seen.add(counts)
        super()._count_step(counts)

    @contextmanager
    def asking(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        with super().asking(inputs), mask_routing(self.accelerator.unwrap_model(self.model), self.masking):
            yield

    def next_token_loss(self, model: Any, inputs: dict, return_outputs: bool, num_items_in_batch: Any) -> Any:
        if not model.training or not self._is_large(model, inputs):
            return super().next_token_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._pieces is False:
            self._pieces = LogitsInPieces.of(self.accelerator.unwrap_model(model), self.accelerator.autocast)
        pieces = self._pieces
        if not isinstance(pieces, LogitsInPieces):
            return super().next_token_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        with pieces.head_inputs() as hidden_states:
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        outputs.in_pieces, outputs.hidden_of_head = pieces, hidden_states[0]
        loss = pieces.next_token_loss(hidden_states[0], labels, num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:  # as in Trainer.compute_loss
            ranks = self.accelerator.num_processes // self.get_tp_size()
            loss = loss * (ranks if self.args.n_gpu <= 1 else self.args.n_gpu)
        return (loss, outputs) if return_outputs else loss

    def _is_large(self, model: Any, inputs: dict) -> bool:
        """Whether a batch of a decoder is large, and nothing forbids to compute them in pieces."""
        ids, training = inputs.get("input_ids"), self.args
        config = self.accelerator.unwrap_model(model).config
        if ids is None or inputs.get("labels") is None or config.is_encoder_decoder:
            return False
        vocabulary = config.get_text_config().vocab_size or 0
        if not is_large(ids.numel(), vocabulary) or self.compute_loss_func is not None:
            return False
        split = self.is_fsdp_enabled or self.is_deepspeed_enabled or getattr(training, "distributed_config", None)
        fused = training.use_liger_kernel and config.model_type not in EXPANDED  # Liger has kernels for dense types
        if split or fused or training.torch_compile or training.label_smoothing_factor:
            return False
        return all(loss.in_pieces for loss in self.router_losses if loss.needs_outputs)

    def after_backward(self, loss: torch.Tensor) -> None:
        self._check_finite("loss", loss.item(), self.state.global_step + 1)

    def _check_finite(self, what: str, value: float, step: int) -> None:
        """Refuses a loss or a gradient that is not finite."""
        if not math.isfinite(value):
            raise DivergedError(
                f"{self.trained_as}: the {what} is {value} at step {step}: the training diverged, and no checkpoint is "
                "written. Lower the learning rate, add warmup steps, or train in bf16 instead of fp16."
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        norm = logs.get("grad_norm")
        if norm is not None and not self.args.fp16:  # fp16's scaler skips such a step
            self._check_finite("norm of the gradient", norm, self.state.global_step)
        super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, and adds the stage to the history in `model.config` if its configuration is known."""
        try:
            result = super().train(*args, **kwargs)
        finally:
            if self._use_cache_before is not None:
                # The library sets it to false, and a saved model would generate slowly.
                self.accelerator.unwrap_model(self.model).config.use_cache = self._use_cache_before
        if self.settings is not None:
            packed = self.packed
            # Validation affects neither the weights nor the history.
            settings = {name: value for name, value in self.settings.items() if name != "validation"}
            self.record = StageRecord(
                stage=self.trained_as, steps=result.global_step, documents={} if packed is None else packed.documents,
                tokens={} if packed is None else packed.tokens, seed=self.args.seed,
                settings=without_folders(settings), **self.seen.recorded([] if packed is None else packed.languages),
            )  # fmt: skip
            add_stage(self.accelerator.unwrap_model(self.model).config, self.record)
        return result


def _check_ids(data: Any, config: Any) -> None:
    """Refuses text with tokens beyond the model's, which a tokenizer that was given in Python may have."""
    rows = getattr(text_config(config), "vocab_size", None)
    for name in ("input_ids", "labels"):
        column = data.data[name] if isinstance(data, Dataset) and name in data.column_names else None
        if column is None or rows is None or not types.is_list(column.type):
            continue
        largest = pc.max(pc.list_flatten(column)).as_py() or 0
        if largest >= rows:
            raise InputError(
                f"train_dataset holds token number {largest}, but the model has {rows} tokens: give the model's own "
                "tokenizer, or add the rows first (model.resize_token_embeddings(len(tokenizer)))."
            )


def _by_language(data: Dataset, old: Sequence[str], new: Sequence[str], pairs: bool) -> Mapping[str, Dataset]:
    """The texts of each language of a data set; with `pairs`, for an encoder-decoder, its sentence pairs."""
    column = "translation" if pairs else "text"
    if column not in data.column_names:
        raise InputError(
            f"train_dataset has no column `{column}`: "
            + (
                "an encoder-decoder learns from sentences by language, such as {'en': 'A word.', 'el': 'Μία λέξη.'}."
                if pairs
                else "a decoder learns from text; `LanguageText` makes text of translations."
            )
        )
    if "language" not in data.column_names:
        if len(new) != 1:
            raise InputError(
                f"train_dataset has no column `language`, but this expansion adds {', '.join(new) or 'no language'}: "
                "give each row its language's code."
            )
        return {new[0]: _column(data, column, new[0])}
    rows: dict[str, list[int]] = {}
    for number, code in enumerate(data["language"]):
        rows.setdefault(code, []).append(number)
    if unknown := sorted(str(code) for code in rows if code not in (*old, *new)):
        raise InputError(
            f"train_dataset has the unknown language {', '.join(unknown)}; known: {', '.join([*old, *new])}."
        )
    return {code: _column(data.select(rows[code]), column, code) for code in (*old, *new) if code in rows}


def _column(data: Dataset, column: str, language: str) -> Dataset:
    """A language's texts, or its sentence pairs."""
    return data.select_columns(["text"]) if column == "text" else pairs_of(data[column], language)
