"""Learns a language's own tokens: merges that go on from those of a byte-level BPE, whose tokens are their alphabet.

Each of them stands for fixed tokens of the base's: those that the base makes of its characters.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ..core.errors import InputError
from ..core.saying import say_once

MOST = 1 << 26  # characters of a language's text that are read
_TWICE = 2  # a pair that stands once in the text is no token
_LETTERS = 0x10000  # the first of the code points that stand for the base's tokens: no blank is among them

Pair = tuple[str, str]


@dataclass(frozen=True)
class OwnTokens:
    """What is learned of a language.

    Attributes:
        merges: in order.
        tokens: the tokens that they make and the base does not have, in order.
        tokens_per_byte: of the text from which they were learned, with the base's tokens alone and with these.
    """

    merges: list[Pair]
    tokens: list[str]
    tokens_per_byte: tuple[float, float]


def check_kind(tokenizer: Any, name: Any) -> None:
    """Refuses a tokenizer whose merges cannot go on; messages call the model `name`."""
    backend = getattr(tokenizer, "_tokenizer", None)
    if why := _obstacle(json.loads(backend.to_str())) if isinstance(backend, Tokenizer) else "it has no tokenizer.json":
        raise InputError(
            f"{name}: a language gets tokens of its own where the base's tokenizer is a byte-level BPE, as those of "
            f"GPT-2, Llama 3, Qwen and SmolLM2 are, but {why}: leave the vocabulary out."
        )


def _obstacle(state: dict) -> str | None:
    """Why the merges of a tokenizer's state cannot go on; None if they can."""
    model = state["model"]
    if model["type"] != "BPE":
        kind = {"Unigram": "a unigram model, of SentencePiece"}.get(model["type"], f"a {model['type']} model")
        return f"this one is {kind}"
    normalizers, cuts = (_steps(state[name], f"{name}s") for name in ("normalizer", "pre_tokenizer"))
    if model.get("byte_fallback") or "ByteLevel" not in cuts:
        return "this one is a BPE of characters, as SentencePiece makes it"
    if changes := [step for step in normalizers if step != "NFC"]:
        return f"this one changes the text before it cuts it ({', '.join(changes)}), so that tokens are not the text's"
    names = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    return next((f"this one has a {name} ({model[name]!r})" for name in names if model.get(name)), None)


def _steps(step: dict | None, inside: str) -> list[str]:
    """The types of a normalizer or of a pre-tokenizer, one after the other."""
    if step is None:
        return []
    inner = step.get(inside, step.get("pretokenizers"))
    return [step["type"]] if inner is None else [one for part in inner for one in _steps(part, inside)]


def learn(tokenizer: Any, texts: Iterable[str], size: int, language: str) -> OwnTokens:
    """The first `size` tokens that a language's text gives.

    Raises:
        InputError: the text gives fewer.
    """
    backend: Tokenizer = tokenizer._tokenizer
    words, read = _words(backend, texts, language)
    known = backend.get_vocab(with_added_tokens=True)
    pieces = {word: [token.value for token in backend.model.tokenize(word)] for word in words}
    whole = [word for word, parts in pieces.items() if "".join(parts) == word]  # else a byte has no token
    letters = {part: chr(_LETTERS + n) for n, part in enumerate(dict.fromkeys(chain(*(pieces[w] for w in whole))))}
    parts_of = {letter: part for part, letter in letters.items()}
    spelled = Tokenizer(models.BPE())
    spelled.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Different merges may make one token, as `a bc` and `ab c` do.
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + 2 * size, min_frequency=_TWICE, show_progress=False, special_tokens=[]
    )
    spelled.train_from_iterator(
        (f"{''.join(letters[part] for part in pieces[word])} " * words[word] for word in whole), trainer
    )
    merges, own = dict[Pair, None](), dict[str, None]()
    for left, right in json.loads(spelled.to_str())["model"]["merges"]:
        pair = "".join(map(parts_of.__getitem__, left)), "".join(map(parts_of.__getitem__, right))
        token = "".join(pair)
        if token not in known and token not in own and len(own) == size:
            break
        merges[pair] = None
        if token not in known:
            own[token] = None
    if len(own) < size:
        raise InputError(
            f"Language {language!r}: its text gives {len(own):,} tokens of its own (parts of words that stand in it "
            f"more than once), but {size:,} were asked for: give more text, or ask for {len(own):,} or fewer."
        )
    grown = Tokenizer.from_str(
        json.dumps(grown_state(backend, list(merges), {token: len(known) + number for number, token in enumerate(own)}))
    )
    before = sum(count * len(pieces[word]) for word, count in words.items())
    after = sum(count * len(grown.model.tokenize(word)) for word, count in words.items())
    return OwnTokens(list(merges), list(own), (round(before / read, 4), round(after / read, 4)))


def _words(backend: Tokenizer, texts: Iterable[str], language: str) -> tuple[Counter[str], int]:
    """How often each word stands in the first texts, in the alphabet of bytes, and the bytes of these texts."""
    words, characters, size = Counter[str](), 0, 0
    for text in texts:
        if characters >= MOST:
            say_once(f"language {language!r}: its tokens are learned from the first {characters:,} characters")
            break
        characters, size = characters + len(text), size + len(text.encode())
        text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        words.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text))  # type: ignore[union-attr]
    return words, max(size, 1)


def grown_state(backend: Tokenizer, merges: Iterable[Pair], ids: Mapping[str, int]) -> dict[str, Any]:
    """The state of a tokenizer that goes on with `merges`, and knows the tokens `ids` by their numbers."""
    state = json.loads(backend.to_str())
    model = state["model"]
    as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
    model["merges"] += [" ".join(pair) if as_text else list(pair) for pair in merges]
    # Added tokens that the model's own vocabulary lacks (Qwen's, Llama 3's) would get new numbers behind it.
    model["vocab"] |= {token["content"]: token["id"] for token in state["added_tokens"]} | dict(ids)
    return state


def base_pieces(tokenizer: Any, tokens: Iterable[str]) -> list[list[int]]:
    """The base's ids that stand for each token.

    Raises:
        InputError: a token is not what these ids write.
    """
    backend, found = tokenizer._tokenizer, []
    for token in tokens:
        pieces = backend.model.tokenize(token)
        if "".join(piece.value for piece in pieces) != token:
            raise InputError(
                f"The base's tokenizer has no tokens for the bytes of {token!r}: leave the vocabulary out."
            )
        found.append([piece.id for piece in pieces])
    return found
