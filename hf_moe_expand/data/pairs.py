"""Sentence pairs as rows and batches for an encoder-decoder: tokens of both sides, and their languages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets

from ..errors import InputError
from .packing import PackedText
from .pair_encoder import PairEncoder, SentencePair
from .sources import LanguageText, names_language, row_pairs

UNKNOWN = -1  # language id of padding, and of a language that the model does not know
IGNORED = -100  # label of padding


def sentence_pairs(dataset: Dataset) -> list[SentencePair]:
    """The rows of `LanguageText.load_pairs`."""
    columns = (dataset[name] for name in SentencePair._fields)
    return [SentencePair(*values) for values in zip(*columns, strict=True)]


def pairs_of(translations: Iterable[Mapping[str, str | None]], language: str) -> Dataset:
    """The sentence pairs to and from a language of the column `translation` of a data set.

    Raises:
        InputError: there is none.
    """
    rows = [
        row for number, sentences in enumerate(translations)
        for row in row_pairs({"translation": sentences}, language, f"train_dataset: row {number}")
    ]  # fmt: skip
    if not rows:
        raise InputError(f"train_dataset: no translation to or from {language!r}.")
    return Dataset.from_list(rows)


def texts_for(config: Any, sources: Mapping[str, LanguageText], seed: int | None = None) -> dict[str, Any]:
    """What a model reads of each language: sentence pairs, if it is an encoder-decoder, else documents.

    Args:
        seed: random seed of their order; the files' order by default.
    """
    found: dict[str, Any] = {}
    for code, source in sources.items():
        dataset = source.load_pairs() if config.is_encoder_decoder else source.load()
        dataset = dataset if seed is None else dataset.shuffle(seed=seed)
        found[code] = sentence_pairs(dataset) if config.is_encoder_decoder else dataset["text"]
    return found


def pack_pairs(
    texts: Mapping[str, Dataset],
    tokenizer: Any,
    block_size: int,
    seed: int,
    documents: Mapping[str, int] | None = None,
    tokens_per_language: int | None = None,
    languages: Sequence[str] | None = None,
) -> PackedText:
    """The tokens of sentence pairs, language after language, each shuffled.

    Args:
        texts: sentence pairs to and from each language, as `LanguageText.load_pairs` reads them.
        block_size: most tokens of a side; longer pairs are left out.
        documents: number of pairs to take of each language; all by default.
        tokens_per_language: number of tokens, of both sides, at which to stop taking pairs.
        languages: the order of the language ids; that of `texts` by default.

    Returns:
        Rows with `input_ids`, `labels` and `language_ids`, the two ids of source and target; `tokens` counts both
        sides, and a block is a pair.

    Raises:
        InputError: the tokenizer has no code for a language, a language has no pair that is short enough, or fewer
            tokens than asked for.
    """
    order = tuple(languages or texts)
    encoder = PairEncoder(tokenizer)
    features = Features({
        "input_ids": List(Value("int32")), "labels": List(Value("int32")), "language_ids": List(Value("int16")),
    })  # fmt: skip
    found, tokens, counts = [], {}, {}
    for language, dataset in texts.items():
        dataset = dataset.shuffle(seed=seed)
        if documents is not None:
            dataset = dataset.select(range(min(documents[language], len(dataset))))
        encoder.check(set(zip(dataset["source_language"], dataset["target_language"], strict=True)))

        def encode(batch: dict) -> dict:
            rows = [
                SentencePair(*values) for values in zip(*(batch[name] for name in SentencePair._fields), strict=True)
            ]
            inputs, labels = encoder.encode(rows)
            ids = [[_id_of(code, order) for code in row.direction] for row in rows]
            return {"input_ids": inputs, "labels": labels, "language_ids": ids}

        encoded = dataset.map(
            encode, batched=True, remove_columns=dataset.column_names, features=features, desc=f"tokenize {language}"
        )
        sizes = [
            (len(source), len(target))
            for source, target in zip(
                *(encoded.with_format("arrow")[name] for name in ("input_ids", "labels")), strict=True
            )
        ]
        kept = [place for place, size in enumerate(sizes) if max(size) <= block_size]
        if not kept:
            raise InputError(
                f"Language {language!r}: each of its {len(sizes):,} sentence pairs is longer than block_size, "
                f"{block_size} tokens of a side: raise it, or give shorter texts."
            )
        kept, total = _first_tokens(language, kept, sizes, tokens_per_language)
        found.append(encoded.select(kept))
        tokens[language], counts[language] = total, len(kept)
    packed = concatenate_datasets(found)
    return PackedText(packed, order, tokens, counts, tuple(map(len, found)))


def _first_tokens(
    language: str, kept: list[int], sizes: Sequence[tuple[int, int]], wanted: int | None
) -> tuple[list[int], int]:
    """The first pairs that together have at least `wanted` tokens, and their number of tokens."""
    total = 0
    for number, place in enumerate(kept):
        total += sum(sizes[place])
        if wanted is not None and total >= wanted:
            return kept[: number + 1], total
    if wanted is not None:
        raise InputError(
            f"Language {language!r} has {total:,} tokens, but {wanted:,} were asked for: give more text or ask for "
            "fewer."
        )
    return kept, total


def _id_of(code: str, order: Sequence[str]) -> int:
    """The number of a language; `UNKNOWN` if the model does not know it."""
    return next((number for number, known in enumerate(order) if names_language(code, known)), UNKNOWN)


class PairCollator:
    """Makes batches of the rows of `pack_pairs`, for `RouterLossMixin` on any Trainer: `input_ids`, `attention_mask`
    and `language_ids`, each `[batch, source]`; `labels` and `decoder_language_ids`, each `[batch, target]`.

    Args:
        pad_token_id: token of the encoder's padding.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        sources, targets = ([row[name] for row in rows] for name in ("input_ids", "labels"))
        languages = [row["language_ids"] for row in rows]
        return {
            "input_ids": padded(sources, self.pad_token_id),
            "attention_mask": padded([[1] * len(source) for source in sources], 0),
            "labels": padded(targets, IGNORED),
            "language_ids": padded([[ids[0]] * len(s) for ids, s in zip(languages, sources, strict=True)], UNKNOWN),
            "decoder_language_ids": padded(
                [[ids[1]] * len(t) for ids, t in zip(languages, targets, strict=True)], UNKNOWN
            ),
        }


def padded(rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
    """`[rows, longest]`, padded at the end."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])
