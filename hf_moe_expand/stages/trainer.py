"""StageTrainer: a `transformers.Trainer` that freezes, packs, trains and records for a stage."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoint.facts import Facts
from ..checkpoint.records import StageRecord, add_stage, without_folders
from ..checkpoint.source import EXPANDED
from ..core.errors import DivergedError, InputError
from ..core.schema import checked, shown_value
from ..data.packing import PackedText, collate_blocks
from ..data.pairs import PairCollator
from ..trainers.freezing import FreezeReport, kept_rows
from ..trainers.log_lines import LogLines
from ..trainers.losses import checked_losses
from ..trainers.masking import mask_routing
from ..trainers.pieces import LogitsInPieces, is_large
from ..trainers.router_losses import RouterLossMixin
from ..trainers.samplers import CurriculumSampler, LanguageMix
from ..trainers.watching import without_compiler
from .config import StageConfig
from .own_data import OwnDataMixin
from .recording import Progress, SeenText
from .stopping import Stops
from .streaming import StreamMixin

_HALVES = (torch.bfloat16, torch.float16)


class StageTrainer(OwnDataMixin, StreamMixin, RouterLossMixin, Trainer):  # type: ignore[misc]
    """A stage's Trainer: freezes the parameters that the stage does not train, and trains with the stage's losses.

    The finished training is recorded in `model.config.expansions`:

        trainer = PostPretrainTrainer(model, PostPretrainConfig("out"), train_dataset=ds, processing_class=tokenizer)

    `train_dataset` holds text (columns `text` and, if the model has several languages, `language`, a code for each row;
    for an encoder-decoder `translation`, sentences by language, in place of `text`) or packed blocks (`input_ids` and
    `language_ids`; id i is language i of the old languages followed by the new ones, as `pack_texts` numbers them).

    A model in bfloat16 or float16 trains in float32: small steps would round away. Afterwards it has its own types
    again, unless ranks share it out. The next-token loss of a large batch of a decoder is computed in pieces
    (`trainers/pieces.py`): it and its gradients are those of the whole batch, to rounding.

    Args:
        args: the stage's configuration, whose defaults are taken without it.
        eval_dataset: as `train_dataset`; all of its text is scored, in any of the model's languages. In a mapping
            `{"en": ..., "el": ...}` a language's code says the language of rows without one.
        processing_class: the tokenizer that packs text.
        router_losses: losses in place of those of the configuration.
        language_classes: the class of each language id; by default 0 for a base language, g for one of expansion g.
        allow_lost_text: train on text of which the tokenizer loses more than 2 %, too.

    Raises:
        InputError: an argument, a data set or the model does not fit the stage.
        DivergedError: the loss or the gradient is not finite.
    """

    stage: ClassVar[type[StageConfig]]
    needs_languages: ClassVar[bool] = False  # whether each row must say its languages, whatever the losses
    packed: PackedText | None = None  # the text on which it trains, if known
    record: StageRecord | None = None  # for the history, after the training
    _pieces: LogitsInPieces | bool | None = False  # False until the first batch that is large enough
    _steps_of_rows = False  # whether passes over the rows say the steps

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "stage" in vars(cls):
            cls.stage.trainer_class = cls

    @checked
    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        router_losses: Any = None,
        language_classes: Sequence[int] | None = None,
        allow_lost_text: bool = False,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
    ) -> None:
        config, model = self._config(args), without_compiler(model)
        self.args = config  # for what is done before the library's constructor
        self.trained_as, self.trained_parts = config.trained()
        self.freeze_report = self._freeze(model)
        config.check_model(model.config)
        self.settings, self.masking = config.recorded(), getattr(config, "masking", None)
        self.allow_lost_text, self.processing_class, self.model_config = allow_lost_text, processing_class, model.config
        self.router_losses = checked_losses(config.router_losses() if router_losses is None else router_losses)
        self._own_collator, self._own_classes = data_collator is not None, language_classes is not None
        scores = train_dataset is not None and not getattr(train_dataset, "is_of_stage", False)
        self.mix: LanguageMix | None = None
        if train_dataset is not None:
            train_dataset, language_classes = self._prepared(train_dataset, language_classes)
        if eval_dataset is not None:
            eval_dataset = self._scored(eval_dataset, language_classes)
        self._begin_steps(config)
        self._use_cache_before = getattr(model.config, "use_cache", None)
        is_pairs = model.config.is_encoder_decoder
        collator = PairCollator(model.config.pad_token_id or 0) if is_pairs else collate_blocks
        super().__init__(
            model, config, data_collator or collator, train_dataset, eval_dataset, processing_class=processing_class,
            router_losses=self.router_losses, language_classes=language_classes,
            callbacks=None if callbacks is None else list(callbacks), compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics, preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            optimizers=optimizers, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )  # fmt: skip
        self._set_steps()
        self.stops = Stops(self)
        for callback in (SeenText(), self.stops):
            self.add_callback(callback)
        if scores:
            languages = list(self.packed.tokens if self.packed is not None else Facts(model.config).history.languages)
            for scoring in config.scoring(Path(str(config.output_dir)), processing_class, languages, model.config):
                self.add_callback(scoring)
        if self.is_world_process_zero() and self.freeze_report is not None:
            print(self.freeze_report)

    def shown(self, shows: bool) -> LogLines:
        return Progress(self, shows)

    def _config(self, args: Any) -> StageConfig:
        """The stage's configuration, set up for this machine; the caller's stays unchanged."""
        args = self.stage() if args is None else args
        if not isinstance(args, self.stage):
            raise InputError(f"args is {shown_value(args)}: pass {self.stage.__name__}(...), a TrainingArguments.")
        return args.begun()

    def _freeze(self, model: Any) -> FreezeReport | None:
        return self.args.freeze(model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """The library warns of tied weights, which a training checkpoint holds once."""
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", ())
        missing = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the library's; text is packed."""
        return super().evaluate(self._asked(eval_dataset, "eval_dataset"), *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """As the library's; text is packed."""
        return super().predict(self._asked(test_dataset, "test_dataset"), *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        if self.mix is None:
            return super()._get_train_sampler(train_dataset)
        training: Any = self.args
        rows = self.get_total_train_batch_size(training)
        if self.mix.entry is not None and training.max_steps <= 0:
            raise InputError("A curriculum needs max_steps, the number of its training steps: set it.")
        if training.max_steps <= 0 or self._steps_of_rows:  # one epoch of the sampler is the whole training
            self._steps_of_rows = True  # `auto_find_batch_size` asks again, with a smaller batch
            training.max_steps = math.ceil(training.num_train_epochs * sum(self.mix.rows) / rows)
        batch = 1 if self.mix.groups is None else self._train_batch_size
        return CurriculumSampler(self.mix, training.max_steps, rows, training.data_seed, batch)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        if self.state.global_step >= self.state.max_steps:  # resumed from the last step's checkpoint
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _languages(self) -> int:
        return super()._languages() if self.packed is None else len(self.packed.languages)

    @property
    def seen(self) -> SeenText:
        """The text that passed; `restore_callback_states_from_checkpoint` puts another object there."""
        return next(one for one in self.callback_handler.callbacks if isinstance(one, SeenText))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.stops.is_last and self.state.best_model_checkpoint:
            self.args.save_total_limit = None  # with a limit of one the library keeps the best checkpoint alone
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.stops.is_last and self.stops.saved_step != self.state.global_step:  # `save_strategy="best"` did not
            self._save_checkpoint(self.model, trial=None)  # type: ignore[arg-type]
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _count_step(self, counts: torch.Tensor) -> None:
        self.seen.add(counts)
        super()._count_step(counts)

    @contextmanager
    def asking(self, inputs: Mapping[str, Any], as_in_training: bool = False) -> Iterator[None]:
        with (
            super().asking(inputs, as_in_training),
            mask_routing(self.accelerator.unwrap_model(self.model), self.masking),
        ):
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
        """Whether a batch of a decoder is large, and nothing forbids to compute it in pieces."""
        ids, training = inputs.get("input_ids"), self.args
        config = self.accelerator.unwrap_model(model).config
        if ids is None or inputs.get("labels") is None or config.is_encoder_decoder:
            return False
        if not is_large(ids.numel(), config.get_text_config().vocab_size or 0) or self.compute_loss_func is not None:
            return False
        split = self.is_fsdp_enabled or self.is_deepspeed_enabled or getattr(training, "distributed_config", None)
        fused = training.use_liger_kernel and config.model_type not in EXPANDED  # Liger has kernels for dense types
        if split or fused or training.torch_compile or training.label_smoothing_factor:
            return False
        return all(loss.in_pieces for loss in self.router_losses if loss.needs_outputs)

    def after_backward(self, loss: torch.Tensor) -> None:
        self._check_finite("loss", loss.item(), self.state.global_step + 1)
        for router, rows in self._kept_rows():
            if router.weight.grad is not None:
                router.weight.grad[:rows] = 0

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        kept = {id(router.weight) for router, _ in self._kept_rows()}
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            if group.get("weight_decay") and any(id(parameter) in kept for parameter in group["params"]):
                raise InputError("optimizers: weight decay would move rows of routers that stay: give them none.")
        return super().create_optimizer(*args, **kwargs)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """As the library's; routers of which some rows stay have no weight decay."""
        kept = {id(router.weight) for router, _ in self._kept_rows()}
        names = {name for name, parameter in model.named_parameters() if id(parameter) in kept}
        return [name for name in super().get_decay_parameter_names(model) if name not in names]

    def _kept_rows(self) -> list[tuple[Any, int]]:
        model = self.accelerator.unwrap_model(self.model)
        return kept_rows(model, self.trained_parts) if hasattr(model, "expanded_ffns") else []

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
        if self.stream is not None and self.state.max_steps > 0:  # the library counts from the last interruption
            self.state.epoch = self.state.global_step / self.state.max_steps
        super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, and adds the stage to the history in `model.config`. SIGINT, SIGTERM and SIGHUP finish the step and
        save it first (`stages/stopping.py`)."""
        if self.train_dataset is None:
            raise InputError("train_dataset is None: give the Trainer a data set to train on.")
        self._go_on_from(kwargs.get("resume_from_checkpoint") or next(iter(args), None))
        limit = self.args.save_total_limit
        try:
            with self._in_float32(), self.stops.caught():
                result = super().train(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
            if self._use_cache_before is not None:
                # The library sets it to false, and a saved model would generate slowly.
                self.accelerator.unwrap_model(self.model).config.use_cache = self._use_cache_before
        if self.packed is not None and self.stream is not None:
            seen = {code: counts["seen"] for code, counts in self._passed().items()}
            documents, tokens = ({code: of.get(n, 0) for code, of in seen.items()} for n in ("documents", "tokens"))
            self.packed = replace(self.packed, documents=documents, tokens=tokens)
        packed = self.packed
        steps = self._step_of_best(result.global_step)
        # Validation affects neither the weights nor the history.
        settings = {name: value for name, value in self.settings.items() if name != "validation"}
        self.record = StageRecord(
            stage=self.trained_as, steps=steps, documents={} if packed is None else packed.documents,
            tokens={} if packed is None else packed.tokens, seed=self.args.seed,
            settings=without_folders(settings), **self.seen.recorded([] if packed is None else packed.languages),
        )  # fmt: skip
        add_stage(self.accelerator.unwrap_model(self.model).config, self.record)
        return result

    def _step_of_best(self, last: int) -> int:
        """The step whose weights the model has: the last one, or an earlier one that was loaded as the best. What was
        seen is then counted up to there."""
        best, folder = self.state.best_global_step, self.state.best_model_checkpoint
        if not self.args.load_best_model_at_end or best is None or folder is None or best == last:
            return last
        state = TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME))
        self.seen.on_train_begin(self.args, state, self.control)
        return best

    @contextmanager
    def _in_float32(self) -> Iterator[None]:
        """Inside, weights of two bytes are float32; afterwards of their own types again, unless FSDP has split them."""
        model = self.accelerator.unwrap_model(self.model)
        split = self.is_deepspeed_enabled or getattr(self.args, "distributed_config", None)
        halves = {p: p.dtype for p in model.parameters() if p.dtype in _HALVES and not split}
        own = getattr(model.config, "dtype", None)
        if halves and self.is_world_process_zero():
            print(f"{self.trained_as}: the model is {own}; it trains in float32, as small steps would round away")
        for parameter in halves:
            parameter.data = parameter.data.float()
        try:
            yield
        finally:
            if halves and not self.is_fsdp_enabled:
                for parameter, dtype in halves.items():
                    parameter.data, parameter.grad = parameter.data.to(dtype), None
                model.config.dtype = own
