"""Reads one language's text for a stream: shards in a seeded order, in shuffled windows, from any place; and counts
what passes."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import Any, Literal, NoReturn

import numpy as np
from tqdm.auto import tqdm

from ..core.errors import InputError, printable
from .lost import LostText, lost_text
from .places import UnreachableError
from .rows import LeftOut, Row, counted, judged
from .sources import Beginning, LanguageText, Shard, all_left_out, beginning
from .tokens import document_frame, encode_documents, say_special, special_tokens, tokens_of

OnBadShard = Literal["stop", "skip"]
Counts = Mapping[str, Mapping[str, int]]

COUNTS = ("seen", "left_out", "lost", "special", "bad")
_WINDOW, _CHARACTERS = 1000, 8 << 20  # rows and characters of a window, whichever comes first
_AT_ONCE, _CHARACTERS_AT_ONCE = 64, 32 << 10  # of documents that are tokenised at once, while no batch goes out
_SHARDS, _SAMPLE = 8, 2 << 20  # shards and characters by which the amount of text is estimated
_LOST_SAMPLE = 4096  # characters of a document in each window that are looked at for lost text
_NAMED = 8  # bad shards in a line


@dataclass
class Bookmark:
    """Where a reader is.

    Attributes:
        unit: a shard, or every n-th row of it, counted over all passes.
        window, row: the window in the unit, and the row after which it begins.
        document, token: the document in the shuffled window, and how many of its tokens are taken; 0 where the window
            is still to be read.
    """

    unit: int
    window: int = 0
    row: int = 0
    document: int = 0
    token: int = 0


def units_of(shards: Sequence[Shard], readers: int) -> list[tuple[int, int, int]]:
    """Shard, part and number of parts of each unit, from large to small. A shard that is more than a quarter of a
    reader's share has a part for each reader, which has every n-th row: else some would begin the next pass while
    others read what is left of this one. Shards of unknown size are taken to be of one size."""
    known = [shard.size for shard in shards if shard.size is not None]
    sizes = known if len(known) == len(shards) else [1] * len(shards)
    most = sum(sizes) / readers / 4
    parts = [readers if size > most else 1 for size in sizes]
    units = [(one, part, parts[one]) for one in range(len(shards)) for part in range(parts[one])]
    return sorted(units, key=lambda unit: -sizes[unit[0]] / unit[2])


def random_numbers(seed: int, *purpose: int) -> np.random.Generator:
    """A generator that depends on these numbers alone."""
    return np.random.default_rng([seed, *purpose])


class Reader:
    """The tokens of a language that one of several readers takes, without end.

    Args:
        number: the language's id.
        state: the place in the unit at hand (`open`, a list of one or none), the unit after it (`next`), and what was
            counted (`counts`).
        readers: number of readers, among whom the units are dealt in turn.
        says: whether this reader says that the text is read again.

    Raises:
        InputError: from `take`: a shard is bad and none are skipped, a place does not answer, or there is no text.
    """

    def __init__(
        self, language: str, number: int, shards: Sequence[Shard], tokenizer: Any, seed: int, on_bad_shard: OnBadShard,
        state: Mapping[str, Any], readers: int, says: bool,
    ) -> None:  # fmt: skip
        self.language, self.number, self.shards = language, number, shards
        self.tokenizer, self.seed, self.on_bad_shard = tokenizer, seed, on_bad_shard
        self.readers, self.says = readers, says
        self._units = units_of(shards, readers)
        self.units = len(self._units)  # of a pass
        self._order: tuple[int, list[int]] = -1, []  # of the units, in the pass at hand
        self.open, self.next = [Bookmark(*place) for place in state["open"]], state["next"]
        self.counts = {name: Counter(state["counts"].get(name, {})) for name in COUNTS}
        frame = [token for side in document_frame(tokenizer) for token in side]
        self._special = {at: (name, frame.count(at)) for at, name in special_tokens(tokenizer).items()}
        self._rows: Iterator[Row] | None = None  # of the shard at hand; None at its end
        self._end = 0  # the last row of the window
        self._texts: list[str] | None = None  # of the window
        self._tokens: dict[int, np.ndarray] = {}  # of some of them
        self._has_text = bool(self.open)  # whether the unit at hand gave a document
        self._empty: set[int] = set()  # units without documents, since the last one with some

    def state(self) -> dict[str, Any]:
        """What another reader goes on from; JSON."""
        counts = {name: dict(counter) for name, counter in self.counts.items()}
        return {"open": [astuple(place) for place in self.open], "next": self.next, "counts": counts}

    def take(self, size: int) -> np.ndarray:
        """The next tokens."""
        taken, filled = np.empty(size, dtype=np.int32), 0
        while filled < size:
            document = self._document()
            place, seen = self.open[0], self.counts["seen"]
            if not place.token:
                seen["documents"] += 1
                for at, (name, around) in self._special.items():
                    if (found := int((document == at).sum()) - around) > 0:
                        self.counts["special"][name] += found
            piece = document[place.token : place.token + size - filled]
            taken[filled : filled + len(piece)] = piece
            place.token, filled = place.token + len(piece), filled + len(piece)
            seen["tokens"] += len(piece)
            if place.unit >= self.units:
                seen["repeated"] += len(piece)
        return taken

    def _document(self) -> np.ndarray:
        """The tokens of the document at hand, or of the next one where all of them are taken."""
        while True:
            if not self.open:
                if self.says and self.next - self.readers < self.units <= self.next:
                    say(f"{self.language}: all of its text was read once; it is read again")
                self.open.append(Bookmark(self.next))
                self.next += self.readers
            place = self.open[0]
            if self._texts is None:
                self._texts, self._tokens = self._read(place), {}
                self._has_text |= bool(self._texts)
            if place.document < len(self._texts):
                document = self._tokenised(place.document)
                if place.token < len(document):
                    return document
                place.document, place.token = place.document + 1, 0
            elif self._rows is None:
                self._close(place)
            else:
                place.window, place.row, place.document, self._texts = place.window + 1, self._end, 0, None

    def _close(self, place: Bookmark) -> None:
        """Ends a unit; refuses text of which no unit has a document."""
        if self._has_text:
            self._empty.clear()
        else:
            self._empty.add(self._unit_of(place)[1])
        if len(self._empty) == self.units:
            found = [str(LeftOut(self.counts["left_out"])), f"{counted(len(self.counts['bad']), 'bad shard')} left out"]
            raise InputError(f"{self.language}: its text has no document in this language ({'; '.join(found)}).")
        self.open.pop(0)
        self._texts, self._has_text = None, False

    def _unit_of(self, place: Bookmark) -> tuple[int, int]:
        """The pass, and the number of the unit. Readers take units in turn; those that follow one another are of like
        sizes."""
        turn, number = divmod(place.unit, self.units)
        if self._order[0] != turn:
            numbers = random_numbers(self.seed, 1, self.number, turn)
            ends = range(self.readers, self.units, self.readers)
            rounds = [numbers.permutation(alike) for alike in np.split(np.arange(self.units), ends)]
            self._order = turn, np.concatenate([rounds[at] for at in numbers.permutation(len(rounds))]).tolist()
        return turn, self._order[1][number]

    def _read(self, place: Bookmark) -> list[str]:
        """The documents of the window at a place, in their order."""
        turn, unit = self._unit_of(place)
        at, part, parts = self._units[unit]
        shard = self.shards[at]
        is_new = place.token == 0  # else the window of a resumed reader, which is counted already
        left_out = LeftOut()
        texts: list[str] = []
        try:
            if self._rows is None:
                self._rows, self._end = shard.rows(place.row), place.row
            self._read_window(shard, part, parts, texts, left_out)
        except InputError as error:
            if self.on_bad_shard == "stop" or isinstance(error, UnreachableError):
                _refuse(error)
            self._rows = None
            if is_new:
                self.counts["bad"][shard.name] += 1
                say(f"{self.language}: left out from here: {error}")
        if is_new:
            self.counts["left_out"] += left_out
            if texts:
                lost = lost_text([texts[0][:_LOST_SAMPLE]], self.tokenizer)
                self.counts["seen"]["looked_at"] += lost.size
                self.counts["lost"] += lost.characters
        order = random_numbers(self.seed, 2, self.number, turn, unit, place.window).permutation(len(texts))
        return [texts[one] for one in order]

    def _read_window(self, shard: Shard, part: int, parts: int, texts: list[str], left_out: LeftOut) -> None:
        rows = size = 0
        assert self._rows is not None
        for row in self._rows:
            self._end = row.number
            if row.number % parts != part:
                continue
            found, reason = judged(row.content, self.language, f"{shard.name}:{row.number}")
            rows, size = rows + 1, size + len(row.content.get("text") or "")
            left_out.update([reason] * (not found))
            texts += [document["text"] for document in found]
            if rows == _WINDOW or size >= _CHARACTERS:
                return
        if not self._end:
            raise InputError(f"{shard.name}: is empty.")
        self._rows = None

    def _tokenised(self, number: int) -> np.ndarray:
        if number not in self._tokens:
            assert self._texts is not None
            some = self._texts[number : number + _AT_ONCE]
            before = accumulate(map(len, some), initial=0)
            some = [text for text, size in zip(some, before, strict=False) if size < _CHARACTERS_AT_ONCE]
            ids = encode_documents(some, self.tokenizer)
            self._tokens = {number + one: np.array(row, dtype=np.int32) for one, row in enumerate(ids)}
        return self._tokens[number]


def say(line: str) -> None:
    """Says a line at once, on any rank and in any of its workers."""
    tqdm.write(printable(line), file=sys.stderr)


def summed(counts: Iterable[Counts]) -> dict[str, dict[str, int]]:
    """The sum of what several readers of a language counted."""
    found: dict[str, Counter[str]] = {name: Counter() for name in COUNTS}
    for one in counts:
        for name, counter in one.items():
            found[name].update(counter)
    return {name: dict(counter) for name, counter in found.items()}


def passed_line(language: str, counts: Counts) -> str:
    """What passed of a language's text, and what was left out, lost or read again."""
    seen, bad = counts["seen"], sorted(counts["bad"])
    said = [f"{seen.get('tokens', 0):,} tokens of {counted(seen.get('documents', 0), 'document')} passed"]
    if repeated := seen.get("repeated", 0):
        said.append(f"{repeated:,} of them again")
    if left_out := LeftOut(counts["left_out"]):
        said.append(str(left_out))
    if bad:
        more = f" and {len(bad) - _NAMED:,} others" if len(bad) > _NAMED else ""
        said.append(f"{counted(len(bad), 'bad shard')} left out: {', '.join(bad[:_NAMED])}{more}")
    if lost := LostText(seen.get("looked_at", 0), Counter(counts["lost"])).lost:
        said.append(f"the tokenizer lost {lost:,} of {seen['looked_at']:,} bytes that were looked at")
    say_special(f"language {language!r}", counts["special"])
    return f"{language}: {'; '.join(said)}"


def _beginnings(
    text: LanguageText, shards: Sequence[Shard], on_bad_shard: OnBadShard
) -> Iterator[tuple[Shard, Beginning]]:
    """The documents at the beginning of some shards."""
    some = [shards[at] for at in sorted({*np.linspace(0, len(shards) - 1, _SHARDS).astype(int).tolist()})]
    for shard in some:
        try:
            found = beginning(shard, text.language, False, _SAMPLE // len(some), on_bad_shard == "skip")
        except InputError as error:
            _refuse(error)
        yield shard, found


def _refuse(error: InputError) -> NoReturn:
    if isinstance(error, UnreachableError):
        raise error
    raise InputError(
        f"{error} Mend or remove it, or leave out what cannot be read with `on_bad_shard: skip`."
    ) from None


def sample(text: LanguageText, on_bad_shard: OnBadShard, seed: int) -> list[str]:
    """Documents from the beginnings of some shards, shuffled; see `estimated`."""
    found = [one for _, one in _beginnings(text, text.shards(), on_bad_shard)]
    texts = [row["text"] for one in found for row in one.rows]
    if not texts:
        raise text.no_text(all_left_out(found))
    return [texts[at] for at in random_numbers(seed).permutation(len(texts))]


def estimated(
    text: LanguageText, shards: Sequence[Shard], tokenizer: Any, on_bad_shard: OnBadShard
) -> tuple[int | None, LostText]:
    """About how many tokens a text has, by the beginnings of some shards; None where the sizes are not known. Besides,
    what the tokenizer loses of them.

    Raises:
        InputError: a shard is bad, unless such are skipped; or no shard has text in the language.
    """
    tokens, size, lost, seen = 0.0, 0, LostText(), list[Beginning]()
    for shard, found in _beginnings(text, shards, on_bad_shard):
        seen.append(found)
        size += shard.size or 0
        tokens += tokens_of(found, tokenizer)
        loses = lost_text((row["text"] for row in found.rows[: _SHARDS * 8]), tokenizer)
        lost = LostText(lost.size + loses.size, lost.characters + loses.characters)
    if not tokens and len(seen) == len(shards):
        raise text.no_text(all_left_out(seen))
    known = [shard.size for shard in shards if shard.size is not None]
    return (int(tokens / max(size, 1) * sum(known)) if len(known) == len(shards) else None), lost
