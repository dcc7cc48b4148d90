"""A Trainer's own data sets: text by language, or rows of tokens. Each is checked before anything trains."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy
import pyarrow.compute as pc
from datasets import Dataset
from pyarrow import types

from ..checkpoint.source import text_config
from ..core.errors import InputError
from ..core.languages import named_in
from ..core.saying import say_once
from ..core.schema import shown_value
from ..data.packing import Blocks
from ..data.pairs import pairs_of
from ..data.rows import LeftOut, counted
from ..inference.models import longest_block

_COLUMNS = ("text", "translation")
# Beside tokens; `_check_other_columns` refuses masks and positions that a batch would lose.
IN_BATCHES = ("input_ids", "labels", "language_ids", "language", "attention_mask", "position_ids")
_NAMES = ("content", "document", "sentence", "sentences", "raw_content", "body")  # of text, in others' data sets


def is_text(columns: Collection[str]) -> bool:
    """Whether a data set with these columns holds text to pack, and not tokens."""
    return bool({*_COLUMNS} & {*columns})


def columns_of(data: Any, name: str, own_collator: bool) -> Collection[str]:
    """The columns of a data set.

    Args:
        name: its argument, for messages.
        own_collator: whether a collator was given, which may take rows of any kind.

    Raises:
        InputError: it is no data set, or has neither text nor tokens.
    """
    if isinstance(data, Mapping):
        raise InputError(f"{name} holds {', '.join(map(repr, data)) or 'nothing'}: give one of these data sets.")
    columns = getattr(data, "column_names", None) or _columns_of_a_row(data, name)
    if columns is not None and is_text(columns) and "input_ids" in columns:
        raise InputError(f"{name} has both text and `input_ids`: remove the column that is not to be read.")
    if columns is None or (is_text(columns) and not isinstance(data, Dataset)):
        raise InputError(
            f"{name} is {shown_value(data)}: give a datasets.Dataset with a column `text`, such as "
            "LanguageText('el', 'el.jsonl').load(), or Dataset.from_list(rows)."
        )
    if not (own_collator or is_text(columns) or "input_ids" in columns):
        near = next((one for one in columns if one.lower() in _NAMES), "COLUMN")
        raise InputError(
            f"{name} has the columns {', '.join(columns) or 'none'}, but no `text` and no `input_ids`: rename that of "
            f"the text, with {name}.rename_column({near!r}, 'text')."
        )
    return columns


def _columns_of_a_row(data: Any, name: str) -> list[str] | None:
    """The columns of a data set that does not name them; None if it is none."""
    if isinstance(data, str | bytes) or not (hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
        return None
    first = next(iter(data), None)
    if first is None:
        raise InputError(f"{name} has no rows: give some.")
    return list(first) if isinstance(first, Mapping) else None


def check_rows(data: Any, name: str, config: Any, languages: int | None, own_collator: bool) -> None:
    """Refuses rows of tokens that the model does not take.

    Args:
        config: the model's configuration.
        languages: number of language ids that the losses know; None if they know none.

    Raises:
        InputError: there are no rows, their lengths differ, or an id is out of range.
    """
    if hasattr(data, "__len__") and not len(data):
        raise InputError(f"{name} has no rows: give some.")
    packed = data.block_size if isinstance(data, Blocks) else None
    data = data.documents if isinstance(data, Blocks) else data
    rows = getattr(text_config(config), "vocab_size", None)
    if not own_collator and isinstance(data, Dataset):
        _check_other_columns(data, name)
    labels = _check_ids(data, "labels", name, rows, least=-100 if own_collator else 0, ignored=-100)
    lengths = _check_ids(data, "input_ids", name, rows)
    of_languages = _check_ids(data, "language_ids", name, None, least=-numpy.inf, most=languages)
    if lengths is None or own_collator or config.is_encoder_decoder:
        return
    for column, found in (("labels", labels), ("language_ids", of_languages)):
        if found is not None and found != lengths:
            raise InputError(
                f"{name} has rows whose `{column}` are not as many as their `input_ids`: each token has one."
            )
    if len(sizes := [packed] if packed else sorted({*lengths})) > 1:
        raise InputError(
            f"{name} has rows of {sizes[0]} to {sizes[-1]} tokens, but blocks have one length: give text, which is "
            "packed, or a data_collator that pads."
        )
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
    data: Any,
    column: str,
    name: str,
    rows: int | None,
    least: float = 0,
    most: int | None = None,
    ignored: int | None = None,
) -> list[int] | None:
    """The lengths of a column of ids; None without it. Refuses text with tokens beyond the model's, which a tokenizer
    that was given in Python may have, and ids below the least but the `ignored` one."""
    if not isinstance(data, Dataset) or column not in data.column_names:
        return None
    ids = data.with_format("arrow")[:][column]
    if not types.is_list(ids.type) or not types.is_integer(ids.type.value_type) or ids.null_count:
        raise InputError(f"{name}: the column `{column}` holds {ids.type}: each row must be a list of whole numbers.")
    flat = pc.list_flatten(ids)
    found = pc.min_max(flat if ignored is None else pc.filter(flat, pc.not_equal(flat, ignored))).as_py()
    smallest, largest = found["min"] or 0, found["max"] or 0
    if rows is not None and largest >= rows:
        raise InputError(
            f"{name} holds token number {largest}, but the model has {rows} tokens: give the model's own "
            "tokenizer, or add the rows first (model.resize_token_embeddings(len(tokenizer)))."
        )
    if most is not None and largest >= most:
        raise InputError(
            f"{name} holds the language id {largest}, but there are {most} languages: ids count the old languages from "
            "0, then the new ones."
        )
    if smallest < least:
        other = "" if ignored is None else f", or {ignored} for a token that does not count"
        raise InputError(f"{name}: the column `{column}` holds {smallest}: must be at least {least:.0f}{other}.")
    return pc.list_value_length(ids).to_pylist()


def by_language(
    data: Dataset, name: str, old: Sequence[str], new: Sequence[str], pairs: bool, language: str | None = None
) -> Mapping[str, Dataset]:
    """The texts of each language of a data set; with `pairs`, for an encoder-decoder, its sentence pairs.

    Args:
        language: the language of rows without one.

    Raises:
        InputError: a column is missing or of another type, or a language is none of the model's.
    """
    column = "translation" if pairs else "text"
    if column not in data.column_names:
        raise InputError(
            f"{name} has no column `{column}`: "
            + (
                "an encoder-decoder learns from sentences by language, such as {'en': 'A word.', 'el': 'Μία λέξη.'}."
                if pairs
                else "a decoder learns from text; `LanguageText` makes text of translations."
            )
        )
    if not pairs:
        data = _with_text(data, name)
    if "language" not in data.column_names:
        if language is None and len(new) != 1:
            raise InputError(
                f"{name} has no column `language`, but this expansion adds {', '.join(new) or 'no language'}: "
                "give each row its language's code."
            )
        code = language or new[0]
        return {code: _column(data, column, code, name)}
    known = [*old, *new]
    codes = numpy.array(codes_of_rows(data, known, name))
    texts = {code: data.select(numpy.flatnonzero(codes == code)) for code in known}
    return {code: _column(of_code, column, code, name) for code, of_code in texts.items() if len(of_code)}


def codes_of_rows(data: Dataset, known: Sequence[str], name: str) -> list[str]:
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


def _column(data: Dataset, column: str, language: str, name: str) -> Dataset:
    """A language's texts, or its sentence pairs."""
    return data.select_columns(["text"]) if column == "text" else pairs_of(data[column], language, name)
