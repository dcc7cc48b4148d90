"""Turns sentences into tokens as each kind of translation model wants them: language codes, or the task in words."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from langcodes import Language, LanguageTagError

from ..errors import InputError
from .parallel import Pair, language_name
from .sources import names_language

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
    `translate English to Greek: ...`; the model of a single pair (Marian) gets the text alone. Marian's tokenizers name
    the model's source or target language: no sentence is translated into the one or from the other.

    The tokenizer itself stays as it is: saved afterwards, it has the languages that it had before.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._found: dict[str, str] = {}
        self.codes = _language_codes(tokenizer)
        # Whether the source names the target's language alone, or no language.
        self.of_target = hasattr(tokenizer, "supported_language_codes") or any("<" in code for code in self.codes)

        one_way = hasattr(tokenizer, "supported_language_codes")
        self._reads = getattr(tokenizer, "source_lang", None) if one_way else None
        self._writes = getattr(tokenizer, "target_lang", None) if one_way else None

    def translates(self, direction: Pair) -> bool:
        """False if a direction reads the language that the model writes, or writes the one that it reads."""
        source, target = direction
        return not (names_language(self._writes, source) or names_language(self._reads, target))

    def one_way(self) -> str:
        """For messages: what the model reads and writes."""
        return f"the model reads {self._reads!r} and writes {self._writes!r}, says its tokenizer"

    def check(self, directions: Iterable[Pair]) -> None:
        """Refuses directions that the model does not translate, and languages that the tokenizer has no code for.

        Raises:
            InputError: a direction is the wrong way round, or the tokenizer has language codes, but none for one of the
                languages.
        """
        for source, target in directions:
            if not self.translates((source, target)):
                raise InputError(f"{source}-{target} is not a direction of this model: {self.one_way()}.")
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
        for direction, of_direction in places.items():
            sources = self.sources([rows[place].source for place in of_direction], direction)
            targets = self.targets([rows[place].target for place in of_direction], direction)
            for place, source, target in zip(of_direction, sources, targets, strict=True):
                inputs[place], labels[place] = source, target
        return inputs, labels

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

    def start(self, direction: Pair) -> dict[str, int]:
        """The options of `generate` with which a translation begins: where the labels begin with the target's language,
        the first token is forced; where they end with it (the first mBART), it starts the decoder."""
        place = self.place_of_code(direction)
        if place is None:
            return {}
        option = "decoder_start_token_id" if place else "forced_bos_token_id"
        return {option: self.tokenizer.convert_tokens_to_ids(self._token(direction[1]))}

    def place_of_code(self, direction: Pair) -> int | None:
        """The place in the labels of the token that names the target's language: 0, or -1 at the end; None without
        such a token."""
        if not self.codes or self.of_target:
            return None
        (labels,) = self.targets([""], direction)
        code = self.tokenizer.convert_tokens_to_ids(self._token(direction[1]))
        return next((place for place in (0, -1) if labels and labels[place] == code), None)

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
    alike = {code: name for code, name in codes.items() if _same_language(name, language)}
    script = _script(language)
    matches = [code for code, name in alike.items() if _script(name) == script] or list(alike)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InputError(
            f"{language!r} may be {', '.join(sorted(matches))}, which {type_name(tokenizer)} tells apart: name one of "
            "them."
        )
    raise InputError(
        f"{type_name(tokenizer)} has no code for {language!r}, so the model cannot be told to read or write it; it has "
        f"{', '.join(sorted(codes)[:8])}{', ...' if len(codes) > 8 else ''}. If one of them is this language, call the "
        "language so; else use a model whose tokenizer knows it."
    )


def _same_language(code: str, language: str) -> bool:
    """Whether two codes name one language, in whichever standard; Norwegian is Bokmål, which most of its text is."""
    pair = [_language_of(code), _language_of(language)]
    return names_language(*pair) or names_language(*("nb" if names_language(one, "no") else one for one in pair))


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
