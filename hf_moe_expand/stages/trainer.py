"""StageTrainer: a `transformers.Trainer` that freezes, packs, trains and records for a stage."""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from torch.utils.data import Sampler

from ..data.packing import PackedText, collate_blocks
from ..data.pairs import PairCollator, pairs_of
from ..errors import InputError
from ..records import History, add_stage
from ..trainers.freezing import EVERYTHING, FreezeReport, freeze
from ..trainers.masking import Masking, MaskingMixin
from ..trainers.router_losses import RouterLossMixin
from ..trainers.samplers import CurriculumSampler, LanguageMix
from .config import StageConfig, languages_of
from .mixing import is_mixed
from .prepare import prepare
from .recording import RecordingTrainer


class StageTrainer(MaskingMixin, RouterLossMixin, RecordingTrainer):  # type: ignore[misc]
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

    Raises:
        InputError: the data set has other columns or languages, or lacks a language; or the loss is not finite.
    """

    stage: ClassVar[type[StageConfig]]

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
        **others: Any,
    ) -> None:
        args = copy.copy(args)  # the caller's stays unchanged
        config = args if isinstance(args, self.stage) else None
        name, trained = config.trained() if config else (self.stage.name, self.stage.trains)
        self.trained_as = "everything" if everything else name
        self.freeze_report: FreezeReport = freeze(model, EVERYTHING if everything else trained, self.trained_as)
        if config is not None:
            self.settings = config.recorded()
            router_losses = config.losses() if router_losses is None else router_losses
            masking = getattr(config, "masking", None) if masking is None else masking
        elif router_losses is None:
            router_losses = self.stage.of_keywords().losses()
        own_text = train_dataset is not None and not isinstance(train_dataset, PackedText)
        if train_dataset is not None:
            train_dataset, mix, language_classes = self._prepared(
                model, config, train_dataset, processing_class, mix, language_classes
            )
        self.mix = mix
        pairs = model.config.is_encoder_decoder
        collator = PairCollator(model.config.pad_token_id or 0) if pairs else collate_blocks
        super().__init__(
            model, args, data_collator or collator, train_dataset, processing_class=processing_class,
            masking=masking, router_losses=router_losses, language_classes=language_classes, **others,
        )  # fmt: skip
        if config is not None and own_text:
            languages = list(self.packed.tokens if self.packed is not None else History.of(model.config).languages)
            for scoring in config.scoring(Path(str(args.output_dir)), processing_class, languages, model.config):
                self.add_callback(scoring)
        if self.is_world_process_zero():
            print(self.freeze_report)

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
            return prepared.pack(tokenizer)

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

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, and adds the stage to the history in `model.config` if its configuration is known."""
        result = super().train(*args, **kwargs)
        if self.record is not None:
            add_stage(self.accelerator.unwrap_model(self.model).config, self.record)
        return result


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
