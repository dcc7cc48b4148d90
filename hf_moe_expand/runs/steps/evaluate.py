"""The last step, which scores every checkpoint of the run on held-out text."""

from itertools import islice
from pathlib import Path
from typing import Any

from ...checkpoint.facts import Facts
from ...checkpoint.source import load_config
from ...checkpoint.tuned import codes_of
from ...core.errors import InputError, errors_at
from ...core.languages import UNDETERMINED
from ...core.recipe_paths import unset_variable
from ...data.held_out import check_held_out
from ...data.pairs import SentencePair
from ...data.sources import LanguageText, contents
from ...evaluation.chat import QUESTIONS, check_chat
from ...evaluation.perplexity import stream_for
from ...evaluation.report import in_percent, score_models
from ...stages.kind import StepResult, Trial
from ..recipe import Recipe
from .step import Step

_PAIRS = 1000  # of a held-out text, of which one must fit the model


def evaluate_step(recipe: Recipe, models: dict[str, str]) -> Step:
    """Scores the base and each stage's model; `models` has the folder or hub id of each, by its name in the results."""
    output, settings = Path(recipe.output) / "evaluation.json", recipe.evaluation
    files = {code: LanguageText(code, file) for code, file in (settings.questions or {}).items()}
    known = dict.fromkeys([*recipe.training_sources, *(code for codes in recipe.tuned for code in codes_of(codes))])
    unmeasured = [code for code in known if code not in {*recipe.test, UNDETERMINED}]

    def inputs() -> dict[str, Any]:
        questions = {"questions": contents(files)} if files else {}
        return {"evaluation": settings.model_dump(), "test": contents(recipe.test_sources), **questions}

    def check(trial: Trial) -> list[str]:
        lines = [f"test: no held-out text in {', '.join(unmeasured)}: it is not measured"] if unmeasured else []
        for code, file in files.items():
            with errors_at(f"evaluation.questions.{code}"):
                if not trial.offline or not unset_variable(file.source):
                    file.check()
        return lines if trial.config is None else lines + _check_texts(recipe, trial)

    def work() -> StepResult:
        present = {name: path for name, path in models.items() if name == "base" or Path(path).exists()}
        revisions = {name: (path, recipe.revision if name == "base" else None) for name, path in present.items()}
        last = [*present.values()][-1]
        final = load_config(Path(last)) if len(present) > 1 else None
        # A join has the languages that the packs name.
        languages = Facts(final).history.by_expansion if recipe.joins else recipe.evaluated_languages
        result = score_models(revisions, recipe.test_sources, languages, settings)
        if final is not None and not final.is_encoder_decoder:
            asked = {code: list(file.documents()) for code, file in files.items()}
            if settings.questions is None:
                asked = {code: list(QUESTIONS[code]) for code in recipe.old if code in QUESTIONS}
            compared = (check_chat(recipe.base, last, *one, recipe.revision) for one in asked.items())
            result.chats = list(filter(None, compared))
        result.to_json(output)
        said = [f"{len(recipe.test)} languages, {len(present)} models"]
        if missing := [name for name in models if name not in present]:
            said[0] += f" ({', '.join(missing)}: no longer kept)"
        moved = {code: result.change([code]) or 0.0 for code in result.unnamed}
        if moved and len(present) > 1:
            worst = max(moved, key=lambda code: moved[code])
            said.append(f"of unnamed languages {worst} changes most: {in_percent(moved[worst])}")
        if settings.questions and not result.chats:
            said.append("no chat: a model has no template")
        said += [f"chat in {chat.language}: {chat.equal:.0%} of answers are the base's" for chat in result.chats]
        said += [f"no held-out text in {', '.join(unmeasured)}"] if unmeasured else []
        return StepResult("; ".join(said))

    return Step("evaluate", output, inputs, work, check, repeatable=True)


def _check_texts(recipe: Recipe, trial: Trial) -> list[str]:
    """Refuses held-out text of whose beginning nothing would be scored, or that is training text too, and questions for
    a base without a chat template."""
    pairs, tokenizer, most = trial.config.is_encoder_decoder, trial.tokenizer, recipe.evaluation.max_tokens
    if recipe.evaluation.questions and (pairs or (tokenizer is not None and not tokenizer.chat_template)):
        raise InputError("evaluation.questions: the base has no chat template, in which to ask them: leave them out.")
    sources = {key: text for key, text in recipe.keyed_sources() if not unset_variable(text.source)}
    tests = {key: text for key, text in sources.items() if key.startswith("test.")}
    lines = check_held_out(tests, {key: text for key, text in sources.items() if key not in tests}, pairs)
    for key, source in tests.items() if not trial.offline else ():
        if source.files():
            rows = islice(source.pairs() if pairs else source.documents(), _PAIRS if pairs else 1)
            some = [SentencePair(**row) if isinstance(row, dict) else row for row in rows]
            with errors_at(key):
                stream_for(trial.config, source.language, {source.language: some}, tokenizer, most)
    return lines
