"""The verb `evaluate`: text, tasks and questions, or translations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from ..checkpoint.arguments import Codes, Models, NewCodes, NewFile, OldCodes, Texts, codes, text_sources
from ..core.errors import InputError, errors_at
from ..core.languages import check_old_and_new
from ..core.printing import print_table
from ..core.verbs import Given, Keys, belongs, without_effect
from ..evaluation.scoring_settings import EvaluationSettings, HarnessSettings, TranslationSettings

# The arguments that count beside --pairs, with those of `TranslationSettings`.
_TRANSLATED = ("models", "out", "data", "pairs", "texts", "overwrite")


def evaluate(
    models: Models,
    *,
    settings: Annotated[EvaluationSettings, Keys(without=("questions",))],
    translating: TranslationSettings,
    harness: HarnessSettings,
    out: NewFile | None = None,
    data: Texts | None = None,
    old: OldCodes = (),
    new: NewCodes = (),
    ensemble: int | None = None,
    tasks: str = "",
    unnamed: Codes = (),
    questions: Sequence[str] = (),
    pairs: str = "",
    texts: Path | None = None,
    overwrite: bool = False,
    given: Given,
) -> None:
    """Compare models: perplexity and bits per byte on each language, and tasks of lm-evaluation-harness.

    With --pairs, compare them by the chrF++ of their translations of parallel text, such as FLORES.

    Example: hf-moe-expand evaluate Qwen/Qwen2.5-0.5B qwen-el-2 --data en=en.jsonl --data el=el.jsonl

    Example: hf-moe-expand evaluate qwen-el-2 --pairs en-el --data en=flores/en.jsonl --data el=flores/el.jsonl
    --shots 8 --out translation.json

    Args:
        out: file to write as well.
        data: LANGUAGE=FILE; repeat for each language. With --pairs parallel text, the same sentence in the same line.
        ensemble: also score the models' ensemble: mix the N that fit the text best at each token.
        tasks: tasks of lm-evaluation-harness with their numbers of examples, e.g. arc_hu@25,m_mmlu_hu@5; or a task
            list: moe-lpr, layermoe, dmoe or deltamoe (the papers' benchmarks), or a YAML file.
        unnamed: codes of languages of a task list that are neither old nor new, e.g. fr,pt.
        questions: LANGUAGE=FILE with questions, one a line, or LANGUAGE for ten of ours (en): the first and the last
            model answer them in the chat template; repeat for each language.
        limit: maximum of documents to score of each task, or of sentences with --pairs.
        batch_size: windows in a forward pass; with --pairs, sentences translated at once.
        pairs: directions of translation, e.g. en-el,el-en; or all, the first language to and from each other.
        texts: with --pairs: folder for sources, references and translations as text files as well, for COMET.
    """
    belongs(given, "pairs", "shots", "max_new_tokens", "beams", "texts")
    if pairs:
        _evaluate_translations(models, data, pairs, translating, out, texts, overwrite, given)
        return
    if not data and not tasks and not questions:
        raise InputError("Nothing to evaluate: give text with --data, tasks with --tasks, or --questions.")
    belongs(given, "tasks", *HarnessSettings.model_fields, "unnamed")
    belongs(given, "data", "ensemble")
    from ..evaluation.report import evaluate_models, labels_of

    asked = _questions(questions, models)
    more = None if ensemble is None else _ensemble(models, data or {}, ensemble)
    groups, found = _tasks(models, [*(data or {})], ([*old], [*new]), tasks, [*unnamed], harness)
    result = evaluate_models(labels_of(models), data or {}, groups, settings, found, more)
    _ask_and_write(models, asked, result, out)


def _ask_and_write(models: list[str], questions: dict[str, list[str]], result: Any, out: Path | None) -> None:
    """Asks the first and the last model, adds their answers to the result, and writes it."""
    for code, lines in questions.items():
        from ..evaluation.chat import check_chat

        if out is not None:
            result.to_json(out)  # a question may fail
        if (chat := check_chat(models[0], models[-1], code, lines)) is not None:
            result.chats.append(chat)
            print("\n".join(chat.lines()))
    if out is not None:
        result.to_json(out)
        print(f"wrote {out}")


def _tasks(
    models: list[str], languages: list[str], known: tuple[list[str], list[str]], tasks: str, unnamed: list[str],
    harness: HarnessSettings,
) -> tuple[list[list[str]], Any]:  # fmt: skip
    """The groups of languages, and the tasks of lm-evaluation-harness; None without any."""
    from ..evaluation.benchmarks import in_languages, task_list

    benchmarks = task_list(tasks)
    if unnamed and benchmarks is None:
        raise InputError("--unnamed: means of a task list have them, but --tasks names none: leave it out.")
    groups = _language_groups(models, languages, *known, benchmarks is not None)
    if not tasks:
        return groups, None
    from ..evaluation.harness import HarnessTasks

    named = [code for group in groups for code in group]
    if both := sorted({*named} & {*unnamed}):
        raise InputError(f"--unnamed: {', '.join(both)} is an old or a new language; leave it out.")
    if benchmarks is not None:
        benchmarks, missing = in_languages(benchmarks, [*named, *unnamed])
        print("\n".join(missing), end="\n" * bool(missing))
    names = [] if benchmarks else codes(tasks)
    return groups, HarnessTasks(names, harness, benchmarks, unnamed)


def _ensemble(models: list[str], sources: Any, ensemble: int) -> Any:
    """A function that adds the ensemble's scores to others."""
    if not 1 <= ensemble <= len(models):
        raise InputError(f"--ensemble is {ensemble}: must be from 1 to {len(models)}, the number of models given.")
    from ..baselines.ensemble import evaluate_ensemble
    from ..checkpoint.source import resolve_checkpoint
    from ..checkpoint.tokenizer import load_tokenizer
    from ..evaluation.report import check_decoders

    check_decoders({name: (name, None) for name in models}, "ensembles")

    def add_scores(result: Any, settings: EvaluationSettings) -> None:
        texts = {code: source.load()["text"] for code, source in sources.items()}
        tokenizer = load_tokenizer(resolve_checkpoint(models[-1]), models[-1])
        scores = evaluate_ensemble(models, tokenizer, texts, ensemble, **settings.model_dump(exclude={"questions"}))
        result.models[f"ensemble of {len(models)}, top {ensemble}"] = scores

    return add_scores


def _questions(arguments: Sequence[str], models: list[str]) -> dict[str, list[str]]:
    """The questions of `--questions`, by language, for models that answer them."""
    if not arguments:
        return {}
    from ..evaluation.chat import QUESTIONS, without_chat

    ours = {code: list(QUESTIONS[code]) for code in arguments if code in QUESTIONS}
    if other := next((code for code in arguments if code not in ours and "=" not in code), None):
        raise InputError(f"--questions {other}: there are questions in {', '.join(QUESTIONS)}; give {other}=FILE.")
    sources = text_sources([argument for argument in arguments if argument not in ours])
    if len(models) < 2:
        raise InputError("--questions compares answers: give the base first and the model made of it last.")
    for name in (models[0], models[-1]):
        if why := without_chat(name):
            raise InputError(f"{name}: {why}, so it cannot answer --questions.")
    return ours | {code: list(source.documents(say=True)) for code, source in sources.items()}


def _language_groups(
    models: list[str], languages: list[str], old: list[str], new: list[str], all_of_them: bool
) -> list[list[str]]:
    """The evaluated languages in groups, the old ones first: as given, else those of the models' longest history, then
    what other models' histories add; those of the text, or all. The others are in none."""
    from ..checkpoint.facts import Facts
    from ..checkpoint.source import load_config, resolve_checkpoint

    if old or new:
        check_old_and_new(old, new)
        groups = [old, new]
    else:
        configs = [load_config(resolve_checkpoint(name, weights=False)) for name in models]
        histories = [found for config in configs if (found := Facts(config).history.by_expansion)]
        groups = [list(group) for group in max(histories, key=len, default=[languages, []])]
        for of_base, *added in histories:  # of another expansion
            for group, more in ((groups[0], of_base), *((groups[-1], more) for more in added)):
                group += [code for code in more if not any(code in known for known in groups)]
    return groups if all_of_them else [[code for code in languages if code in group] for group in groups]


def _evaluate_translations(
    models: list[str], sources: dict[str, Any] | None, directions: str, settings: TranslationSettings,
    out: Path | None, texts: Path | None, overwrite: bool, given: Given,
) -> None:  # fmt: skip
    without_effect(given, "--pairs", *_TRANSLATED, *TranslationSettings.model_fields)
    if out is None or not sources:
        raise InputError("--pairs translates the text of --data, and writes to --out: give both.")
    from ..checkpoint.source import load_config, resolve_checkpoint
    from ..checkpoint.tokenizer import load_tokenizer
    from ..evaluation import translation
    from ..evaluation.report import labels_of
    from ..inference.models import load_for_inference

    pairs = translation.parse_pairs([] if directions == "all" else codes(directions), list(sources))
    translation.chrf_plus_plus()  # fails now, before any work, if it is not installed
    sentences = translation.load_parallel(sources)
    labels = labels_of(models)
    if texts is not None and texts.exists() and not overwrite:
        raise InputError(f"{texts}: exists already; choose another folder or pass --overwrite.")
    for name in models:  # before the first one translates
        folder = resolve_checkpoint(name)
        config, tokenizer = load_config(folder), load_tokenizer(folder, name)
        with errors_at(name):
            translation.check_translation(config, tokenizer, sentences, pairs, settings)
    scores: dict[str, Any] = {}
    for label, name in labels.items():
        model, tokenizer = load_for_inference(name)
        scores[label] = translation.evaluate_translation(model, tokenizer, sentences, pairs, settings)
    result = translation.TranslationScores(settings.shots, settings.max_new_tokens, settings.beams, scores)
    print("chrF++")
    print_table(*result.rows())
    result.to_json(out)
    if texts is not None:
        translation.write_texts(texts, result, sentences, pairs)
    print(f"wrote {out}")
