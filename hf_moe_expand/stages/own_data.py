"""The data sets that are given to a stage's Trainer: text, rows of tokens, or what `pack_texts` returned. Whatever the
form, the same settings hold, or are refused."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset

from ..checkpoint.facts import Facts
from ..core.errors import InputError, errors_at
from ..data.curriculum import Curriculum
from ..data.lost import check_lost
from ..data.packing import Blocks, PackedText
from ..data.pairs import lost_of_each
from ..trainers.samplers import LanguageMix
from ..trainers.watching import check_columns
from .data_sets import IN_BATCHES, by_language, check_rows, codes_of_rows, columns_of, is_text
from .mixing import is_mixed
from .prepare import packed_text
from .streaming import BY_DOCUMENTS

_PACKING = ("tokens_per_language", "replay_share", *BY_DOCUMENTS, "stream")


class OwnDataMixin:
    """Put in front of a Trainer that has a `StageConfig` as its arguments, `model_config` and `processing_class`."""

    packed: PackedText | None

    def _prepared(self: Any, data: Any, classes: Sequence[int] | None) -> tuple[Any, Sequence[int] | None]:
        """The data set in blocks, and its languages' classes; sets their weights and schedule."""
        config, model, name = self.args, self.model_config, "train_dataset"
        is_checked = isinstance(data, PackedText) and data.is_of_stage
        if isinstance(data, PackedText):
            self.packed = data if is_checked or classes is not None else self._numbered(data, name)
        elif is_text(columns := columns_of(data, name, self._own_collator)):
            texts, is_checked = self._texts(data, name), True
            config.check(model, texts)
            self._set_length(config.order(list(texts)))
            with config.main_process_first(desc="pack"):
                self.packed = packed_text(config, model, texts, self.processing_class, self.allow_lost_text)
        else:
            data = self._with_ids(data, columns, name)
            columns = columns_of(data, name, self._own_collator)
        if not is_checked:
            self._check_packed(data)
        if self.packed is not None:
            self.packed = replace(self.packed, is_of_stage=False)  # another Trainer may get it
            self.mix = config.mix(self.packed, model)
            if self.mix is None and self.stream is not None:
                groups = config.groups_of_languages(list(self.packed.tokens), model)
                self.mix = LanguageMix(self.packed.blocks, groups=groups)
            data = self.packed.dataset
            if classes is None:
                classes = self.stage.language_classes(model, self.packed.languages)
        elif is_mixed(config):
            raise InputError(
                "train_dataset is packed already, but a temperature or a curriculum draws each language on its own: "
                "pass text, or what `pack_texts` returned."
            )
        elif classes is None and "language_ids" in columns:
            classes = self.stage.language_classes(model, self._languages_of_model())
        self._check_rows(data, name, classes)
        return data, classes

    def _languages_of_model(self: Any) -> list[str]:
        """The languages that ids count: the old ones, then the new ones."""
        old, new = Facts(self.model_config).languages
        return [*old, *new]

    def _check_packed(self: Any, data: Any) -> None:
        """Refuses settings that contradict the model or text that was packed before."""
        config: Any = self.args
        if chosen := [name for name in _PACKING if getattr(config, name, None)]:
            raise InputError(
                f"train_dataset is packed already, but {chosen[0]} says what to pack: pass text, or leave "
                f"{chosen[0]} out."
            )
        blocks = data.dataset if isinstance(data, PackedText) else data
        size = blocks.block_size if isinstance(blocks, Blocks) else config.block_size
        if size != config.block_size != type(config).block_size:
            raise InputError(
                f"train_dataset is packed into blocks of {size} tokens, but block_size is {config.block_size}: leave "
                "it out."
            )
        texts = None
        if self.packed is not None:
            self._set_length(config.order(list(self.packed.tokens)))
            if self._has_history:
                texts = dict.fromkeys(code for code, tokens in self.packed.tokens.items() if tokens)
        config.check(self.model_config, texts, packed=True)

    def _set_length(self: Any, curriculum: Curriculum | None) -> None:
        """A curriculum's number of steps is that of the training."""
        if curriculum is not None:
            self.args.max_steps = curriculum.steps

    @property
    def _has_history(self: Any) -> bool:
        return bool(getattr(self.model_config, "expansions", None))

    def _numbered(self: Any, data: PackedText, name: str) -> PackedText:
        """Packed text whose language ids are those of the model's languages, where its history names them."""
        if not self._has_history:
            return data
        return data.numbered(self._languages_of_model(), name)

    def _with_ids(self: Any, data: Any, columns: Collection[str], name: str, language: str | None = None) -> Any:
        """Rows of tokens with the language that a column `language`, or the key of an evaluation, gives each."""
        if not self._own_collator:
            check_columns(columns, IN_BATCHES, name)
        is_asked = (language is not None and self._has_history) or "language" in columns
        if not (is_asked and isinstance(data, Dataset) and "input_ids" in columns) or "language_ids" in columns:
            return data
        known = self._languages_of_model()
        if "language" in columns:
            ids = [known.index(code) for code in codes_of_rows(data, known, name)]
        elif language in known:
            ids = [known.index(language)] * len(data)
        else:
            return data
        sizes = map(len, data["input_ids"])
        return data.add_column("language_ids", [[one] * size for one, size in zip(ids, sizes, strict=True)])

    def _texts(self: Any, data: Dataset, name: str, language: str | None = None) -> Mapping[str, Any]:
        """A data set's text by language."""
        if self.processing_class is None:
            raise InputError(
                f"{name} holds text: pass {self.stage.__name__}(...) as args, which sets the packing, and the "
                "tokenizer as processing_class."
            )
        old, new = Facts(self.model_config).languages
        language = language if language in (*old, *new) else None
        return by_language(data, name, old, new, self.model_config.is_encoder_decoder, language)

    def _scored(
        self: Any, data: Any, classes: Sequence[int] | None, name: str = "eval_dataset", key: Any = None
    ) -> Any:
        """A data set to score, in blocks: text is packed as the training's is."""
        if isinstance(data, Mapping):
            return {key: self._scored(one, classes, f"{name}[{key!r}]", key) for key, one in data.items()}
        if isinstance(data, PackedText):
            data = (data if self._own_classes else self._numbered(data, name)).dataset
        elif is_text(columns := columns_of(data, name, self._own_collator)):
            config: Any = self.args
            texts, tokenizer = self._texts(data, name, key), self.processing_class
            with errors_at(name), config.main_process_first(desc="pack"):
                lost = lost_of_each(texts, tokenizer, self.model_config.is_encoder_decoder, config.seed)
                check_lost(lost, self.allow_lost_text)
                data = config.pack(texts, tokenizer, self.model_config, whole=True).dataset
        else:
            data = self._with_ids(data, columns, name, key)
        self._check_rows(data, name, classes)
        return data

    def _check_rows(self: Any, data: Any, name: str, classes: Sequence[int] | None) -> None:
        check_rows(data, name, self.model_config, None if classes is None else len(classes), self._own_collator)
        needed = self.needs_languages or any(loss.needs_languages and loss.coef for loss in self.router_losses)
        if needed and not self._own_collator and "language_ids" not in columns_of(data, name, False):
            raise InputError(
                f"{name} has no column `language_ids`, the language of each token, which this stage needs: give text "
                "(columns `text` and `language`), or what `pack_texts` returned."
            )

    def _asked(self: Any, data: Any, name: str) -> Any:
        """A data set of a call; a text is a key of the constructor's `eval_dataset`."""
        of_constructor = data is None or (isinstance(data, str) and data in (getattr(self, "eval_dataset", None) or ()))
        classes = None if self._language_classes is None else self._language_classes.tolist()
        return data if of_constructor else self._scored(data, classes, name)
