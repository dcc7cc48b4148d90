"""Sentence pairs for an encoder-decoder: tokens of both sides, as each kind of translation model wants them, and their
languages, in rows and batches."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from langcodes import Language, LanguageTagError
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ..core.errors import InputError
from ..core.languages import check_named_once, named_in, names_language
from ..core.schema import checked
from .lost import SAMPLE, LostText, lost_text
from .packing import PackedText, first_tokens
from .rows import Pair, language_name, row_pairs
from .sources import LanguageText

UNKNOWN = -1  # language id of padding, and of a language that the model does not know
IGNORED = -100  # label of padding
_AT_ONCE = 512  # pairs tokenised at once
_CODE = "[a-z]{2,3}(_[A-Za-z]{2,4})?"
_ROW = Features(
    {"input_ids": List(Value("int32")), "labels": List(Value("int32")), "language_ids": List(Value("int16"))}
)


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
    `translate English to Greek: ...`; the model of a single pair (Marian) gets the text alone. Marian's tokenizers name
    the model's source or target language: no sentence is translated into the one or from the other.

    The tokenizer itself stays as it is: saved afterwards, it has the languages that it had before.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._found: dict[str, str] = {}
        self.codes = _language_codes(tokenizer)
        self._is_marian = hasattr(tokenizer, "supported_language_codes")
        # Whether the source names the target's language alone, or no language.
        self.of_target = self._is_marian or any("<" in code for code in self.codes)
        self._reads, self._writes = (
            getattr(tokenizer, name, None) if self._is_marian else None for name in ("source_lang", "target_lang")
        )

    def translates(self, direction: Pair) -> bool:
        """False if a direction reads the language that the model writes, or writes the one that it reads."""
        source, target = direction
        return not (names_language(self._writes, source) or names_language(self._reads, target))

    def one_way(self) -> str:
        """For messages: what the model reads and writes."""
        return f"the model reads {self._reads!r} and writes {self._writes!r}, says its tokenizer"

    def check(self, directions: Iterable[Pair]) -> None:
        """Refuses directions that the model does not translate, and languages for which its tokenizer lacks a code."""
        for source, target in directions:
            if not self.translates((source, target)):
                raise InputError(f"{source}-{target} is not a direction of this model: {self.one_way()}.")
            for language in (target,) if self.of_target else (target, source):
                self._name(language)

    def encode(self, rows: Sequence[SentencePair]) -> tuple[list[list[int]], list[list[int]]]:
        """The encoder's tokens of each row, and the labels."""
        inputs: list[list[int]] = [[] for _ in rows]
        labels: list[list[int]] = [[] for _ in rows]
        for direction in dict.fromkeys(row.direction for row in rows):
            places = [place for place, row in enumerate(rows) if row.direction == direction]
            sources = self.sources([rows[place].source for place in places], direction)
            targets = self.targets([rows[place].target for place in places], direction)
            for place, source, target in zip(places, sources, targets, strict=True):
                inputs[place], labels[place] = source, target
        return inputs, labels

    def fitting(
        self, rows: Sequence[SentencePair], longest: int | None
    ) -> Iterator[tuple[SentencePair, list[int], list[int]]]:
        """Yields each row with the encoder's tokens and the labels, if neither are more than `longest`."""
        for first in range(0, len(rows), _AT_ONCE):
            some = rows[first : first + _AT_ONCE]
            for row, source, target in zip(some, *self.encode(some), strict=True):
                if longest is None or max(len(source), len(target)) <= longest:
                    yield row, source, target

    def sources(self, sentences: Sequence[str], direction: Pair) -> list[list[int]]:
        """The encoder's tokens of sentences to be translated."""
        source, target = direction
        before = ""
        if self.of_target:
            before = f"{self._name(target)} " if self.codes else ""
        elif not self.codes:
            before = f"translate {self._name(source)} to {self._name(target)}: "
        with self._set_to(direction):
            return self.tokenizer([before + sentence for sentence in sentences], verbose=False).input_ids

    def targets(self, sentences: Sequence[str], direction: Pair) -> list[list[int]]:
        """The labels of translations."""
        with self._set_to(direction):
            return self.tokenizer(text_target=list(sentences), verbose=False).input_ids

    @contextmanager
    def _set_to(self, direction: Pair) -> Iterator[None]:
        """Inside, a tokenizer that is told both languages has those of a direction."""
        if self.of_target or not self.codes:
            yield
            return
        before = self.tokenizer.src_lang, self.tokenizer.tgt_lang
        self.tokenizer.src_lang, self.tokenizer.tgt_lang = map(self._name, direction)
        try:
            yield
        finally:
            self.tokenizer.src_lang, self.tokenizer.tgt_lang = before

    def lost(self, rows: Iterable[SentencePair], size: int = SAMPLE) -> dict[str, LostText]:
        """What the tokenizer loses of the first pairs, about `size` bytes of a side, by the sentence's language."""
        found: dict[str, LostText] = defaultdict(LostText)
        reads = {"use_source_tokenizer": True} if self._is_marian else {}
        for row in (row for row in rows if self.translates(row.direction)):
            with self._set_to(row.direction):
                source = self.tokenizer(row.source, add_special_tokens=False, verbose=False).input_ids
                target = self.tokenizer(text_target=row.target, add_special_tokens=False, verbose=False).input_ids
            found[row.source_language].add(row.source, source, self.tokenizer, **reads)
            found[row.target_language].add(row.target, target, self.tokenizer)
            if sum(one.size for one in found.values()) >= 2 * size:
                break
        return found

    def start(self, direction: Pair) -> dict[str, int]:
        """The options of `generate` with which a translation begins: where the labels begin with the target's language,
        the first token is forced; where they end with it (the first mBART), it starts the decoder."""
        place = self.place_of_code(direction)
        if place is None:
            return {}
        return {"decoder_start_token_id" if place else "forced_bos_token_id": self._code_id(direction[1])}

    def place_of_code(self, direction: Pair) -> int | None:
        """The place in the labels of the target language's token: 0, or -1 at the end; None without one."""
        if not self.codes or self.of_target:
            return None
        (labels,) = self.targets([""], direction)
        code = self._code_id(direction[1])
        return next((place for place in (0, -1) if labels and labels[place] == code), None)

    def _code_id(self, language: str) -> int:
        tokens, name = getattr(self.tokenizer, "lang_code_to_token", None) or {}, self._name(language)
        return self.tokenizer.convert_tokens_to_ids(tokens.get(name, name))

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
        return {token: token[2:-1] for token in tokenizer.get_vocab() if re.fullmatch(f"<2{_CODE}>", token)}
    listed = getattr(tokenizer, "lang_code_to_token", None) or getattr(tokenizer, "lang_code_to_id", None)
    names = map(str, listed or tokenizer.all_special_tokens)
    return {name: name for name in names if re.fullmatch(_CODE, name)}


def _nearest(language: str, codes: Mapping[str, str], tokenizer: str) -> str:
    """The tokenizer's code for a language: the same one, or another standard's; of several scripts, the usual one."""
    for code, name in codes.items():
        if language in (code, name):
            return code
    bare = re.split("[_-]", language)[0]  # `el` of `el_GR`, `ell_Grek`
    alike = {code: name for code, name in codes.items() if names_language(re.split("[_-]", name)[0], bare)}
    script = _script(language)
    matches = [code for code, name in alike.items() if _script(name) == script] or list(alike)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InputError(
            f"{language!r} may be {', '.join(sorted(matches))}, which the tokenizer ({tokenizer}) tells apart: name "
            "one of them."
        )
    raise InputError(
        f"the tokenizer ({tokenizer}) has no code for {language!r}, so the model cannot be told to read or write it; "
        f"it has {', '.join(sorted(codes)[:8])}{', ...' if len(codes) > 8 else ''}."
    )


def _script(code: str) -> str | None:
    """The script in a code, or the one in which its language is usually written."""
    try:
        return Language.get(code.replace("_XX", "").replace("_", "-")).maximize().script
    except LanguageTagError:
        return None


def sentence_pairs(dataset: Dataset | Mapping[str, Any]) -> list[SentencePair]:
    """The rows of `LanguageText.load_pairs`."""
    columns = (dataset[name] for name in SentencePair._fields)
    return [SentencePair(*values) for values in zip(*columns, strict=True)]


def pairs_of(translations: Iterable[Mapping[str, str | None]], language: str, name: str = "train_dataset") -> Dataset:
    """The sentence pairs to and from a language, at least one, of the column `translation` of the data set `name`."""
    rows = [
        row for number, sentences in enumerate(translations)
        for row in row_pairs({"translation": sentences}, language, f"{name}: row {number}")
    ]  # fmt: skip
    if not rows:
        raise InputError(f"{name}: no translation to or from {language!r}.")
    return Dataset.from_list(rows)


def texts_for(config: Any, sources: Mapping[str, LanguageText], seed: int | None = None) -> dict[str, Any]:
    """What a model reads of each language: sentence pairs, if it is an encoder-decoder, else documents; in the files'
    order, or in a random one that `seed` gives."""
    check_named_once(list(sources))
    texts: dict[str, Any] = {}
    for code, source in sources.items():
        dataset = source.load(config.is_encoder_decoder)
        dataset = dataset if seed is None else dataset.shuffle(seed=seed)
        texts[code] = sentence_pairs(dataset) if config.is_encoder_decoder else dataset["text"]
    return texts


def lost_of(source: LanguageText, tokenizer: Any, as_pairs: bool) -> LostText:
    """What a tokenizer loses of the beginnings of a local text; with `as_pairs`, for an encoder-decoder."""
    by_file = [beginning.rows for beginning in source.beginnings(as_pairs=as_pairs)]
    rows = (row for of_all in zip_longest(*by_file) for row in of_all if row is not None)  # some of every file
    return _lost_of_rows(rows, tokenizer, as_pairs, source.language)


def lost_of_each(texts: Mapping[str, Dataset], tokenizer: Any, as_pairs: bool, seed: int) -> dict[str, LostText]:
    """What a tokenizer loses of a sample of each language's documents, or of its sentence pairs."""
    return {code: _lost_of_rows(text.shuffle(seed=seed), tokenizer, as_pairs, code) for code, text in texts.items()}


def _lost_of_rows(rows: Iterable[Mapping[str, str]], tokenizer: Any, as_pairs: bool, language: str) -> LostText:
    if not as_pairs:
        return lost_text((row["text"] for row in rows), tokenizer)
    return PairEncoder(tokenizer).lost(SentencePair(**row) for row in rows).get(language, LostText())


@checked
def pack_pairs(
    texts: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    seed: int,
    documents: Mapping[str, int] | None = None,
    tokens_per_language: int | None = None,
    languages: Sequence[str] | None = None,
) -> PackedText:
    """The tokens of sentence pairs, language after language, each shuffled: rows with `input_ids`, `labels` and
    `language_ids`, the two ids of source and target. `tokens` counts both sides, and a block is a pair.

    Args:
        texts: sentence pairs to and from each language, as `LanguageText.load_pairs` reads them.
        block_size: most tokens of a side; longer pairs are left out.
        documents: number of pairs to take of each language, or fewer if fewer are short enough.
        tokens_per_language: number of tokens, of both sides, at which to stop taking pairs.
        languages: the order of the language ids; that of `texts` by default.

    Raises:
        InputError: the tokenizer has no code for a language, or a language has no pair that fits, or too few tokens.
    """
    order = tuple(languages or texts)
    encoder = PairEncoder(tokenizer)
    datasets, tokens, counts, lost = [], {}, {}, {}
    for language, dataset in texts.items():
        dataset = dataset.filter(lambda *pair: encoder.translates(pair), input_columns=[*SentencePair._fields[2:]])
        if not len(dataset):
            words = f"no sentence pair in a direction of the model: {encoder.one_way()}"
            raise InputError(f"Language {language!r}: {words}.")
        dataset = dataset.shuffle(seed=seed)
        lost[language] = _lost_of_rows(dataset, tokenizer, True, language)
        wanted = len(dataset) if documents is None else min(documents[language], len(dataset))
        fitting = _fitting(dataset, encoder, block_size, order, wanted, language)
        sides = (fitting.with_format("arrow")[name] for name in ("input_ids", "labels"))
        sizes = (len(source) + len(target) for source, target in zip(*sides, strict=True))
        counts[language], tokens[language] = first_tokens(language, sizes, tokens_per_language)
        datasets.append(fitting.select(range(counts[language])))
    return PackedText(concatenate_datasets(datasets), order, tokens, counts, tuple(map(len, datasets)), lost)


def _fitting(
    dataset: Dataset, encoder: PairEncoder, block_size: int, order: Sequence[str], wanted: int, language: str
) -> Dataset:
    """The tokens of the first `wanted` pairs that fit `block_size`."""

    def encode(batch: dict) -> dict:
        encoded = list(encoder.fitting(sentence_pairs(batch), block_size))
        return {
            "input_ids": [source for _, source, _ in encoded],
            "labels": [target for *_, target in encoded],
            "language_ids": [[numbers[code] for code in row.direction] for row, *_ in encoded],
        }

    codes = {code for side in SentencePair._fields[2:] for code in dataset.unique(side)}
    numbers = {code: order.index(known) if (known := named_in(code, order)) else UNKNOWN for code in codes}
    parts: list[Dataset] = []
    first = 0
    while sum(map(len, parts)) < wanted and first < len(dataset):
        # Where some pairs are too long, as many again and more.
        rows = dataset.select(range(first, min(max(wanted, 2 * first), len(dataset))))
        first += len(rows)
        encoder.check(set(zip(rows["source_language"], rows["target_language"], strict=True)))
        columns, desc = rows.column_names, f"tokenize {language}"
        parts.append(rows.map(encode, batched=True, remove_columns=columns, features=_ROW, desc=desc))
    fitting = concatenate_datasets(parts)
    if not len(fitting):
        raise InputError(
            f"Language {language!r}: each of its {len(dataset):,} sentence pairs is longer than block_size, "
            f"{block_size} tokens of a side: raise it, or give shorter texts."
        )
    return fitting.select(range(min(wanted, len(fitting))))


@checked
class PairCollator:
    """Makes batches of the rows of `pack_pairs`, for `RouterLossMixin` on any Trainer: `input_ids`, `attention_mask`
    and `language_ids`, each `[batch, source]`; `labels` and `decoder_language_ids`, each `[batch, target]`."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        sources, targets = ([row[name] for row in rows] for name in ("input_ids", "labels"))

        def languages(side: int, sentences: list[Any]) -> torch.Tensor:
            both = zip(rows, sentences, strict=True)
            return padded([[row["language_ids"][side]] * len(ids) for row, ids in both], UNKNOWN)

        return {
            "input_ids": padded(sources, self.pad_token_id),
            "attention_mask": padded([[1] * len(source) for source in sources], 0),
            "labels": padded(targets, IGNORED),
            "language_ids": languages(0, sources),
            "decoder_language_ids": languages(1, targets),
        }


def padded(rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
    """`[rows, longest]`, padded at the end."""
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=filler)


def check_pairs(source: LanguageText, tokenizer: Any = None) -> None:
    """Refuses an encoder-decoder's text, as far as its first row shows, without translations or in a language that the
    tokenizer, where it is at hand, has no code for."""
    pair = source.check(as_pairs=True)
    if pair is not None and tokenizer is not None:
        encoder, direction = PairEncoder(tokenizer), SentencePair(**pair).direction
        encoder.check(filter(encoder.translates, (direction, direction[::-1])))
