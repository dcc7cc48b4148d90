"""What models write: answers of a base and of the model made of it in the base's chat template, which may break while
bits per byte stay where they were; and samples of text."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from textwrap import shorten

from ..checkpoint.source import load_config, resolve_checkpoint
from ..checkpoint.tokenizer import load_tokenizer
from ..core.errors import InputError
from ..core.progress import Bar
from ..inference.asking import Answering, ChatModel

QUESTIONS: Mapping[str, Sequence[str]] = {
    "en": (
        "What is the capital of France?", "How many days are there in a week?", "Name three fruits.",
        "What colour is the sky on a clear day?", "What do bees make?", "Which is larger, an elephant or a mouse?",
        "Write one sentence about the sea.", "What is two plus two?", "Why do we sleep?",
        "Give me a tip for cooking rice.",
    ),
}  # fmt: skip
_TOKENS = 24
_LETTERS, _SAMPLED = 40, Answering(max_new_tokens=24)  # most of a sample's prompt, and of what follows


@dataclass(frozen=True)
class ChatCheck:
    """The answers to questions in one language, most probable token by token.

    Attributes:
        base, result: answers of the base, and of the model made of it.
        told: answers of that model where it is told the language; None if it cannot be.
    """

    language: str
    questions: list[str]
    base: list[str]
    result: list[str]
    told: list[str] | None

    @property
    def equal(self) -> float:
        """The share of questions that the result answers as the base does, word for word."""
        return sum(one == other for one, other in zip(self.base, self.result, strict=True)) / len(self.questions)

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """A table: header, and one row for each question."""
        told = {f"told {self.language}": self.told} if self.told is not None else {}
        columns = {"question": self.questions, "base": self.base, "result": self.result, **told}
        return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]

    def lines(self) -> list[str]:
        """The answers below each question, and the share of equal ones."""
        header, rows = self.rows()
        width = max(map(len, header[1:])) + 1
        answers = [
            line
            for question, *replies in rows
            for line in (question, *(f"  {n + ':':<{width}} {a}" for n, a in zip(header[1:], replies, strict=True)))
        ]
        return [*answers, f"chat in {self.language}: {self.equal:.0%} of the answers are the base's own"]


def without_chat(model: str) -> str | None:
    """Why a model of a folder or of the hub answers no questions; None if it does. Reads no weights."""
    folder = resolve_checkpoint(model, weights=False)
    if load_config(folder).is_encoder_decoder:
        return "is an encoder-decoder"
    return None if load_tokenizer(folder, model).chat_template else "its tokenizer has no chat template"


def check_chat(
    base: str, result: str, language: str, questions: Sequence[str], revision: str | None = None
) -> ChatCheck | None:
    """Asks both decoders, one after the other in memory; None if one has no chat template. `revision` is the base's."""
    if not questions:
        raise InputError(f"questions: there is no question in {language!r}: give some lines.")
    how = Answering(max_new_tokens=_TOKENS)

    def answers(model: ChatModel, told: str | None = None) -> list[str]:
        shown = Bar(questions, desc=f"ask {model.name} in {language}", unit="question", leave=False)
        asked = ([{"role": "user", "content": question}] for question in shown)
        return [" ".join(model.reply(messages, how, told).split()) for messages in asked]

    first = ChatModel.load(base, revision)
    if not first.has_template:
        return None
    of_base = answers(first)
    del first  # before the other one is loaded
    second = ChatModel.load(result)
    if not second.has_template:
        return None
    told = answers(second, language) if second.not_told(language) is None else None
    return ChatCheck(language, list(questions), of_base, answers(second), told)


@dataclass(frozen=True)
class Sample:
    """How models continue the same words.

    Attributes:
        prompt: the first words of held-out text in the language.
        continued: what each model wrote, by its name in results.
    """

    language: str
    prompt: str
    continued: dict[str, str] = field(default_factory=dict)


def begin_samples(texts: Mapping[str, Iterable[str]], groups: Iterable[Sequence[str]]) -> list[Sample]:
    """For the first language of each group that has text, a sample that no model has continued yet."""
    samples = []
    for codes in groups:
        code = next((code for code in codes if code in texts), None)
        if code is not None and (text := next(iter(texts[code]), "").strip()[: 10 * _LETTERS]):
            # Whole words, or letters where no space ends a word soon.
            samples.append(Sample(code, shorten(text, _LETTERS, placeholder="") or text[:_LETTERS]))
    return samples


def continue_samples(samples: Iterable[Sample], model: ChatModel) -> None:
    """Adds what the model writes; it writes nothing where the words alone fill its positions."""
    for sample in samples:
        with suppress(InputError):
            sample.continued[model.name] = " ".join(model.answer(sample.prompt, _SAMPLED).split())
