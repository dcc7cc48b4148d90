"""A small instruction set with answers that can be checked exactly: five formats, asked about text in any language.

Small models do not learn to copy words in a few hundred steps; they do learn to see digits, stops, lines and capitals.
"""

import random
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

# Roles in plain words: a small base has no tokens for them. An answer ends with the end-of-text token.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}User:\n{{ message['content'] }}\nAssistant:\n"
    "{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
# Words that consist only of letters, in running text, so that words are unambiguous.
_WORD = r"[^\W\d_]+"
_PHRASE = re.compile(rf"(?<!\S){_WORD}(?: {_WORD}){{3,}}(?=[\s.,;:]|$)")
_SHORTEST, _LONGEST, _MOST_LINES = 4, 6, 3


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
        question: the question, on a line before the text.
        frame: a regular expression for all answers, right or wrong.
        answer: computes the right answer for a text.
    """

    question: str
    frame: str
    answer: Callable[[str], str]


def _digit(text: str) -> str:
    return "yes" if any(character.isdigit() for character in text) else "no"


def _stop(text: str) -> str:
    return "yes" if text.endswith(".") else "no"


FORMATS = {
    "digit": Format("Is there a digit in this text? Say yes or no.", r"yes|no", _digit),
    "full stop": Format(
        "Does this text end with a full stop? Answer in brackets.", r"\[(yes|no)\]", lambda text: f"[{_stop(text)}]"
    ),
    "capitals": Format(
        "Is this text in capitals?",
        r"Answer: (yes|no)",
        lambda text: f"Answer: {'yes' if text.isupper() else 'no'}",
    ),
    "lines": Format("Count the lines of this text.", r"\d+ lines?\.", lambda text: _counted(text.count("\n") + 1)),
    "two answers": Format(
        "Is there a digit, and is there a full stop at the end? Give two numbered lines.",
        r"1\. (yes|no)\n2\. (yes|no)",
        lambda text: f"1. {_digit(text)}\n2. {_stop(text)}",
    ),
}


def _counted(lines: int) -> str:
    return f"{lines} line{'s' if lines > 1 else ''}."


def make_examples(documents: Iterable[str], count: int, seed: int, exclude: Collection[str] = ()) -> list[Example]:
    """`count` examples, with the formats in turn, each with its own phrase and a unique prompt.

    Args:
        documents: text with words between spaces.
        exclude: prompts to avoid.

    Raises:
        ValueError: the text has too few phrases.
    """
    rng = random.Random(seed)
    phrases = sorted({match for text in documents for match in _PHRASE.findall(text)})
    rng.shuffle(phrases)
    kinds, seen, examples = list(FORMATS), set(exclude), []
    for phrase in phrases:
        if len(examples) == count:
            break
        kind = kinds[len(examples) % len(kinds)]
        text = _varied(phrase.split(), kind == "capitals", rng)
        prompt = f"{FORMATS[kind].question}\n{text}"
        if prompt not in seen:
            seen.add(prompt)
            examples.append(Example(kind, prompt, FORMATS[kind].answer(text)))
    if len(examples) < count:
        raise ValueError(f"{len(phrases):,} phrases gave {len(examples):,} examples; {count:,} were asked for.")
    return examples


def _varied(words: list[str], capitals: bool, rng: random.Random) -> str:
    """The first words, half of the time with a number and with a full stop, on several lines, perhaps in capitals."""
    words = words[: rng.randint(_SHORTEST, _LONGEST)]
    if rng.random() < 0.5:
        words.insert(rng.randint(0, len(words)), str(rng.randint(1, 99)))
    ends = rng.sample(range(1, len(words)), rng.randint(1, _MOST_LINES) - 1)
    lines = [" ".join(words[start:stop]) for start, stop in pairwise([0, *sorted(ends), len(words)])]
    text = "\n".join(lines) + ("." if rng.random() < 0.5 else "")
    return text.upper() if capitals and rng.random() < 0.5 else text


def check(example: Example, output: str, stopped: bool) -> tuple[bool, bool]:
    """Whether an output has the asked frame, and whether it is the answer; neither if the model did not stop."""
    frame = stopped and re.fullmatch(FORMATS[example.kind].frame, output) is not None
    return frame, stopped and output == example.answer


def messages(example: Example) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Prompt and completion, as chats."""
    return [{"role": "user", "content": example.prompt}], [{"role": "assistant", "content": example.answer}]
