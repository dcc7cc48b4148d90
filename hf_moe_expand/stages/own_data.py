"""The data sets that are given to a stage's Trainer: text by language, rows of tokens, or what `pack_texts` returned.
Whatever the form, the same settings hold, or are refused, and each is checked before anything trains."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pyarrow.compute as pc
from datasets import Dataset
from pyarrow import types

from ..checkpoint.facts import Facts
from ..checkpoint.source import text_config
from ..core.errors import InputError, errors_at
from ..core.languages import named_in
from ..core.saying import say_once
from ..core.schema import shown_value
from ..data.lost import check_lost
from ..data.packing import Blocks, PackedText
from ..data.pairs import lost_of_each, pairs_of
from ..data.rows import LeftOut, counted
from ..inference.models import longest_block
from ..trainers.samplers import LanguageMix
from ..trainers.watching import check_columns
from .mixing import is_mixed
from .prepare import packed_text
from .streaming import BY_DOCUMENTS

_COLUMNS = {"text", "translation"}
# Beside tokens; `_check_other_columns` refuses masks and positions that a batch would lose.
_IN_BATCHES = ("input_ids", "labels", "language_ids", "language", "attention_mask", "position_ids")
_PACKING = ("tokens_per_language", "replay_share", *BY_DOCUMENTS, "stream")


def _columns_of(data: Any, name: str, own_collator: bool) -> Collection[str]:
    """The columns of the data set that is the argument `name`; refuses what is none, or has neither text nor tokens
    without a collator of its own."""
    columns = getattr(data, "column_names", None)
    has_rows = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    if columns is None and has_rows and not isinstance(data, str | bytes | Mapping):
        first = next(iter(data), None)
        columns = list(first) if isinstance(first, Mapping) else None
    if columns is None or (_COLUMNS & {*columns} and not isinstance(data, Dataset)):
        raise InputError(
            f"{name} is {shown_value(data)}: give a datasets.Dataset with a column `text`, such as "
            "LanguageText('el', 'el.jsonl').load(), or Dataset.from_list(rows)."
        )
    if _COLUMNS & {*columns} and "input_ids" in columns:
        raise InputError(f"{name} has both text and `input_ids`: remove the column that is not to be read.")
    if not (own_collator or _COLUMNS & {*columns} or "input_ids" in columns):
        raise InputError(f"{name} has the columns {', '.join(columns) or 'none'}, but no `text` and no `input_ids`.")
    return columns


def _check_rows(data: Any, name: str, config: Any, languages: int | None, own_collator: bool) -> None:
    """Refuses rows of tokens that the model does not take.

    Args:
        languages: number of language ids that the losses know; None if they know none.
    """
    if hasattr(data, "__len__") and not len(data):
        raise InputError(f"{name} has no rows: give some.")
    packed = data.block_size if isinstance(data, Blocks) else None
    data = data.documents if isinstance(data, Blocks) else data
    if not own_collator and isinstance(data, Dataset):
        _check_other_columns(data, name)
    end = getattr(text_config(config), "vocab_size", None)
    labels = _check_ids(data, "labels", name, -100 if own_collator else 0, end, ignored=-100)
    lengths = _check_ids(data, "input_ids", name, 0, end)
    of_languages = _check_ids(data, "language_ids", name, -math.inf, languages)
    if lengths is None or own_collator or config.is_encoder_decoder:
        return
    for column, found in (("labels", labels), ("language_ids", of_languages)):
        if found is not None and found != lengths:
            raise InputError(f"{name} has rows whose `{column}` are not as many as their `input_ids`.")
    if len(sizes := [packed] if packed else sorted({*lengths})) > 1:
        raise InputError(f"{name} has rows of {sizes[0]} to {sizes[-1]} tokens: give text, or a collator that pads.")
    if (longest := longest_block(config)) is not None and sizes[-1] > longest:
        raise InputError(f"{name} has rows of {sizes[-1]} tokens, but the model takes {longest} positions: cut them.")


def _check_other_columns(data: Dataset, name: str) -> None:
    """Refuses columns that say something of the tokens that a batch would lose."""
    collator = "give a data_collator that passes it on."
    if "position_ids" in data.column_names:
        raise InputError(f"{name} has a column `position_ids`, but blocks have positions 0, 1, ...: {collator}")
    if "attention_mask" in data.column_names and "input_ids" in data.column_names:
        masks = pc.list_flatten(data.with_format("arrow")[:]["attention_mask"])
        if len(masks) and not pc.min(masks).as_py():
            raise InputError(f"{name} has a column `attention_mask` with zeros, but blocks have no padding: {collator}")


def _check_ids(
    data: Any, column: str, name: str, least: float, end: int | None, ignored: int | None = None
) -> list[int] | None:
    """The lengths of a column of ids; None without it. Refuses ids below the least, but the ignored one, and from the
    end on, as a tokenizer that was given in Python may have them."""
    if not isinstance(data, Dataset) or column not in data.column_names:
        return None
    ids = data.with_format("arrow")[:][column]
    if not types.is_list(ids.type) or not types.is_integer(ids.type.value_type) or ids.null_count:
        raise InputError(f"{name}: the column `{column}` holds {ids.type}: each row must be a list of whole numbers.")
    flat = pc.list_flatten(ids)
    found = pc.min_max(flat if ignored is None else pc.filter(flat, pc.not_equal(flat, ignored))).as_py()
    for one in (found["min"] or 0, found["max"] or 0):
        if not least <= one < (math.inf if end is None else end):
            other = "" if ignored is None else f", or {ignored} for a token that does not count"
            wanted = f"below {end}" if one > 0 else f"at least {least}{other}"
            raise InputError(f"{name}: the column `{column}` holds {one}: must be {wanted}.")
    return pc.list_value_length(ids).to_pylist()


def _by_language(
    data: Dataset, name: str, old: Sequence[str], new: Sequence[str], pairs: bool, language: str | None
) -> Mapping[str, Dataset]:
    """The texts of each language of a data set, or its sentence pairs; `language` is that of rows without one."""
    column = "translation" if pairs else "text"
    if column not in data.column_names:
        learns = "sentences by language, such as {'en': 'A word.', 'el': 'Μία λέξη.'}" if pairs else "text"
        raise InputError(f"{name} has no column `{column}`: this model learns from {learns}.")
    if not pairs:
        data = _with_text(data, name)
    if "language" in data.column_names:
        known = [*old, *new]
        codes = numpy.array(_codes_of_rows(data, known, name))
        texts = {code: data.select(numpy.flatnonzero(codes == code)) for code in known}
    elif language is None and len(new) != 1:
        raise InputError(f"{name} has no column `language`, but new languages are {', '.join(new) or 'none'}.")
    else:
        texts = {language or new[0]: data}
    return {
        code: pairs_of(of_code[column], code, name) if pairs else of_code.select_columns([column])
        for code, of_code in texts.items()
        if len(of_code) or "language" not in data.column_names
    }


def _codes_of_rows(data: Dataset, known: Sequence[str], name: str) -> list[str]:
    """The language of each row by its column `language`, as the model names it; refuses other languages."""
    code_of = {tag: named_in(tag, known) for tag in {*map(str, data["language"])}}
    if unknown := sorted(tag for tag, code in code_of.items() if code is None):
        raise InputError(f"{name} has the unknown language {', '.join(unknown)}; known: {', '.join(known)}.")
    return [code_of[str(tag)] or "" for tag in data["language"]]


def _with_text(data: Dataset, name: str) -> Dataset:
    """The rows that have text; a line says how many have none."""
    texts = data.with_format("arrow").select_columns(["text"])[:]["text"]
    if not (types.is_string(texts.type) or types.is_large_string(texts.type) or types.is_null(texts.type)):
        raise InputError(f"{name}: the column `text` holds {texts.type}, not text: give a text in each row.")
    has_text = pc.greater(pc.utf8_length(pc.utf8_trim_whitespace(texts.cast("string"))), 0).fill_null(False)
    kept = numpy.flatnonzero(has_text.to_numpy())
    if len(kept) == len(data):
        return data
    left_out = LeftOut({"without text": len(data) - len(kept)})
    say_once(f"{name}: {counted(len(kept), 'document')} kept, {left_out}")
    return data.select(kept)


class OwnDataMixin:
    """Put in front of a Trainer that has a `StageConfig` as its arguments, `model_config` and `processing_class`."""

    packed: PackedText | None

    def _prepared(self: Any, data: Any, classes: Sequence[int] | None) -> tuple[Any, Sequence[int] | None]:
        """The data set in blocks, and its languages' classes; sets their weights and schedule."""
        config, model, name = self.args, self.model_config, "train_dataset"
        is_checked = isinstance(data, PackedText) and data.is_of_stage
        if isinstance(data, PackedText):
            self.packed = data if is_checked or classes is not None else self._numbered(data, name)
        elif _COLUMNS & {*_columns_of(data, name, self._own_collator)}:
            texts, is_checked = self._texts(data, name), True
            config.check(model, texts)
            self._set_length(list(texts))
            with config.main_process_first(desc="pack"):
                self.packed = packed_text(config, model, texts, self.processing_class, self.allow_lost_text)
        else:
            data = self._with_ids(data, name)
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
            raise InputError("train_dataset is packed already, but a temperature or a curriculum draws: give text.")
        elif classes is None and "language_ids" in _columns_of(data, name, self._own_collator):
            classes = self.stage.language_classes(model, self._languages_of_model())
        self._check_data(data, name, classes)
        return data, classes

    def _languages_of_model(self: Any) -> list[str]:
        """The languages that ids count: the old ones, then the new ones."""
        old, new = Facts(self.model_config).languages
        return [*old, *new]

    def _check_packed(self: Any, data: Any) -> None:
        """Refuses settings that contradict the model or text that was packed before."""
        config: Any = self.args
        if chosen := [name for name in _PACKING if getattr(config, name, None)]:
            raise InputError(f"train_dataset is packed already, but {chosen[0]} says what to pack: leave it out.")
        blocks = data.dataset if isinstance(data, PackedText) else data
        size = blocks.block_size if isinstance(blocks, Blocks) else config.block_size
        if size != config.block_size != type(config).block_size:
            raise InputError(
                f"train_dataset has blocks of {size} tokens, but block_size is {config.block_size}: leave it out."
            )
        texts = None
        if self.packed is not None:
            self._set_length(list(self.packed.tokens))
            if self._has_history:
                texts = dict.fromkeys(code for code, tokens in self.packed.tokens.items() if tokens)
        config.check(self.model_config, texts, packed=True)

    def _set_length(self: Any, languages: Sequence[str]) -> None:
        """A curriculum's number of steps is that of the training."""
        if (curriculum := self.args.order(languages)) is not None:
            self.args.max_steps = curriculum.steps

    @property
    def _has_history(self: Any) -> bool:
        return bool(getattr(self.model_config, "expansions", None))

    def _numbered(self: Any, data: PackedText, name: str) -> PackedText:
        """Packed text whose language ids are those of the model's languages, where its history names them."""
        return data.numbered(self._languages_of_model(), name) if self._has_history else data

    def _with_ids(self: Any, data: Any, name: str, language: str | None = None) -> Any:
        """Rows of tokens with the language that a column `language`, or the key of an evaluation, gives each."""
        columns = _columns_of(data, name, self._own_collator)
        if not self._own_collator:
            check_columns(columns, _IN_BATCHES, name)
        if not isinstance(data, Dataset) or "input_ids" not in columns or "language_ids" in columns:
            return data
        known = self._languages_of_model() if self._has_history or "language" in columns else []
        if "language" in columns:
            ids = [known.index(code) for code in _codes_of_rows(data, known, name)]
        elif language in known:
            ids = [known.index(language)] * len(data)
        else:
            return data
        sizes = map(len, data["input_ids"])
        return data.add_column("language_ids", [[one] * size for one, size in zip(ids, sizes, strict=True)])

    def _texts(self: Any, data: Dataset, name: str, language: str | None = None) -> Mapping[str, Any]:
        """A data set's text by language."""
        if self.processing_class is None:
            raise InputError(f"{name} holds text: pass {self.stage.__name__}(...) and the tokenizer, processing_class.")
        old, new = Facts(self.model_config).languages
        language = language if language in (*old, *new) else None
        return _by_language(data, name, old, new, self.model_config.is_encoder_decoder, language)

    def _scored(
        self: Any, data: Any, classes: Sequence[int] | None, name: str = "eval_dataset", key: Any = None
    ) -> Any:
        """A data set to score, in blocks: text is packed as the training's is."""
        if isinstance(data, Mapping):
            return {key: self._scored(one, classes, f"{name}[{key!r}]", key) for key, one in data.items()}
        if isinstance(data, PackedText):
            data = (data if self._own_classes else self._numbered(data, name)).dataset
        elif _COLUMNS & {*_columns_of(data, name, self._own_collator)}:
            config: Any = self.args
            texts, tokenizer = self._texts(data, name, key), self.processing_class
            with errors_at(name), config.main_process_first(desc="pack"):
                lost = lost_of_each(texts, tokenizer, self.model_config.is_encoder_decoder, config.seed)
                check_lost(lost, self.allow_lost_text)
                data = config.pack(texts, tokenizer, self.model_config, whole=True).dataset
        else:
            data = self._with_ids(data, name, key)
        self._check_data(data, name, classes)
        return data

    def _check_data(self: Any, data: Any, name: str, classes: Sequence[int] | None) -> None:
        _check_rows(data, name, self.model_config, None if classes is None else len(classes), self._own_collator)
        needed = self.needs_languages or any(loss.needs_languages and loss.coef for loss in self.router_losses)
        if needed and not self._own_collator and "language_ids" not in _columns_of(data, name, False):
            raise InputError(f"{name} has no column `language_ids`, which this stage needs: give text, or packed text.")

    def _asked(self: Any, data: Any, name: str) -> Any:
        """A data set of a call; a text is a key of the constructor's `eval_dataset`."""
        of_constructor = data is None or (isinstance(data, str) and data in (getattr(self, "eval_dataset", None) or ()))
        classes = None if self._language_classes is None else self._language_classes.tolist()
        return data if of_constructor else self._scored(data, classes, name)
