"""Documents to blocks of tokens with a language id a token, and to a token stream for scoring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from ..errors import InputError


@dataclass(frozen=True)
class PackedText:
    """Blocks for training.

    Attributes:
        dataset: columns `input_ids` and `language_ids`, both `[block_size]`; a block can hold several documents and
            languages.
        languages: `languages[i]` is the language with id `i`.
        tokens: tokens of each language in `dataset`'s source, the ends of documents included.
        documents: documents of each language.
    """

    dataset: Dataset
    languages: tuple[str, ...]
    tokens: dict[str, int]
    documents: dict[str, int]


def tokenize(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, language_id: int) -> Dataset:
    """`text` to `input_ids` (with the tokenizer's own special tokens and an end-of-text token) and `language_ids`.

    Raises:
        InputError: the tokenizer has no end-of-text token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError("The tokenizer has no end-of-text token (eos_token): documents could not be told apart.")

    def encode(batch: dict) -> dict:
        ids = [
            row if row and row[-1] == end else [*row, end] for row in tokenizer(batch["text"], verbose=False).input_ids
        ]
        return {"input_ids": ids, "language_ids": [[language_id] * len(row) for row in ids]}

    features = Features({"input_ids": List(Value("int32")), "language_ids": List(Value("int16"))})
    return dataset.map(encode, batched=True, remove_columns=dataset.column_names, features=features, desc="tokenize")


def take_tokens(dataset: Dataset, tokens: int, language: str) -> tuple[Dataset, int]:
    """The first documents that hold at least `tokens` tokens, and how many they hold.

    Raises:
        InputError: there are fewer.
    """
    total = 0
    for index, ids in enumerate(dataset.with_format("arrow")["input_ids"]):
        total += len(ids)
        if total >= tokens:
            return dataset.select(range(index + 1)), total
    raise InputError(
        f"Language {language!r} has {total:,} tokens, but {tokens:,} were asked for: give more text or ask for less."
    )


def pack_texts(
    texts: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    seed: int,
    documents: Mapping[str, int] | None = None,
    tokens_per_language: int | None = None,
    languages: Sequence[str] | None = None,
) -> PackedText:
    """Shuffle, take, mix and pack: blocks of exactly `block_size` tokens.

    Args:
        texts: for each language its documents (column `text`).
        documents: how many documents to take of each language; all by default.
        tokens_per_language: take whole documents until this many tokens.
        languages: the order of the language ids; that of `texts` by default.

    Raises:
        InputError: a language has fewer tokens than asked for, or all of it is less than one block.
    """
    from trl import pack_dataset  # heavy

    order = tuple(languages or texts)
    parts, tokens, counts = [], {}, {}
    for language, dataset in texts.items():
        dataset = dataset.shuffle(seed=seed)
        if documents is not None:
            dataset = dataset.select(range(min(documents[language], len(dataset))))
        encoded = tokenize(dataset, tokenizer, order.index(language))
        if tokens_per_language is None:
            total = sum(map(len, encoded.with_format("arrow")["input_ids"]))
        else:
            encoded, total = take_tokens(encoded, tokens_per_language, language)
        parts.append(encoded)
        tokens[language], counts[language] = total, len(encoded)
    mixed = concatenate_datasets(parts).shuffle(seed=seed).flatten_indices()
    packed = pack_dataset(mixed, block_size, strategy="wrapped", map_kwargs={"desc": "pack"})
    packed = packed.with_format(None).filter(lambda ids: len(ids) == block_size, input_columns="input_ids")
    if not len(packed):
        raise InputError(
            f"All text together is {sum(tokens.values()):,} tokens, less than one block of {block_size}: "
            "give more text or a smaller block_size."
        )
    return PackedText(packed, order, tokens, counts)


def collate_blocks(rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """A batch for the trainers: `input_ids`, `labels`, `language_ids`, each `[batch, block_size]`."""
    input_ids = torch.tensor([list(row["input_ids"]) for row in rows])
    language_ids = torch.tensor([list(row["language_ids"]) for row in rows])
    return {"input_ids": input_ids, "labels": input_ids.clone(), "language_ids": language_ids}
