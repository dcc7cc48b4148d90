"""A small instruction set with answers that can be checked exactly: five formats, filled with words of any text."""

import random
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

# Roles in plain words: a small base has no tokens for them. An answer ends with the end-of-text token.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}User:\n{{ message['content'] }}\nAssistant:\n"
    "{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
# Words of letters alone in running text, so that what a word is leaves no doubt.
_WORD = r"[^\W\d_]+"
_PHRASE = re.compile(rf"(?<!\S){_WORD}(?: {_WORD}){{3,}}(?=[\s.,;:]|$)")
_SHORTEST, _LONGEST = 4, 6


@dataclass(frozen=True)
class Example:
    """An instruction and its answer; `kind` is a key of `FORMATS`."""

    kind: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Format:
    """One kind of instruction.

    Attributes:
        frame: a regular expression for the whole answer, whatever its words.
        ask: of a phrase's words, another phrase's words and a random generator makes prompt and answer.
    """

    frame: str
    ask: Callable[[list[str], list[str], random.Random], tuple[str, str]]


def _first(words: list[str], _: list[str], __: random.Random) -> tuple[str, str]:
    return f"Answer with the first word of this text.\n{' '.join(words)}", f"Answer: {words[0]}"


def _last(words: list[str], _: list[str], __: random.Random) -> tuple[str, str]:
    return f"Give the last word of this text in brackets.\n{' '.join(words)}", f"[{words[-1]}]"


def _twice(words: list[str], _: list[str], __: random.Random) -> tuple[str, str]:
    said = " ".join(words[:2])
    return f"Say this twice.\n{said}", f"{said}, {said}"


def _contains(words: list[str], others: list[str], rng: random.Random) -> tuple[str, str]:
    word = rng.choice(rng.choice((words, others)))
    answer = "yes" if word in words else "no"
    return f"Is the word {word} in this text? Say yes or no.\n{' '.join(words)}", answer


def _numbered(words: list[str], _: list[str], __: random.Random) -> tuple[str, str]:
    lines = [f"{number}. {word}" for number, word in enumerate(words[:3], start=1)]
    return f"Number these words, one a line.\n{' '.join(words[:3])}", "\n".join(lines)


FORMATS = {
    "first word": Format(r"Answer: \S+", _first),
    "last word": Format(r"\[[^\s\[\]]+\]", _last),
    "twice": Format(r"[^\s,]+ [^\s,]+, [^\s,]+ [^\s,]+", _twice),
    "yes or no": Format(r"yes|no", _contains),
    "numbered": Format(r"1\. \S+\n2\. \S+\n3\. \S+", _numbered),
}


def make_examples(documents: Iterable[str], count: int, seed: int, exclude: Collection[str] = ()) -> list[Example]:
    """`count` examples, the formats in turn, each with a phrase of its own and a prompt that no other has.

    Args:
        documents: text with words between spaces.
        exclude: prompts that may not be made.

    Raises:
        ValueError: the text has too few phrases.
    """
    rng = random.Random(seed)
    phrases = sorted({match for text in documents for match in _PHRASE.findall(text)})
    rng.shuffle(phrases)
    kinds, seen, examples = list(FORMATS), set(exclude), []
    for index, phrase in enumerate(phrases):
        if len(examples) == count:
            break
        words = phrase.split()[: rng.randint(_SHORTEST, _LONGEST)]
        others = phrases[index - 1].split()
        kind = kinds[len(examples) % len(kinds)]
        prompt, answer = FORMATS[kind].ask(words, others, rng)
        if prompt not in seen:
            seen.add(prompt)
            examples.append(Example(kind, prompt, answer))
    if len(examples) < count:
        raise ValueError(f"{len(phrases):,} phrases gave {len(examples):,} examples; {count:,} were asked for.")
    return examples


def check(example: Example, output: str, stopped: bool) -> tuple[bool, bool]:
    """Whether an output has the asked frame, and whether it is the answer; neither if the model did not stop."""
    frame = stopped and re.fullmatch(FORMATS[example.kind].frame, output) is not None
    return frame, stopped and output == example.answer


def messages(example: Example) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Prompt and completion, as chats."""
    return [{"role": "user", "content": example.prompt}], [{"role": "assistant", "content": example.answer}]


def share(flags: Sequence[bool]) -> float:
    """How many are true, from 0 to 1."""
    return sum(flags) / len(flags)
