"""Ten short questions in an old language, which an expanded model should answer as its base does."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..asking import Answering, Asked, ask

QUESTIONS = (
    "What is the capital of France?", "How many days are there in a week?", "What colour is the sky on a clear day?",
    "Name three fruits.", "What do bees make?", "Which is larger, an elephant or a mouse?",
    "Write one sentence about the sea.", "What is two plus two?", "Why do we sleep?", "Give me a tip for cooking rice.",
)  # fmt: skip
_TOKENS = 24


@dataclass(frozen=True)
class ChatCheck:
    """The answers of the base, of the result, and of the result told the language, question by question."""

    questions: Sequence[str]
    base: list[str]
    result: list[str]
    told: list[str]

    @property
    def equal(self) -> float:
        """The share of questions that the result answers as the base does."""
        return sum(a == b for a, b in zip(self.base, self.result, strict=True)) / len(self.questions)

    def lines(self) -> list[str]:
        """The lines that a demo prints."""
        rows = zip(self.questions, self.base, self.result, self.told, strict=True)
        lines = [
            line
            for question, base, result, told in rows
            for line in (question, f"  base:   {base}", f"  result: {result}", f"  told:   {told}")
        ]
        return [*lines, f"chat: {100 * self.equal:.0f} % of the answers are the base's own"]


def check_chat(base: str | Path, result: str | Path, language: str) -> ChatCheck | None:
    """Asks both models in the base's chat template; None if it has none.

    Args:
        language: the questions' language, which the result is told the second time.
    """
    first = Asked.load(base)
    if not first.has_template:
        return None
    how = Answering(max_new_tokens=_TOKENS, chat=True)

    def answers(model: Asked, told: str | None) -> list[str]:
        (found,) = ask([model], QUESTIONS, how, told).values()
        return [" ".join(answer.text.split()) for answer in found]

    of_base = answers(first, None)
    del first
    second = Asked.load(result)
    return ChatCheck(QUESTIONS, of_base, answers(second, None), answers(second, language))
