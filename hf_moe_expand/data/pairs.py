"""Sentences and their translations as an encoder-decoder reads them: language codes, tokens of both sides, batches."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from langcodes import Language, LanguageTagError

from ..errors import InputError
from .packing import PackedText
from .parallel import Pair, language_name
from .sources import LanguageText, names_language, row_pairs

UNKNOWN = -1  # language id of padding, and of a language that the model does not know
IGNORED = -100  # label of padding
_CODE = re.compile(r"[a-z]{2,3}(_[A-Za-z]{2,4})?")
_IN_FRONT = re.compile(r"<2[a-z]{2,3}(_[A-Za-z]{2,4})?>")


class SentencePair(NamedTuple):
    """A sentence, its translation, and their languages."""

    source: str
    target: str
    source_language: str
    target_language: str

    @property
    def direction(self) -> Pair:
        return self.source_language, self.target_language


class PairEncoder:
    """Turns sentences into tokens as the tokenizer's kind of model wants them.

    A tokenizer with language codes (M2M100, NLLB, mBART) gets those of source and target; the target's first token
    names its language. Where codes are tokens in front of the source (multilingual Marian's `>>el<<`, MADLAD-400's
    `<2el>`), it gets the target's. A tokenizer without codes (T5, ByT5, BART, Pegasus) gets the task in the text,
    `translate English to Greek: ...`; the model of a single pair (Marian) gets the text alone.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._found: dict[str, str] = {}
        self.codes = _language_codes(tokenizer)
        # Whether the source names the target's language alone, or no language.
        self.of_target = hasattr(tokenizer, "supported_language_codes") or any("<" in code for code in self.codes)

    def check(self, directions: Iterable[Pair]) -> None:
        """Refuses directions with a language that the tokenizer has no code for.

        Raises:
            InputError: the tokenizer has language codes, but none for one of the languages.
        """
        for source, target in directions:
            self._name(target)
            if not self.of_target:
                self._name(source)

    def encode(self, rows: Sequence[SentencePair]) -> tuple[list[list[int]], list[list[int]]]:
        """The encoder's tokens of each row, and the labels.

        Raises:
            InputError: see `check`.
        """
        inputs: list[list[int]] = [[] for _ in rows]
        labels: list[list[int]] = [[] for _ in rows]
        places: dict[Pair, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(row.direction, []).append(place)
        for direction, found in places.items():
            sources = self.sources([rows[place].source for place in found], direction)
            targets = self.targets([rows[place].target for place in found], direction)
            for place, source, target in zip(found, sources, targets, strict=True):
                inputs[place], labels[place] = source, target
        return inputs, labels

    def sources(self, sentences: Sequence[str], direction: Pair) -> list[list[int]]:
        """The encoder's tokens of sentences to be translated."""
        source, target = direction
        before = ""
        if self.of_target:
            before = f"{self._name(target)} " if self.codes else ""
        elif self.codes:
            self.tokenizer.src_lang = self._name(source)
        else:
            before = f"translate {self._name(source)} to {self._name(target)}: "
        return self.tokenizer([before + sentence for sentence in sentences], verbose=False).input_ids

    def targets(self, sentences: Sequence[str], direction: Pair) -> list[list[int]]:
        """The labels of translations."""
        if self.codes and not self.of_target:
            self.tokenizer.src_lang, self.tokenizer.tgt_lang = map(self._name, direction)
        return self.tokenizer(text_target=list(sentences), verbose=False).input_ids

    def start(self, direction: Pair) -> dict[str, int]:
        """The options of `generate` with which a translation begins: where the labels begin with the target's language,
        the first token is forced; where they end with it (the first mBART), it starts the decoder."""
        if not self.codes or self.of_target:
            return {}
        (labels,) = self.targets([""], direction)
        code = self.tokenizer.convert_tokens_to_ids(self._token(direction[1]))
        if labels[:1] == [code]:
            return {"forced_bos_token_id": code}
        return {"decoder_start_token_id": code} if labels[-1:] == [code] else {}

    def _token(self, language: str) -> str:
        """The token of a language."""
        tokens = getattr(self.tokenizer, "lang_code_to_token", None) or {}
        name = self._name(language)
        return tokens.get(name, name)

    def _name(self, language: str) -> str:
        """What the tokenizer calls a language; its English name where the tokenizer has no codes."""
        if language not in self._found:
            if self.codes:
                self._found[language] = _nearest(language, self.codes, type(self.tokenizer).__name__)
            else:
                self._found[language] = language if self.of_target else language_name(language)
        return self._found[language]


def _language_codes(tokenizer: Any) -> dict[str, str]:
    """The tokenizer's language codes, by the code that it is given; empty if it has none."""
    if hasattr(tokenizer, "supported_language_codes"):  # Marian's `>>el<<`
        return {code: code.strip("<>") for code in tokenizer.supported_language_codes}
    if not hasattr(tokenizer, "src_lang"):
        return {token: token[2:-1] for token in tokenizer.get_vocab() if _IN_FRONT.fullmatch(token)}
    listed = getattr(tokenizer, "lang_code_to_token", None) or getattr(tokenizer, "lang_code_to_id", None)
    names = list(listed) if listed else [str(token) for token in tokenizer.all_special_tokens]
    return {name: name for name in names if _CODE.fullmatch(name)}


def _nearest(language: str, codes: Mapping[str, str], tokenizer: str) -> str:
    """The tokenizer's code for a language: the same one, or another standard's; of several scripts, the usual one."""
    for code, name in codes.items():
        if language in (code, name):
            return code
    alike = {code: name for code, name in codes.items() if names_language(_language_of(name), _language_of(language))}
    script = _script(language)
    found = [code for code, name in alike.items() if _script(name) == script] or list(alike)
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(
            f"{language!r} may be {', '.join(sorted(found))}, which {type_name(tokenizer)} tells apart: name one of "
            "them."
        )
    raise InputError(
        f"{type_name(tokenizer)} has no code for {language!r}, so the model cannot be told to read or write it; it has "
        f"{', '.join(sorted(codes)[:8])}{', ...' if len(codes) > 8 else ''}. Use a model whose tokenizer knows it."
    )


def type_name(tokenizer: str) -> str:
    """How messages call the tokenizer."""
    return f"the tokenizer ({tokenizer})"


def _language_of(code: str) -> str:
    """`el` of `el_GR`, `ell` of `ell_Grek`."""
    return re.split("[_-]", code)[0]


def _script(code: str) -> str | None:
    """The script in a code, or the one in which its language is usually written."""
    try:
        tag = code.replace("_XX", "").replace("_", "-")
        return Language.get(tag).maximize().script
    except LanguageTagError:
        return None


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
