"""The verbs `evaluate` and `evaluate-translation`."""

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import InputError, errors_at
from ..core.languages import check_old_and_new
from ..evaluation.settings import EvaluationSettings, TranslationSettings
from . import options as opt
from .common import check_checkpoints, check_file, codes, evaluate_models, model_label, print_table, text_sources

Models = Annotated[list[str], typer.Argument(help="Folders or hub ids; the others are compared with the first.")]


@opt.app.command()
@opt.with_settings("questions")
def evaluate(
    models: Models,
    settings: EvaluationSettings,
    out: Annotated[Path | None, typer.Option(help="File to write as well.")] = None,
    data: Annotated[list[str] | None, typer.Option("--data", help="LANGUAGE=FILE; repeat for each language.")] = None,
    old: opt.OldCodes = "",
    new: opt.NewCodes = "",
    ensemble: Annotated[
        int | None,
        opt.whole_number("Also score the models' ensemble: mix the N that fit the text best at each token."),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks of lm-evaluation-harness with their numbers of examples, e.g. arc_hu@25,m_mmlu_hu@5; or a task "
            "list: moe-lpr, layermoe, dmoe or deltamoe (the papers' benchmarks), or a YAML file."
        ),
    ] = "",
    unnamed: Annotated[
        str, typer.Option(help="Codes of languages of a task list that are neither old nor new, e.g. fr,pt.")
    ] = "",
    questions: Annotated[
        list[str] | None,
        typer.Option(
            help="LANGUAGE=FILE with questions, one a line, or LANGUAGE for ten of ours (en): the first and the last "
            "model answer them in the chat template; repeat for each language."
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None, opt.whole_number("Examples for tasks given without @N; by default each task's own number.")
    ] = None,
    limit: Annotated[int | None, opt.whole_number("Maximum of documents to score of each task.")] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with tasks of your own for the harness.")] = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Compare models: perplexity and bits per byte on each language, and tasks of lm-evaluation-harness.

    Example: hf-moe-expand evaluate Qwen/Qwen2.5-0.5B qwen-el-2 --data en=en.jsonl --data el=el.jsonl
    """
    check_file(out, overwrite)
    check_checkpoints(*models)
    sources = text_sources(data or [], look=True)
    if not sources and not tasks and not questions:
        raise InputError("Nothing to evaluate: give text with --data, tasks with --tasks, or --questions.")
    chat_questions = _questions(questions or [])
    if chat_questions and len(models) < 2:
        raise InputError("--questions compares answers: give the base first and the model made of it last.")
    from ..evaluation.benchmarks import in_languages, task_list

    benchmarks = task_list(tasks)
    if unnamed and benchmarks is None:
        raise InputError("--unnamed: means of a task list have them, but --tasks names none: leave it out.")
    if not tasks and not (num_fewshot is limit is include_path is None):
        raise InputError("--num-fewshot, --limit and --include-path belong to --tasks, which is not given.")
    if ensemble is not None and not sources:
        raise InputError("--ensemble scores text: give it with --data.")
    if ensemble is not None and not 1 <= ensemble <= len(models):
        raise InputError(f"--ensemble is {ensemble}: must be from 1 to {len(models)}, the number of models given.")
    harness_tasks = None
    groups = _language_groups(models, list(sources), codes(old), codes(new), benchmarks is not None)
    if tasks:
        from ..evaluation.harness import HarnessTasks

        others, names = codes(unnamed), [] if benchmarks else codes(tasks)
        known = [code for group in groups for code in group]
        if both := sorted({*known} & {*others}):
            raise InputError(f"--unnamed: {', '.join(both)} is an old or a new language; leave it out.")
        if benchmarks is not None:
            benchmarks, missing = in_languages(benchmarks, [*known, *others])
            print("\n".join(missing), end="\n" * bool(missing))
        harness_tasks = HarnessTasks(names, num_fewshot, limit, include_path, benchmarks, others)
    if chat_questions:
        from ..evaluation.chat import check_chat, without_chat

        for name in (models[0], models[-1]):
            if why := without_chat(name):
                raise InputError(f"{name}: {why}, so it cannot answer --questions.")
    result = evaluate_models(models, sources, groups, settings, ensemble, harness_tasks)
    for code, lines in chat_questions.items():
        if out is not None:
            result.to_json(out)  # a question may fail
        if (chat := check_chat(models[0], models[-1], code, lines)) is not None:
            result.chats.append(chat)
            print("\n".join(chat.lines()))
    if out is not None:
        result.to_json(out)
        print(f"wrote {out}")


@opt.app.command()
@opt.with_settings()
def evaluate_translation(
    models: Models,
    data: Annotated[
        list[str], typer.Option("--data", help="LANGUAGE=FILE of parallel text, the same sentence in the same line.")
    ],
    out: opt.Out,
    settings: TranslationSettings,
    pair: Annotated[
        list[str] | None,
        typer.Option(help="Direction such as en-el; repeat. By default, the first language to and from each other."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="Folder for sources, references and translations as text files as well, for COMET."),
    ] = None,
    overwrite: opt.Overwrite = False,
) -> None:
    """Compare models by the chrF++ of their translations of parallel text, such as FLORES.

    Example: hf-moe-expand evaluate-translation qwen-el-2 --data en=flores/en.jsonl --data el=flores/el.jsonl
    --pair en-el --shots 8 --out translation.json
    """
    check_file(out, overwrite)
    check_checkpoints(*models)
    sources = text_sources(data, look=True)
    from ..checkpoint.source import load_config, resolve_checkpoint
    from ..checkpoint.tokenizer import load_tokenizer
    from ..evaluation.translation import (
        TranslationScores,
        check_translation,
        chrf_plus_plus,
        evaluate_translation,
        load_parallel,
        parse_pairs,
        text_files,
        write_texts,
    )
    from ..inference.models import load_for_inference

    pairs = parse_pairs(pair or [], list(sources))
    chrf_plus_plus()  # fails now, before any work, if it is not installed
    sentences = load_parallel(sources)
    labels: dict[str, str] = {}
    for name in models:
        labels[model_label(name, labels)] = name
    for file in [] if texts is None else text_files(texts, list(labels), pairs):
        check_file(file, overwrite)
    for name in models:  # before the first one translates
        folder = resolve_checkpoint(name)
        config, tokenizer = load_config(folder), load_tokenizer(folder, name)
        with errors_at(name):
            check_translation(config, tokenizer, sentences, pairs, settings)
    scores: dict = {}
    for label, name in labels.items():
        model, tokenizer = load_for_inference(name)
        scores[label] = evaluate_translation(model, tokenizer, sentences, pairs, settings)
    result = TranslationScores(settings.shots, settings.max_new_tokens, settings.beams, scores)
    print("chrF++")
    print_table(*result.rows())
    result.to_json(out)
    if texts is not None:
        write_texts(texts, result, sentences, pairs)
    print(f"wrote {out}")


def _questions(arguments: list[str]) -> dict[str, list[str]]:
    """The questions of `--questions`, by language."""
    if not arguments:
        return {}
    from ..evaluation.chat import QUESTIONS

    ours = {code: list(QUESTIONS[code]) for code in arguments if code in QUESTIONS}
    if other := next((code for code in arguments if code not in ours and "=" not in code), None):
        raise InputError(f"--questions {other}: there are questions in {', '.join(QUESTIONS)}; give {other}=FILE.")
    sources = text_sources([argument for argument in arguments if argument not in ours])
    return ours | {code: list(source.documents(say=True)) for code, source in sources.items()}


def _language_groups(
    models: list[str], languages: list[str], old: list[str], new: list[str], all_of_them: bool
) -> list[list[str]]:
    """The evaluated languages in groups, the old ones first: as given, else those of the models' longest history, then
    what other models' histories add; those of the text, or all. The others are in none."""
    from ..checkpoint.records import History
    from ..checkpoint.source import load_config, resolve_checkpoint

    if old or new:
        check_old_and_new(old, new)
        groups = [old, new]
    else:
        configs = [load_config(resolve_checkpoint(name, weights=False)) for name in models]
        histories = [found for config in configs if (found := History.of(config).by_expansion)]
        groups = [list(group) for group in max(histories, key=len, default=[languages, []])]
        for of_base, *added in histories:  # of another expansion
            for group, more in ((groups[0], of_base), *((groups[-1], more) for more in added)):
                group += [code for code in more if not any(code in known for known in groups)]
    return groups if all_of_them else [[code for code in languages if code in group] for group in groups]
