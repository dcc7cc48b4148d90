"""The last step, which scores every checkpoint of the run on held-out text."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...checkpoint.facts import Facts
from ...checkpoint.source import load_config
from ...core.errors import InputError, errors_at
from ...core.languages import UNDETERMINED
from ...core.recipe_paths import unset_variable
from ...data.held_out import check_held_out
from ...data.pairs import SentencePair
from ...data.sources import LanguageText, contents
from ...evaluation.chat import QUESTIONS, check_chat
from ...evaluation.perplexity import stream_for
from ...evaluation.report import in_percent, score_models
from ...stages.kind import StepResult
from ...stages.trial import Trial
from ..recipe import Recipe
from .step import Step

_PAIRS = 1000  # of a held-out text, of which one must fit the model


@dataclass
class Evaluate(Step):
    """Scores the base and each stage's model.

    Attributes:
        models: folder or hub id of each model, by its name in the results.
    """

    repeatable = True
    name = "evaluate"

    recipe: Recipe
    models: dict[str, str]

    def __post_init__(self) -> None:
        self.output = Path(self.recipe.output) / "evaluation.json"

    def inputs(self) -> dict[str, Any]:
        questions = {"questions": contents(files)} if (files := self._files()) else {}
        return {
            "evaluation": self.recipe.evaluation.model_dump(),
            "test": contents(self.recipe.test_sources),
            **questions,
        }

    def _unmeasured(self) -> list[str]:
        """The recipe's languages without held-out text."""
        return [code for code in self.recipe.training_sources if code not in {*self.recipe.test, UNDETERMINED}]

    def _files(self) -> dict[str, LanguageText]:
        """The files with questions of the chat check."""
        return {code: LanguageText(code, file) for code, file in (self.recipe.evaluation.questions or {}).items()}

    def _questions(self) -> dict[str, list[str]]:
        """The questions of the chat check, by old language."""
        if self.recipe.evaluation.questions is None:
            return {code: list(QUESTIONS[code]) for code in self.recipe.old if code in QUESTIONS}
        return {code: list(file.documents()) for code, file in self._files().items()}

    def check(self, trial: Trial) -> list[str]:
        """Refuses held-out text of whose beginning nothing would be scored, and that is training text too; says if
        `max_tokens` cuts it, and which languages have none."""
        recipe, most, lines = self.recipe, self.recipe.evaluation.max_tokens, list[str]()
        if codes := sorted(set(recipe.test).difference(*recipe.evaluated_languages)) if not recipe.joins else []:
            lines.append(
                f"test: {', '.join(codes)}: under neither `old` nor `new`, so scored as unnamed, to see that they lose "
                "nothing"
            )
        if codes := self._unmeasured():
            lines.append(f"test: no held-out text in {', '.join(codes)}: what becomes of it is not measured")
        for code, file in self._files().items():
            with errors_at(f"evaluation.questions.{code}"):
                if not trial.offline or not unset_variable(file.source):
                    file.check()
        if trial.config is None:
            return lines
        pairs = trial.config.is_encoder_decoder
        tokenizer = trial.tokenizer
        if recipe.evaluation.questions and (pairs or (tokenizer is not None and not tokenizer.chat_template)):
            raise InputError(
                "evaluation.questions: they are asked in the base's chat template, and "
                f"{'an encoder-decoder' if pairs else 'this base'} has none: leave them out."
            )
        sources = {key: text for key, text in recipe.keyed_sources() if not unset_variable(text.source)}
        tests = {key: text for key, text in sources.items() if key.startswith("test.")}
        training = {key: text for key, text in sources.items() if key not in tests}
        lines += check_held_out(tests, training, pairs)
        for key, source in tests.items() if not trial.offline else ():
            if source.files():
                rows = islice(source.pairs() if pairs else source.documents(), _PAIRS if pairs else 1)
                some = [SentencePair(**row) if isinstance(row, dict) else row for row in rows]
                with errors_at(key):
                    stream_for(trial.config, source.language, {source.language: some}, trial.tokenizer, most)
        return lines

    def _languages(self) -> list[list[str]]:
        """The base's languages, then those of each expansion: of a join, those that its packs name."""
        if not self.recipe.joins:
            return self.recipe.evaluated_languages
        final = next(Path(path) for path in reversed(self.models.values()) if Path(path).exists())
        return Facts(load_config(final)).history.by_expansion

    def work(self) -> StepResult:
        recipe = self.recipe
        present = {name: path for name, path in self.models.items() if name == "base" or Path(path).exists()}
        models = {name: (path, recipe.revision if name == "base" else None) for name, path in present.items()}
        result = score_models(models, recipe.test_sources, self._languages(), recipe.evaluation)
        first, *_, last = models.values()
        if len(models) > 1 and not load_config(Path(last[0])).is_encoder_decoder:
            asked = self._questions().items()
            compared = (check_chat(first[0], last[0], code, questions, first[1]) for code, questions in asked)
            result.chats = list(filter(None, compared))
        result.to_json(self.output)
        missing = [name for name in self.models if name not in present]
        gone = f" ({', '.join(missing)}: no longer kept)" if missing else ""
        chats = "; no chat: a model has no template" if self.recipe.evaluation.questions and not result.chats else ""
        chats += "".join(f"; chat in {c.language}: {c.equal:.0%} of answers are the base's" for c in result.chats)
        moved = {code: result.change([code]) or 0.0 for code in result.unnamed}
        unnamed = ""
        if moved and len(present) > 1:
            worst = max(moved, key=lambda code: moved[code])
            unnamed = f"; of unnamed languages {worst} changes most: {in_percent(moved[worst])}"
        without = f"; no held-out text in {', '.join(codes)}" if (codes := self._unmeasured()) else ""
        return StepResult(f"{len(recipe.test)} languages, {len(present)} models{gone}{unnamed}{chats}{without}")
