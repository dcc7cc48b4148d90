"""Scores models side by side, and prints the tables."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError
from ..core.printing import print_table
from .scoring_settings import EvaluationSettings

if TYPE_CHECKING:
    from .harness import HarnessTasks
    from .report import Evaluation


def evaluate_models(
    models: Sequence[str],
    sources: dict[str, Any],
    languages: list[list[str]],
    settings: EvaluationSettings,
    tasks: "HarnessTasks | None" = None,
    score_more: "Callable[[Evaluation, EvaluationSettings], None] | None" = None,
) -> "Evaluation":
    """Scores models side by side and prints the tables.

    Args:
        languages: the old languages, then the languages of each expansion.
        tasks: tasks of lm-evaluation-harness to run as well.
        score_more: adds scores to these.
    """
    from .report import in_time, score_models

    labels: dict[str, tuple[str, str | None]] = {}
    for name in models:
        labels[label_of(name, labels)] = (name, None)
    settings = in_time(settings, labels, sources)
    result = score_models(labels, sources, languages, settings, tasks)
    if score_more is not None:
        score_more(result, settings)
    if sources:
        print("bits per byte")
        print_table(*result.rows())
        print("perplexity")
        print_table(*result.rows("perplexity"))
        print("\n".join(result.notes()))
    if tasks is not None:
        print("tasks")
        print_table(*result.task_rows())
        if result.benchmarks:
            print_table(*result.benchmark_rows())
    return result


def label_of(name: str, taken: Collection[str]) -> str:
    """The name of a model in results: its folder's name, in a run `RUN/STAGE`, or its hub id."""
    from ..checkpoint.source import name_in_results

    label = name_in_results(name)
    if label in taken:
        raise InputError(f"{name}: two models are called {label!r}; rename a folder.")
    return label
