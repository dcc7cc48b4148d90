"""Gives languages tokens of their own at an expansion: their tokenizers, and the first values of their rows."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer

from ..core.errors import InputError, errors_at
from ..data.merges import OwnTokens, base_pieces, check_kind, grown_state, learn
from ..data.sources import LanguageText
from ..modeling.vocabulary import FOLDER, save_tokenizer
from ..planning.plan import Plan
from .reader import TORCH_DTYPES, tensor_bytes
from .source import text_config
from .stored import StoredModel
from .writer import OutputTensor, copy_of

FILES = f"{FOLDER}/*/*"  # in `COMPANIONS`
EMBEDDING, HEAD = "vocabulary.embedding.weight", "vocabulary.head.weight"


@dataclass(frozen=True)
class GrownVocabulary:
    """What a plan's languages get.

    Attributes:
        learned: what was learned of each language.
        pieces: for each new row, in order, the base's ids that stand for its token.
        sizes: the rows that each language adds to those of the languages before it, which may have its tokens too.
        tokenizers: by language.
    """

    learned: Mapping[str, OwnTokens]
    pieces: Sequence[Sequence[int]]
    sizes: dict[str, int]
    tokenizers: Mapping[str, Any]

    def first_rows(self, rows_of: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
        """The mean of the base's rows for each token's pieces, in float32; `rows_of` gives the base's rows of ids."""
        ids = sorted({number for pieces in self.pieces for number in pieces})
        rows, place = rows_of(ids).float(), {number: at for at, number in enumerate(ids)}
        return torch.stack([rows[[place[number] for number in pieces]].mean(0) for pieces in self.pieces])

    def files(self) -> dict[str, bytes]:
        """The tokenizers' files, by their names in a checkpoint."""
        with TemporaryDirectory() as folder:
            for code, tokenizer in self.tokenizers.items():
                save_tokenizer(tokenizer, Path(folder) / FOLDER / code)
            written = [file for file in Path(folder).rglob("*") if file.is_file()]
            return {file.relative_to(folder).as_posix(): file.read_bytes() for file in written}

    def recorded(self) -> dict[str, Any]:
        """The languages' tokens in a history."""
        return {
            code: {"tokens": len(own.tokens), "tokens_per_byte": list(own.tokens_per_byte)}
            for code, own in self.learned.items()
        }

    def lines(self) -> list[str]:
        """A line for each language."""
        return [
            f"{code}: {len(own.tokens):,} tokens of its own: {own.tokens_per_byte[0]:.3f} -> "
            f"{own.tokens_per_byte[1]:.3f} tokens a byte of the text from which they were learned"
            for code, own in self.learned.items()
        ]


def grow_vocabulary(
    plan: Plan, dense_config: Any, name: str | os.PathLike, of_base: Callable[[], Any]
) -> GrownVocabulary | None:
    """Learns the tokens of a plan's languages; None if it gives none.

    Args:
        name: the base's, for messages.
        of_base: gives its tokenizer.

    Raises:
        InputError: the base's tokenizer is of another kind, a text is missing or too little, or a token is not written
            by the base's tokens that stand for it.
    """
    if not plan.vocabulary:
        return None
    tokenizer, rows = of_base(), text_config(dense_config).vocab_size
    if tokenizer is None:
        raise InputError("vocabulary: tokens are learned with the base's tokenizer: pass it as processing_class.")
    check_kind(tokenizer, name)
    learned: dict[str, OwnTokens] = {}
    ids: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for code, wanted in plan.vocabulary.items():
        with errors_at(f"vocabulary.{code}"):
            texts = LanguageText(code, wanted.text).load()
            learned[code] = learn(tokenizer, (row["text"] for row in texts), wanted.size, code)
        more = [token for token in learned[code].tokens if token not in ids]
        sizes[code] = len(more)
        ids |= {token: rows + len(ids) + number for number, token in enumerate(more)}
    # All languages' tokenizers know all tokens, so that each writes what the model gives.
    tokenizers = {code: _with_tokens(tokenizer, own, ids) for code, own in learned.items()}
    pieces = base_pieces(tokenizer, ids)
    for one in tokenizers.values():
        if not tokenizer.get_vocab().items() <= one.get_vocab().items():
            raise InputError(f"{name}: its tokens would have other numbers beside new ones: leave the vocabulary out.")
        for (token, number), base_ids in zip(ids.items(), pieces, strict=True):
            if one.decode([number]) != tokenizer.decode(base_ids):
                raise InputError(f"{name}: its tokenizer does not write {token!r} as the base's tokens of it do.")
    return GrownVocabulary(learned, pieces, sizes, tokenizers)


def _with_tokens(tokenizer: Any, own: OwnTokens, ids: Mapping[str, int]) -> Any:
    """The base's tokenizer with a language's merges: its template, special tokens and settings are the base's."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        settings = Path(folder) / "tokenizer_config.json"
        fields = json.loads(settings.read_text("utf-8"))
        # Other classes make their own state of the vocabulary alone.
        settings.write_text(json.dumps({**fields, "tokenizer_class": "PreTrainedTokenizerFast"}), "utf-8")
        state = grown_state(tokenizer._tokenizer, own.merges, ids)
        (Path(folder) / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), "utf-8")
        made = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        made.name_or_path = ""
        return made


def matrices(network: Any) -> dict[str, str]:
    """The base's matrix to which each tensor of new rows belongs, by their names in a model, dense or expanded."""
    modules = {EMBEDDING: network.get_input_embeddings(), HEAD: network.get_output_embeddings()}
    names = {id(module): name for name, module in network.named_modules()}
    return {key: f"{names[id(module)]}.weight" for key, module in modules.items() if module is not None}


def longer(source: StoredModel, key: str, name: str) -> OutputTensor:
    """A tensor of the base, under a name, with the rows of the languages' own tokens behind it; a tensor without such
    rows as it is. The head's bias gets zeros."""
    stored, of_base = source[key], {matrix: rows for rows, matrix in matrices(source.network).items()}
    rows, added = of_base.get(key), source.config.num_tokens - source.config.vocab_size
    if rows is None and key.removesuffix("bias") + "weight" not in of_base:
        return copy_of(stored, name)
    more = source.tensor(rows) if rows is not None else torch.zeros(added, *stored.shape[1:])

    def data() -> Iterator[bytes]:
        yield from stored.finite_chunks()
        yield tensor_bytes(more.to(TORCH_DTYPES[stored.dtype]))

    return OutputTensor(name, stored.dtype, (stored.shape[0] + added, *stored.shape[1:]), data)


def refuse_vocabulary(config: Any, folder: str | os.PathLike, what: str) -> None:
    """Refuses a model whose languages have tokens of their own; the message says that it is not `what`."""
    if getattr(config, "vocabularies", None):
        raise InputError(
            f"{folder}: {', '.join(config.vocabularies)} has tokens of its own, with which a model is not {what} in "
            f"this version: take them out first (`hf-moe-expand shrink {folder} OUT --without-vocabulary`)."
        )
