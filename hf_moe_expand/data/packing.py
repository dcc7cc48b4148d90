"""Mixes the documents of languages, and packs their tokens into blocks, with a language id for each token."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from ..core.errors import InputError, errors_at
from ..core.languages import check_named_once, named_in
from ..core.schema import checked
from .lost import LostText, lost_text
from .tokens import begin_tokens, document_frame, encode_documents, say_special, special_tokens

NEW_PER_OLD = 2.0  # MoE-LPR: 50,000 documents of each old language, 100,000 of each new one

_DOCUMENT = Features({"input_ids": List(Value("int32")), "tokens": Value("int32"), "language": Value("int16")})


@dataclass(frozen=True)
class PackedText:
    """Blocks for training.

    Attributes:
        dataset: `Blocks`, which may mix documents and languages; a `TextStream` of such blocks, whose tokens are those
            to take, about; or sentence pairs.
        languages: `languages[i]` is the language with id `i`.
        tokens: tokens of each language, end-of-text tokens included.
        documents: documents of each language.
        blocks: number of blocks of each group of languages that may share blocks; the groups follow one another.
        lost: what the tokenizer loses of a sample of each language's text.
        is_of_stage: whether a stage packed it, by its settings.
    """

    dataset: Any
    languages: tuple[str, ...]
    tokens: dict[str, int]
    documents: dict[str, int]
    blocks: tuple[int, ...]
    lost: dict[str, LostText] = field(default_factory=dict)
    is_of_stage: bool = False

    def numbered(self, languages: Sequence[str], name: str = "text") -> "PackedText":
        """The same text with the ids of these languages; refuses one of another language. Messages call the argument
        `name`."""
        order = tuple(languages)
        if self.languages == order:
            return self
        known: dict[str, Any] = {code: named_in(code, order) for code in self.languages}
        if unknown := [code for code in self.tokens if known[code] is None]:
            raise InputError(f"{name} has the unknown language {', '.join(unknown)}; known: {', '.join(order)}.")
        numbers = [-1 if code is None else order.index(code) for code in known.values()]
        data = self.dataset
        if isinstance(data, Blocks):
            data = copy.copy(data)
            data.numbers = np.asarray(numbers)
        elif isinstance(data, Dataset):  # sentence pairs
            data = data.map(
                lambda row: {"language_ids": [numbers[one] if one >= 0 else one for one in row["language_ids"]]},
                features=data.features, desc="number languages",
            )  # fmt: skip
        parts: Any = {part: getattr(self, part) for part in ("tokens", "documents", "lost")}
        renamed: Any = {part: {known[code]: value for code, value in of.items()} for part, of in parts.items()}
        return replace(self, dataset=data, languages=order, **renamed)


class Blocks:
    """Blocks of shuffled documents that stand one after another: views of their tokens, which lie on disk once.

    A row has `input_ids` and `language_ids`, `[block_size]`; `blocks["input_ids"]` is all rows of a column.

    Args:
        documents: `input_ids`, `language` and `tokens`, their number, of each document, in order; each data set begins
            a block, and its last tokens, less than a block, are left out.
        begin: the tokens that stand in place of each block's first ones.
    """

    column_names = ("input_ids", "language_ids")

    numbers: np.ndarray | None = None  # other ids of the languages

    def __init__(self, documents: Sequence[Dataset], block_size: int, begin: Sequence[int] = ()) -> None:
        self.documents = concatenate_datasets(list(documents)).with_format("arrow")
        self.block_size, self.begin = block_size, list(begin)
        sizes = [np.asarray(one.with_format("numpy")["tokens"], dtype=np.int64) for one in documents]
        whole = [int(size.sum()) for size in sizes]
        self.of_each = tuple(tokens // block_size for tokens in whole)
        first = np.cumsum([0, *whole[:-1]])
        starts = [start + block_size * np.arange(count) for start, count in zip(first, self.of_each, strict=True)]
        self._starts, self._ends = np.concatenate(starts), np.cumsum(np.concatenate(sizes))

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, place: int | str) -> Any:
        if isinstance(place, str):
            return [row[place] for row in self]
        start = int(self._starts[place])
        first, last = np.searchsorted(self._ends, [start, start + self.block_size - 1], side="right")
        rows, ends = self.documents[int(first) : int(last) + 1], self._ends[first : last + 1] - start
        skipped = rows["tokens"][0].as_py() - int(ends[0])
        ids = pc.list_flatten(rows["input_ids"]).slice(skipped, self.block_size).to_pylist()
        counts = np.diff(np.minimum(ends, self.block_size), prepend=0)
        languages = rows["language"].to_numpy()
        languages = languages if self.numbers is None else self.numbers[languages]
        return {
            "input_ids": [*self.begin, *ids[len(self.begin) :]], "language_ids": np.repeat(languages, counts).tolist(),
        }  # fmt: skip


def first_tokens(language: str, sizes: Iterable[int], wanted: int | None) -> tuple[int, int]:
    """How many first texts of these sizes together have at least `wanted` tokens, all by default, and their tokens;
    refuses texts that all together have fewer."""
    number = total = 0
    for number, size in enumerate(sizes, start=1):
        total += size
        if wanted is not None and total >= wanted:
            return number, total
    if wanted is None:
        return number, total
    raise too_few_tokens(language, total, wanted)


def too_few_tokens(language: str, found: int, wanted: int, where: str = "") -> InputError:
    return InputError(
        f"Language {language!r} has {found:,} tokens{where}, but {wanted:,} were asked for: give more text or ask for "
        "fewer."
    )


@checked
def pack_texts(
    texts: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    seed: int,
    documents: Mapping[str, int] | None = None,
    tokens_per_language: int | None = None,
    languages: Sequence[str] | None = None,
    groups: Sequence[Sequence[str]] | None = None,
    sides: Sequence[Sequence[str]] | None = None,
    replay: tuple[Sequence[str], float] | None = None,
    num_proc: int | None = None,
) -> PackedText:
    """Shuffles, mixes and packs documents into blocks of exactly `block_size` tokens.

    Where the tokenizer begins texts with begin-of-text tokens, so does every block, in place of its first tokens, the
    first of which is no target.

    Args:
        texts: documents of each language (column `text`).
        documents: number of documents to take of each language.
        tokens_per_language: number of tokens at which to stop taking whole documents.
        languages: the order of the language ids; that of `texts` by default.
        groups: languages that may share a block; all by default.
        sides: languages whose documents are taken until each side has equally many tokens, as many as the text allows.
        replay: languages, and their share of all tokens, in equal parts, of which whole documents are taken;
            `tokens_per_language` then counts for the other languages.
        num_proc: processes that tokenise.

    Raises:
        InputError: a language has fewer tokens than asked for, or the text of a group is less than one block.
    """
    check_named_once(list(texts))
    order = tuple(languages or texts)
    replayed, share = replay or ((), 0.0)
    encoded, tokens, lost = dict[str, Dataset](), dict[str, int](), {}

    def take(wanted: Mapping[str, int | None]) -> None:
        for language, most in wanted.items():
            number, tokens[language] = first_tokens(language, encoded[language]["tokens"], most)
            encoded[language] = encoded[language].select(range(number))

    for language, dataset in texts.items():
        dataset = dataset.shuffle(seed=seed)
        lost[language] = lost_text((row["text"] for row in dataset), tokenizer)
        most = len(dataset) if documents is None else min(documents[language], len(dataset))
        encoded[language] = _encoded(dataset.select(range(most)), tokenizer, order.index(language), language, num_proc)
    take({language: None if language in replayed else tokens_per_language for language in texts})
    with errors_at(f"replay_share is {share:g}"):
        take(dict.fromkeys(replayed, _replayed_tokens(tokens, replayed, share)) if replayed else {})
    if sides is not None:
        take(balanced_tokens(tokens, sides))
    mixed = []
    for group in [order] if groups is None else groups:
        members = [code for code in group if code in texts]
        _check_block(sum(tokens[code] for code in members), block_size, members)
        mixed.append(concatenate_datasets([encoded[code] for code in members]).shuffle(seed=seed))
    blocks, counts = Blocks(mixed, block_size, begin_tokens(tokenizer)), {code: len(of) for code, of in encoded.items()}
    return PackedText(blocks, order, tokens, counts, blocks.of_each, lost)


def _check_block(found: int, block_size: int, languages: Sequence[str]) -> None:
    if found < block_size:
        raise InputError(
            f"All text of {', '.join(languages)} together is {found:,} tokens, less than one block of {block_size}: "
            "give more text or a smaller block_size."
        )


def _encoded(dataset: Dataset, tokenizer: Any, number: int, language: str, num_proc: int | None) -> Dataset:
    """Turns `text` into `input_ids` (see `encode_documents`), how many they are (`tokens`) and the `language`'s id;
    says which special tokens the text has."""
    if not len(dataset):
        raise InputError(f"Language {language!r}: no row has text to train on or to score: give some.")

    def encode(batch: dict) -> dict:
        ids = encode_documents(batch["text"], tokenizer)
        return {"input_ids": ids, "tokens": list(map(len, ids)), "language": [number] * len(ids)}

    columns, desc = dataset.column_names, f"tokenize {language}"
    encoded = dataset.map(
        encode, batched=True, remove_columns=columns, features=_DOCUMENT, desc=desc, num_proc=num_proc
    )
    counted = pc.value_counts(pc.list_flatten(encoded.data["input_ids"])).to_pylist()
    found = {entry["values"]: entry["counts"] for entry in counted}
    around = [token for side in document_frame(tokenizer) for token in side]  # of every document
    names = special_tokens(tokenizer).items()
    say_special(
        f"language {language!r}", {name: found.get(at, 0) - around.count(at) * len(encoded) for at, name in names}
    )
    return encoded


def _replayed_tokens(tokens: Mapping[str, int], replayed: Sequence[str], share: float) -> int:
    """Tokens of each replayed language, for them to have a share of all tokens."""
    others = sum(count for language, count in tokens.items() if language not in replayed)
    return round(share / (1 - share) * others / len(replayed))


def amounts_of(
    available: Mapping[str, int],
    tokens_per_language: int | None = None,
    sides: Sequence[Sequence[str]] | None = None,
    replay: tuple[Sequence[str], float] | None = None,
) -> dict[str, int]:
    """Tokens of each language as `pack_texts` takes them, of so many. More than that come from reading text again."""
    replayed, share = replay or ((), 0.0)
    tokens = {code: count if code in replayed else tokens_per_language or count for code, count in available.items()}
    if replayed:
        tokens |= dict.fromkeys(replayed, _replayed_tokens(tokens, replayed, share))
    return tokens if sides is None else {**tokens, **balanced_tokens(tokens, sides)}


@checked
def collate_blocks(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch for the trainers: `input_ids`, `labels` (the rows' own, else all tokens) and, where the rows have them,
    `language_ids`, each `[batch, block_size]`."""
    return _batch(rows, ("input_ids", "labels", "language_ids"))


def collate_without_languages(rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """A batch for models without language ids: `input_ids`, `labels`, each `[batch, block_size]`."""
    return _batch(rows, ("input_ids", "labels"))


def _batch(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, torch.Tensor]:
    stacked = {
        name: torch.from_numpy(np.stack([np.asarray(row[name], dtype=np.int64) for row in rows]))
        for name in columns if name in rows[0]
    }  # fmt: skip
    if "labels" not in stacked:
        stacked["labels"] = stacked["input_ids"].clone()
    return stacked


def balanced_tokens(available: Mapping[str, int], sides: Sequence[Sequence[str]]) -> dict[str, int]:
    """Tokens of each language for a mix whose sides, such as old and new ones, have equally many, shared equally by the
    languages of a side. The language with the least text for its share limits the mix."""
    of_side = min(available[code] * len(side) for side in sides for code in side)
    return {code: of_side // len(side) for side in sides for code in side}


def review_documents(
    available: Mapping[str, int],
    old: Sequence[str],
    new: Sequence[str],
    old_documents: int | None = None,
    new_per_old: float = NEW_PER_OLD,
    fewer_documents: bool = False,
) -> dict[str, int]:
    """Documents of each language for the review stage: `n` of each old one, `new_per_old * n` of each new one (1 : 2).

    Args:
        available: available documents of each language.
        old_documents: `n`; by default the largest number for which every language has enough documents.
        fewer_documents: take this largest number, too, where a language has too few documents for `old_documents`.
    """
    most = min([available[code] for code in old] + [int(available[code] / new_per_old) for code in new])
    taken = max(most, 1) if old_documents is None else old_documents
    if fewer_documents:
        taken = max(min(taken, most), 1)
    wanted = dict.fromkeys(old, taken) | {code: max(1, round(taken * new_per_old)) for code in new}
    for code, count in wanted.items():
        if available[code] < count:
            raise InputError(
                f"Language {code!r} has {available[code]} documents, but the mix asks for {count}: give more text, or "
                f"set `fewer_documents: true`; the text allows {most} of each old language."
            )
    return wanted
