"""Runs tasks of lm-evaluation-harness on a loaded model."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any

from datasets.exceptions import DatasetNotFoundError

from ..core.errors import InputError, library_errors_at
from ..core.extra import import_extra
from ..data.tokens import without_end
from ..modeling.language_gate import GateRule
from .scoring_settings import HarnessSettings

_JUDGED_AT_ONCE = 16  # questions
# By benchmark, the task in each language.
Benchmarks = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Metric:
    """A task's result; the standard error is None if the harness gives none."""

    value: float
    stderr: float | None = None
    higher_is_better: bool | None = None


@dataclass(frozen=True)
class TaskScore:
    """A model's results on a task, or on a group of tasks.

    Attributes:
        metrics: metrics by name; with another filter than the default, the name is `name,filter`.
        shots: examples in a prompt.
        samples, total: number of scored documents, and of all documents.
        version, harness: versions of the task and of lm_eval.
        group: the group with results of its own that contains this task or group.
    """

    metrics: dict[str, Metric]
    shots: int
    samples: int
    total: int
    version: str | None
    harness: str
    group: str | None = None


class HarnessTasks:
    """Tasks to run on one model after the other. The constructor loads their data, so that missing data shows early.

    Args:
        tasks: names of tasks, groups or tags, or patterns (`belebele_*`), or with a number of examples (`arc_hu@25`).
        benchmarks: by benchmark, the task in each language, as in `tasks`; means are of these.
        unnamed: languages among them that are neither old nor new.

    Raises:
        InputError: lm_eval is not installed, or a task is unknown, given twice or lacks its data.
    """

    def __init__(
        self,
        tasks: Iterable[str],
        settings: HarnessSettings,
        benchmarks: Benchmarks | None = None,
        unnamed: Sequence[str] = (),
    ) -> None:
        benchmarks, include_path = benchmarks or {}, settings.include_path
        listed = [task for of in benchmarks.values() for task in of.values()]
        self.benchmarks = {
            name: {code: _parse(task, None)[0] for code, task in of.items()} for name, of in benchmarks.items()
        }
        self.unnamed = list(unnamed)
        self.harness = import_extra("lm_eval").__version__
        if include_path is not None and not include_path.is_dir():
            raise InputError(f"{include_path}: no such folder (tasks for lm_eval).")
        self.limit = settings.limit
        self.manager = import_extra("lm_eval.tasks").TaskManager(include_path=include_path and str(include_path))
        self.by_shots: dict[int | None, list[Any]] = {}
        for argument in (*tasks, *listed):
            name, shots = _parse(argument, settings.num_fewshot)
            self.by_shots.setdefault(shots, []).extend(self._load(name))
        leaves = Counter(
            task.task_name
            for item in chain(*self.by_shots.values())
            for task in (item.get_all_tasks() if hasattr(item, "get_all_tasks") else [item])
        )
        if twice := [name for name, count in leaves.items() if count > 1]:
            raise InputError(f"{', '.join(twice[:3])}: given twice; name each task once.")

    def _load(self, pattern: str) -> list[Any]:
        """The groups and tasks that match a pattern."""
        names = self.manager.match_tasks([pattern])
        if not names:
            raise InputError(f"{pattern!r} is not a task of lm_eval {self.harness} or of --include-path.")
        matches: list[Any] = []
        for name in names:
            with library_errors_at(f"{name}: its data cannot be loaded", OSError, DatasetNotFoundError):
                loaded = self.manager.load([name])
            groups = loaded["groups"]
            matches += [groups[name]] if name in groups else list(loaded["tasks"].values())
        return matches

    def evaluate(self, model: Any, tokenizer: Any, batch_size: int = 8) -> dict[str, TaskScore]:
        """Runs the tasks, once for each number of examples. A model with a language gate is told the class of each
        question by its context, so that the choices of one take one model."""
        wrapper = import_extra("lm_eval.models.huggingface").HFLM
        if hasattr(model, "judge"):
            wrapper = _judging(wrapper)
        wrapped = wrapper(pretrained=model, tokenizer=without_end(tokenizer), batch_size=batch_size)
        scores: dict[str, TaskScore] = {}
        for shots, items in self.by_shots.items():
            results = import_extra("lm_eval").simple_evaluate(
                wrapped, tasks=items, num_fewshot=shots, limit=self.limit, task_manager=self.manager, log_samples=False
            )
            scores |= task_scores(results, self.harness)
        return scores


def _judging(wrapper: Any) -> Any:
    """The harness's wrapper of a model, which tells it the judged language of each question: its context's or, where
    that is empty (minimal pairs), that of its choices."""

    class Judging(wrapper):
        def loglikelihood(self, requests: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
            questions = [(request.task_name, request.doc_id) for request in requests]
            of_question: dict[Any, list[tuple[str, str]]] = {}
            for question, request in zip(questions, requests, strict=True):
                of_question.setdefault(question, []).append(request.args)
            texts = [of[0][0].strip() or " ".join(choice for _, choice in of) for of in of_question.values()]
            languages = dict(zip(of_question, self._languages(texts), strict=True))
            found: list[Any] = [None] * len(requests)
            for language in dict.fromkeys(languages.values()):
                numbers = [n for n, question in enumerate(questions) if languages[question] == language]
                with self.model.use_languages(language):
                    of_language = super().loglikelihood([requests[n] for n in numbers], *args, **kwargs)
                for number, result in zip(numbers, of_language, strict=True):
                    found[number] = result
            return found

        def _languages(self, texts: Sequence[str]) -> Iterator[str]:
            """A language of each text's class."""
            rule: Any = GateRule.of(self.model.config)
            for start in range(0, len(texts), _JUDGED_AT_ONCE):
                rows = self.tokenizer(
                    texts[start : start + _JUDGED_AT_ONCE], return_tensors="pt", padding=True, padding_side="right"
                ).to(self.device)
                for number in self.model.judge(rows.input_ids, rows.attention_mask).tolist():
                    yield rule.languages[number][-1]

    return Judging


def _parse(argument: str, num_fewshot: int | None) -> tuple[str, int | None]:
    name, separator, shots = argument.partition("@")
    if not separator:
        return name, num_fewshot
    if not (name and shots.isdecimal()):
        raise InputError(f"{argument!r} is not TASK@EXAMPLES, e.g. arc_hu@25.")
    return name, int(shots)


def task_scores(results: Mapping[str, Any], harness: str) -> dict[str, TaskScore]:
    """Reads the results of lm_eval's `simple_evaluate`, without groups that have no metric."""
    members: Mapping[str, Sequence[str]] = results.get("group_subtasks", {})
    metrics = {
        name: _metrics(values, results["higher_is_better"].get(name, {})) for name, values in results["results"].items()
    }
    groups = {part: name for name, parts in members.items() if metrics.get(name) for part in parts}

    def documents(name: str, kind: str) -> int:
        if name in results["n-samples"]:
            return results["n-samples"][name][kind]
        return sum(documents(part, kind) for part in members[name])

    return {
        name: TaskScore(
            metrics=of_task,
            shots=results["n-shot"][name],
            samples=documents(name, "effective"),
            total=documents(name, "original"),
            version=None if results["versions"].get(name) is None else str(results["versions"][name]),
            harness=harness,
            group=groups.get(name),
        )
        for name, of_task in metrics.items()
        if of_task
    }


def _metrics(values: Mapping[str, Any], better: Mapping[str, bool | None]) -> dict[str, Metric]:
    """Joins each metric with its standard error, such as `acc,none` and `acc_stderr,none`; only finite numbers stay."""
    metrics = {}
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        # Where no document had a metric, it is not finite; JSON has no such number. A task of one's own may give text.
        if not comma or metric.endswith("_stderr") or not _is_finite(value):
            continue
        stderr: Any = values.get(f"{metric}_stderr,{kind}")
        error = float(stderr) if _is_finite(stderr) else None
        metrics[metric if kind == "none" else key] = Metric(float(value), error, better.get(metric))
    return metrics


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
