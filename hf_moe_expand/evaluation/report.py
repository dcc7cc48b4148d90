"""Scores several models, for the verb `evaluate` and for runs: one JSON file and its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.source import load_config, resolve_checkpoint
from ..data.pairs import texts_for
from ..data.sources import LanguageText
from ..errors import InputError, errors_at
from ..jsonfile import read_json, write_json
from ..models import check_decoder, load_for_inference
from ..schema import read
from .chat import ChatCheck
from .harness import TaskScore
from .perplexity import LanguageScore, evaluate_model


@dataclass
class Evaluation:
    """Scores of several models: `models[name][language]`.

    Attributes:
        old, new: the languages of the base model, and the other languages.
        expansions: after several expansions, the languages of `new` that each added.
        tasks: `tasks[name][task]`, results on tasks of lm-evaluation-harness.
        chats: the first and the last model's answers to the same questions, for each language of questions.
    """

    old: list[str]
    new: list[str]
    models: dict[str, dict[str, LanguageScore]] = field(default_factory=dict)
    expansions: list[list[str]] = field(default_factory=list)
    tasks: dict[str, dict[str, TaskScore]] = field(default_factory=dict)
    chats: list[ChatCheck] = field(default_factory=list)

    def mean(self, model: str, languages: Sequence[str], measure: str = "bits_per_byte") -> float | None:
        """Mean of a measure over languages; None without languages."""
        scores = self.models[model]
        values = [getattr(scores[code], measure) for code in languages if code in scores]
        return sum(values) / len(values) if values else None

    def to_json(self, path: str | Path) -> None:
        """Writes `evaluation.json`: the scores, and means of bits per byte over `old`, `new` and the languages of each
        of several expansions."""
        models: dict[str, Any] = {}
        for name, scores in self.models.items():
            models[name] = {language: asdict(score) for language, score in scores.items()}
        groups = {"old": self.old, "new": self.new, **dict(self.groups())}
        means = {n: {kind: self.mean(n, languages) for kind, languages in groups.items()} for n in self.models}
        write_json(path, {
            "old": self.old, "new": self.new, "expansions": self.expansions, "models": models,
            "mean_bits_per_byte": means,
            "tasks": {n: {task: asdict(score) for task, score in tasks.items()} for n, tasks in self.tasks.items()},
            "chats": [asdict(chat) for chat in self.chats],
            "equal_answers": {chat.language: chat.equal for chat in self.chats},
        })  # fmt: skip

    @classmethod
    def from_json(cls, path: str | Path) -> "Evaluation":
        """Reads `evaluation.json`.

        Raises:
            InputError: the file is missing or is no evaluation; the message names the key that is wrong.
        """
        value = read_json(path, "an evaluation")
        if missing := sorted({"old", "new", "models"} - set(value)):
            raise InputError(f"{path}: not an evaluation: {', '.join(missing)} is missing.")
        known = {
            name: value[name] for name in ("old", "new", "models", "expansions", "tasks", "chats") if name in value
        }
        return read(cls, known, f"{path}: not an evaluation")

    def groups(self) -> list[tuple[str, list[str]]]:
        """The languages as the table groups them: `old`, then `new` or the languages of each of several expansions."""
        if len(self.expansions) < 2:
            return [("old", self.old), ("new", self.new)]
        return [("old", self.old), *((f"expansion {n}", new) for n, new in enumerate(self.expansions, start=1))]

    def rows(self, measure: str = "bits_per_byte") -> tuple[list[str], list[list[str]]]:
        """A table of a measure: header, one row for each language, means; the last model's change from the first."""
        names = list(self.models)
        header = ["language", *names] + ([f"{names[-1]} vs {names[0]}"] if len(names) > 1 else [])
        values_of: list[tuple[str, Mapping[str, float | None]]] = []
        for kind, languages in self.groups():
            for code in languages:
                values_of.append((f"{code} ({kind})", {n: self.mean(n, [code], measure) for n in names}))
            if len(languages) > 1:
                values_of.append((f"mean of {kind}", {n: self.mean(n, languages, measure) for n in names}))
        rows = []
        for label, values in values_of:
            row = [label] + ["-" if values[n] is None else f"{values[n]:.3f}" for n in names]
            first, last = values[names[0]], values[names[-1]]
            if len(names) > 1:
                row.append("-" if not first or last is None else f"{100 * (last / first - 1):+.1f} %")
            rows.append(row)
        return header, rows

    def task_rows(self) -> tuple[list[str], list[list[str]]]:
        """A table of the tasks: header, one row for each metric of a task outside groups or of a group; the last
        model's change from the first."""
        names = list(self.tasks)
        header = ["task", "metric", *names] + ([f"{names[-1]} vs {names[0]}"] if len(names) > 1 else [])
        shown = [(task, metric) for tasks in self.tasks.values() for task, score in tasks.items()
                 if score.group is None for metric in score.metrics]  # fmt: skip
        rows = []
        for task, metric in dict.fromkeys(shown):
            scores = [self.tasks[name].get(task) for name in names]
            values = [None if score is None else score.metrics.get(metric) for score in scores]
            one = next(score for score in scores if score)
            part = "" if one.samples == one.total else f", {one.samples} of {one.total}"
            row = [f"{task} ({one.shots}-shot{part})", metric]
            for value in values:
                error = "" if value is None or value.stderr is None else f" ± {value.stderr:.4f}"
                row.append("-" if value is None else f"{value.value:.4f}{error}")
            if len(names) > 1:
                first, last = values[0], values[-1]
                row.append("-" if first is None or last is None else f"{last.value - first.value:+.4f}")
            rows.append(row)
        return header, rows

    def task_markdown(self) -> str:
        """The table of the tasks in Markdown."""
        header, rows = self.task_rows()
        return _markdown(header, ["---", "---"] + ["---:"] * (len(header) - 2), rows)

    def markdown(self, measure: str = "bits_per_byte") -> str:
        """The table of a measure in Markdown."""
        header, rows = self.rows(measure)
        return _markdown(header, ["---"] + ["---:"] * (len(header) - 1), rows)


def _markdown(header: list[str], rule: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *rows])


def score_models(
    models: Mapping[str, tuple[str, str | None]],
    sources: Mapping[str, LanguageText],
    languages: Sequence[Sequence[str]],
    block_size: int = 1024,
    batch_size: int = 8,
    max_tokens: int | None = None,
    tasks: Any = None,
) -> Evaluation:
    """Scores models on held-out text, one in memory at a time.

    Args:
        models: folder or hub id and revision of each model, by its name in the results.
        sources: held-out text of each language.
        languages: the old languages, then the languages of each expansion.
        tasks: `HarnessTasks` to run as well.

    Raises:
        InputError: a model cannot be loaded, a text does not fit its kind, or there are tasks for an encoder-decoder.
    """
    if tasks is not None:
        check_decoders(models, "tasks of lm-evaluation-harness")
    old, *expansions = (list(codes) for codes in languages)
    result = Evaluation(old, [code for new in expansions for code in new], expansions=expansions)
    texts: dict[bool, dict[str, Any]] = {}  # for encoder-decoders, and for decoders
    for name, (path, revision) in models.items():
        model, tokenizer = load_for_inference(path, revision)
        kind = model.config.is_encoder_decoder
        if kind not in texts:
            texts[kind] = texts_for(model.config, sources)
        with errors_at(name):
            result.models[name] = evaluate_model(model, tokenizer, texts[kind], block_size, batch_size, max_tokens)
        if tasks is not None:
            result.tasks[name] = tasks.evaluate(model, tokenizer, batch_size)
        del model  # before the next one is loaded
    return result


def check_decoders(models: Mapping[str, tuple[str, str | None]], what: str) -> None:
    """Refuses encoder-decoders among models, before any of them is scored.

    Args:
        models: see `score_models`.
        what: see `check_decoder`.

    Raises:
        InputError: a model is an encoder-decoder.
    """
    for name, (path, revision) in models.items():
        check_decoder(load_config(resolve_checkpoint(path, revision)), name, what)
