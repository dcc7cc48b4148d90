"""Scores several models, for the verb `evaluate` and for runs: one JSON file and its tables."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.source import load_config, name_in_results, resolve_checkpoint
from ..checkpoint.stored import network_of
from ..core.errors import InputError, errors_at
from ..core.jsonfile import read_json, write_json
from ..core.printing import print_table
from ..core.saying import say_once
from ..core.schema import changed, checked, read
from ..data.lost import MOST_LOST, share_in_words
from ..data.pairs import texts_for
from ..data.sources import LanguageText
from ..inference.asking import ChatModel
from ..inference.models import check_decoder, load_for_inference
from .benchmarks import benchmark_means
from .chat import ChatCheck, Sample, begin_samples, continue_samples
from .harness import Metric, TaskScore
from .perplexity import LanguageScore, evaluate_model
from .scoring_settings import EvaluationSettings

THIS = "this model"
# Weights times tokens that two cores of a CPU score in less than two minutes; the least tokens of each language.
_WORK, _LEAST = 4_000_000_000_000, 1000
_NO_BOUND = "*"  # behind a score of text that the tokenizer loses


@dataclass
class Evaluation:
    """Scores of several models: `models[name][language]`.

    Attributes:
        old, new, unnamed: languages of the base model, those that were added, and those that are neither.
        expansions: after several expansions, the languages of `new` that each added.
        tasks: `tasks[name][task]`, results on tasks of lm-evaluation-harness.
        benchmarks: of a task list, each benchmark's task in each language.
        chats: the first and the last model's answers to the same questions, for each language of questions.
        samples: how the models continue held-out text, in an old and in a new language.
    """

    old: list[str]
    new: list[str]
    models: dict[str, dict[str, LanguageScore]] = field(default_factory=dict)
    expansions: list[list[str]] = field(default_factory=list)
    tasks: dict[str, dict[str, TaskScore]] = field(default_factory=dict)
    benchmarks: dict[str, dict[str, str]] = field(default_factory=dict)
    chats: list[ChatCheck] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)

    def mean(self, model: str, languages: Sequence[str], measure: str = "bits_per_byte") -> float | None:
        """Mean of a measure over the languages that were scored; None without any, or where the model lacks one."""
        scores = self.models[model]
        scored = [code for code in languages if any(code in others for others in self.models.values())]
        if not scored or not scores.keys() >= {*scored}:
            return None
        return sum(getattr(scores[code], measure) for code in scored) / len(scored)

    def to_json(self, path: str | Path) -> None:
        """Writes `evaluation.json`: the scores, and the means of each group's and of each expansion's languages."""
        groups = {"old": self.old, "new": self.new, **dict(self.groups())}
        means = {n: {kind: self.mean(n, languages) for kind, languages in groups.items()} for n in self.models}
        equal = {chat.language: chat.equal for chat in self.chats}
        write_json(path, {**asdict(self), "mean_bits_per_byte": means, "equal_answers": equal})

    @classmethod
    @checked
    def from_json(cls, path: str | Path) -> "Evaluation":
        value = read_json(path, "an evaluation")
        known = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        return read(cls, known, f"{path}: not an evaluation")

    def of_this(self, names: Iterable[str], where: str | os.PathLike) -> "Evaluation":
        """The scores of the first model and of this one, which has one of the `names`, and gets the name `THIS`; an
        InputError says that the file `where` has no scores of it."""
        wanted = list(dict.fromkeys(names))
        called = next((name for name in wanted if name in self.models), None)
        if called is None:
            raise InputError(
                f"{where}: has scores of {', '.join(self.models)}, but none of {' or '.join(wanted)}; "
                "name this checkpoint's scores with --evaluated-as."
            )
        first, this = next(iter(self.models)), self.models[called]
        before = {} if first == called else {first: self.models[first]}
        old, new, unnamed = ([code for code in codes if code in this] for codes in (self.old, self.new, self.unnamed))
        expansions = [[code for code in brought if code in this] for brought in self.expansions]
        renamed = {name: name for name in before} | {called: THIS}
        tasks = {renamed[name]: scores for name, scores in self.tasks.items() if name in renamed}
        return Evaluation(old, new, {**before, THIS: this}, expansions, tasks, unnamed=unnamed)

    def groups(self) -> list[tuple[str, list[str]]]:
        """The languages as the table groups them; those of several expansions are groups of their own."""
        added = [("new", self.new)]
        if len(self.expansions) > 1:
            added = [(f"expansion {n}", new) for n, new in enumerate(self.expansions, start=1)]
        return [("old", self.old), *added, *([("unnamed", self.unnamed)] if self.unnamed else [])]

    def change(self, languages: Sequence[str], measure: str = "bits_per_byte") -> float | None:
        """The change of the mean of languages from the first model to the last, as a share; None where one lacks it."""
        first, *_, last = [self.mean(name, languages, measure) for name in (*self.models, *self.models)]
        return last / first - 1 if first and last is not None else None

    def rows(self, measure: str = "bits_per_byte") -> tuple[list[str], list[list[str]]]:
        """A table of a measure: header, one row for each language, means; the last model's change from the first."""
        scored = {code for scores in self.models.values() for code in scores}
        rows = []
        for kind, group in self.groups():
            languages = [code for code in group if code in scored]
            rows += [self._row(f"{code} ({kind})", [code], measure) for code in languages]
            rows += [self._row(f"mean of {kind}", languages, measure)] if len(languages) > 1 else []
        return compared(["language"], list(self.models), rows)

    def _row(self, label: str, languages: Sequence[str], measure: str) -> list[str]:
        marks = [self._mark(name, languages) for name in self.models]
        values = [self.mean(name, languages, measure) for name in self.models]
        moved = self.change(languages, measure)
        shown = ["-" if value is None else f"{value:.3f}{mark}" for value, mark in zip(values, marks, strict=True)]
        return [label, *shown, "-" if moved is None else f"{in_percent(moved)}{marks[0] or marks[-1]}"]

    def _mark(self, model: str, languages: Sequence[str]) -> str:
        scores = self.models[model]
        return "" if all(scores[code].is_bound for code in languages if code in scores) else _NO_BOUND

    def notes(self) -> list[str]:
        """What the tables say besides: what the tokenizer loses, what leaves home, and the meaning of the mark."""
        lost: dict[str, list[str]] = {}
        for name, scores in self.models.items():
            known = [f"{code} {share_in_words(score.lost)}" for code, score in scores.items() if score.lost is not None]
            lost.setdefault(", ".join(known), []).append(name)
        lines = ["unnamed languages are neither old nor new: no training named them"] if self.unnamed else []
        for shares, names in lost.items():
            of = "" if len(lost) == 1 else f" of {', '.join(names)}"
            lines += [f"bytes that the tokenizer{of} loses: {shares}"] if shares else []
        for name, scores in self.models.items():
            kept = [code for code, score in scores.items() if code not in self.new and score.away is not None]
            left = [f"{code} {scores[code].away:,} of {scores[code].tokens:,}" for code in kept]
            lines += [f"tokens that the gate of {name} sends to new experts: {', '.join(left)}"] if left else []
        if any(self._mark(name, list(scores)) for name, scores in self.models.items()):
            lines.append(
                f"scores with {_NO_BOUND} are no bound: the tokenizer loses more than {100 * MOST_LOST:g} % of the "
                "text's bytes, which the model does not have to predict"
            )
        return lines

    def task_rows(self) -> tuple[list[str], list[list[str]]]:
        """A table of the tasks: header, one row for each metric of a group, or of a task outside groups."""
        names = list(self.tasks)
        shown = [(task, metric) for tasks in self.tasks.values() for task, score in tasks.items()
                 if score.group is None for metric in score.metrics]  # fmt: skip
        rows = []
        for task, metric in dict.fromkeys(shown):
            scores = [self.tasks[name].get(task) for name in names]
            values = [None if score is None else score.metrics.get(metric) for score in scores]
            one = next(score for score in scores if score)
            part = "" if one.samples == one.total else f", {one.samples} of {one.total}"
            rows.append([f"{task} ({one.shots}-shot{part})", metric, *map(_with_error, values), _change(values)])
        return compared(["task", "metric"], names, rows)

    def benchmark_rows(self) -> tuple[list[str], list[list[str]]]:
        """A table of a task list: header, one row for each benchmark's mean over the languages of a group."""
        names, rows = list(self.tasks), []
        for kind, languages in self.groups():
            of_models = [benchmark_means(self.tasks[name], self.benchmarks, languages) for name in names]
            for benchmark in of_models[0] if of_models else ():
                values = [means[benchmark] for means in of_models]
                if any(value is not None for value in values):
                    rows.append([f"{benchmark} ({kind})", *map(_with_error, values), _change(values)])
        return compared(["mean over languages"], names, rows)

    def sample_rows(self) -> tuple[list[str], list[list[str]]]:
        """A table of the samples: header, and one row for each language, with the first and the last model."""
        names = list(dict.fromkeys(name for sample in self.samples for name in sample.continued))
        ends = list(dict.fromkeys([*names[:1], *names[-1:]]))
        rows = [[s.language, s.prompt, *(s.continued.get(name, "-") for name in ends)] for s in self.samples]
        return ["language", "held-out text begins", *ends], rows

    def markdown(self, measure: str = "bits_per_byte") -> str:
        """The table of a measure in Markdown, and its notes."""
        return "\n".join([markdown_table(*self.rows(measure)), *("\n" + note for note in self.notes())])


def in_percent(share: float) -> str:
    """A change with its sign; `+0.0 %` where it rounds to nothing."""
    return f"{round(100 * share, 1) + 0.0:+.1f} %"


def compared(header: list[str], names: Sequence[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """A table whose rows end with the last model's change from the first, which one model alone does not have."""
    if len(names) > 1:
        return [*header, *names, f"{names[-1]} vs {names[0]}"], rows
    return [*header, *names], [row[:-1] for row in rows]


def _change(values: Sequence[Metric | None]) -> str:
    first, last = values[0], values[-1]
    return f"{last.value - first.value:+.4f}" if first and last else "-"


def _with_error(metric: Metric | None) -> str:
    if metric is None:
        return "-"
    return f"{metric.value:.4f}" + ("" if metric.stderr is None else f" ± {metric.stderr:.4f}")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table in Markdown whose first `words` columns are words, and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *rows])


def score_models(
    models: Mapping[str, tuple[str, str | None]],
    sources: Mapping[str, LanguageText],
    languages: Sequence[Sequence[str]],
    settings: EvaluationSettings,
    tasks: Any = None,
) -> Evaluation:
    """Scores models on held-out text, and lets decoders continue its first words; one model is in memory at a time.

    Args:
        models: folder or hub id and revision of each model, by its name in the results.
        sources: held-out text of each language.
        languages: the old languages, then the languages of each expansion; other languages of `sources` are unnamed.
        tasks: `HarnessTasks` to run as well.
    """
    old, *expansions = (list(codes) for codes in languages)
    result = Evaluation(old, [code for new in expansions for code in new], expansions=expansions)
    unnamed = [code for code in sources if code not in (*old, *result.new)]
    if tasks is not None:
        check_decoders(models, "tasks of lm-evaluation-harness")
        result.benchmarks = tasks.benchmarks
        unnamed += tasks.unnamed
    result.unnamed = list(dict.fromkeys(unnamed))
    sizes = in_time(settings, models, sources).model_dump(exclude={"questions"})
    texts: dict[bool, dict[str, Any]] = {}  # for encoder-decoders, and for decoders
    for name, (path, revision) in models.items():
        model, tokenizer = load_for_inference(path, revision)
        kind = model.config.is_encoder_decoder
        if kind not in texts:
            texts[kind] = texts_for(model.config, sources)
        with errors_at(name):
            result.models[name] = evaluate_model(model, tokenizer, texts[kind], **sizes)
        if not kind:
            result.samples = result.samples or begin_samples(texts[kind], (old, result.new))
            continue_samples(result.samples, ChatModel(model, tokenizer, name))
        if tasks is not None:
            result.tasks[name] = tasks.evaluate(model, tokenizer, settings.batch_size)
        del model  # before the next one is loaded
    return result


def evaluate_models(
    models: Mapping[str, str],
    sources: dict[str, Any],
    languages: list[list[str]],
    settings: EvaluationSettings,
    tasks: Any = None,
    score_more: Callable[[Evaluation, EvaluationSettings], None] | None = None,
) -> Evaluation:
    """Scores models, by their names in the results (`labels_of`), as `score_models` does, and prints the tables;
    `score_more` adds scores to these."""
    named = {label: (name, None) for label, name in models.items()}
    settings = in_time(settings, named, sources)
    result = score_models(named, sources, languages, settings, tasks)
    if score_more is not None:
        score_more(result, settings)
    if sources:
        for measure in ("bits_per_byte", "perplexity"):
            print(measure.replace("_", " "))
            print_table(*result.rows(measure))
        print("\n".join(result.notes()))
    if tasks is not None:
        print("tasks")
        print_table(*result.task_rows())
        if result.benchmarks:
            print_table(*result.benchmark_rows())
    return result


def labels_of(models: Sequence[str]) -> dict[str, str]:
    """The models by their names in results: a folder's name, in a run `RUN/STAGE`, or a hub id."""
    labels: dict[str, str] = {}
    for name in models:
        if (label := name_in_results(name)) in labels:
            raise InputError(f"{name}: two models are called {label!r}; rename a folder.")
        labels[label] = name
    return labels


def in_time(
    settings: EvaluationSettings, models: Mapping[str, tuple[str, str | None]], sources: Mapping[str, Any]
) -> EvaluationSettings:
    """The settings, with as many tokens of each language as two cores score in less than two minutes (by the first
    model's parameters) if they name none and there is no GPU; says how many."""
    if settings.max_tokens is not None or torch.accelerator.is_available() or not sources:
        return settings
    path, revision = next(iter(models.values()))
    parameters = network_of(load_config(resolve_checkpoint(path, revision, weights=False))).num_parameters()
    most = max(_LEAST, _WORK // parameters // len(sources) // 100 * 100)
    say_once(
        f"scores up to {most:,} tokens of each language, at most two minutes a model on two cores; max_tokens "
        "(--max-tokens) takes another number"
    )
    return changed(settings, max_tokens=most)


def check_decoders(models: Mapping[str, tuple[str, str | None]], what: str) -> None:
    """Refuses encoder-decoders among the models, before any is scored; `what` as in `check_decoder`."""
    for name, (path, revision) in models.items():
        check_decoder(load_config(resolve_checkpoint(path, revision)), name, what)
