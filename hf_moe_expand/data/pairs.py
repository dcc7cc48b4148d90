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
    texts: dict[str, Any] = {}
    for code, source in sources.items():
        dataset = source.load_pairs() if config.is_encoder_decoder else source.load()
        dataset = dataset if seed is None else dataset.shuffle(seed=seed)
        texts[code] = sentence_pairs(dataset) if config.is_encoder_decoder else dataset["text"]
    return texts


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
        documents: number of pairs to take of each language, or fewer if fewer are short enough; all by default.
        tokens_per_language: number of tokens, of both sides, at which to stop taking pairs.
        languages: the order of the language ids; that of `texts` by default.

    Returns:
        Rows with `input_ids`, `labels` and `language_ids`, the two ids of source and target; `tokens` counts both
        sides, and a block is a pair.

    Raises:
        InputError: the tokenizer has no code for a language, a language has no pair that the model translates or that
            is short enough, or fewer tokens than asked for.
    """
    order = tuple(languages or texts)
    encoder = PairEncoder(tokenizer)
    features = Features({
        "input_ids": List(Value("int32")), "labels": List(Value("int32")), "language_ids": List(Value("int16")),
    })  # fmt: skip
    datasets, tokens, counts = [], {}, {}
    for language, dataset in texts.items():
        dataset = _in_directions(dataset, encoder, language).shuffle(seed=seed)

        def encode(batch: dict) -> dict:
            rows = [
                SentencePair(*values) for values in zip(*(batch[name] for name in SentencePair._fields), strict=True)
            ]
            inputs, labels = encoder.encode(rows)
            ids = [[_id_of(code, order) for code in row.direction] for row in rows]
            return {"input_ids": inputs, "labels": labels, "language_ids": ids}

        wanted = len(dataset) if documents is None else min(documents[language], len(dataset))
        parts: list[Dataset] = []
        sizes: list[tuple[int, int]] = []
        first = 0
        while len(sizes) < wanted and first < len(dataset):
            # Where some pairs are too long, as many again and more.
            rows = dataset.select(range(first, min(max(wanted, 2 * first), len(dataset))))
            first += len(rows)
            encoder.check(set(zip(rows["source_language"], rows["target_language"], strict=True)))
            part = rows.map(
                encode, batched=True, remove_columns=rows.column_names, features=features, desc=f"tokenize {language}"
            )
            of_part = _sizes(part)
            fitting = [place for place, size in enumerate(of_part) if max(size) <= block_size][: wanted - len(sizes)]
            parts.append(part.select(fitting))
            sizes += [of_part[place] for place in fitting]
        if not sizes:
            raise InputError(
                f"Language {language!r}: each of its {len(dataset):,} sentence pairs is longer than block_size, "
                f"{block_size} tokens of a side: raise it, or give shorter texts."
            )
        counts[language], tokens[language] = _first_tokens(language, sizes, tokens_per_language)
        datasets.append(concatenate_datasets(parts).select(range(counts[language])))
    packed = concatenate_datasets(datasets)
    return PackedText(packed, order, tokens, counts, tuple(map(len, datasets)))


def _in_directions(dataset: Dataset, encoder: PairEncoder, language: str) -> Dataset:
    """The pairs that the model translates."""
    directions = list(zip(dataset["source_language"], dataset["target_language"], strict=True))
    takes = {direction: encoder.translates(direction) for direction in set(directions)}
    if all(takes.values()):
        return dataset
    if not any(takes.values()):
        raise InputError(f"Language {language!r}: no sentence pair in a direction of the model: {encoder.one_way()}.")
    return dataset.select([place for place, direction in enumerate(directions) if takes[direction]])


def _sizes(rows: Dataset) -> list[tuple[int, int]]:
    """The number of tokens of each row's source and target."""
    columns = (rows.with_format("arrow")[name] for name in ("input_ids", "labels"))
    return [(len(source), len(target)) for source, target in zip(*columns, strict=True)]


def _first_tokens(language: str, sizes: Sequence[tuple[int, int]], wanted: int | None) -> tuple[int, int]:
    """How many first pairs together have at least `wanted` tokens, and their number of tokens."""
    total = 0
    for number, size in enumerate(sizes, start=1):
        total += sum(size)
        if wanted is not None and total >= wanted:
            return number, total
    if wanted is not None:
        raise InputError(
            f"Language {language!r} has {total:,} tokens, but {wanted:,} were asked for: give more text or ask for "
            "fewer."
        )
    return len(sizes), total


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
