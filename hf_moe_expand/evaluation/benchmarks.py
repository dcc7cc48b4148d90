"""Task lists: the task of each benchmark in each language; and their means over languages."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..core.errors import InputError, errors_at
from ..core.languages import LanguageCode
from ..core.schema import Schema, Text, read
from ..core.yamlfile import read_yaml
from .harness import Benchmarks, Metric, TaskScore

_PACKAGED = Path(__file__).with_name("benchmarks.yaml")


class _TaskList(Schema):
    benchmarks: dict[Text, dict[LanguageCode, Text]]


def task_list(argument: str) -> Benchmarks | None:
    """The task list that `--tasks` names: the package's for a paper, or a YAML file; None for tasks by their names."""
    packaged = read_yaml(_PACKAGED)
    if argument in packaged:
        return packaged[argument]
    if not argument.endswith((".yaml", ".yml")):
        return None
    with errors_at(argument):
        return read(_TaskList, {"benchmarks": read_yaml(argument)}).benchmarks


def in_languages(benchmarks: Benchmarks, languages: Sequence[str]) -> tuple[Benchmarks, list[str]]:
    """The tasks in these languages, of which there must be one, and a line for each language that lacks some."""
    found = {name: {code: of[code] for code in languages if code in of} for name, of in benchmarks.items()}
    if not any(found.values()):
        known = ", ".join(sorted({code for of in benchmarks.values() for code in of}))
        wanted = ", ".join(languages) or "any language that is known"
        raise InputError(
            f"The task list has no task in {wanted}; it has {known}. Name languages with --old, --new or --unnamed."
        )
    missing = {code: [name for name, of in found.items() if code not in of] for code in languages}
    return found, [f"no task in {code}: {', '.join(names)}" for code, names in missing.items() if names]


def mean_metric(metrics: Iterable[Metric | None]) -> Metric | None:
    """The mean of independent scores, and its standard error where all have one; None without any."""
    known = [metric for metric in metrics if metric is not None]
    if not known:
        return None
    errors = [metric.stderr for metric in known if metric.stderr is not None]
    stderr = sum(error**2 for error in errors) ** 0.5 / len(known) if len(errors) == len(known) else None
    return Metric(sum(metric.value for metric in known) / len(known), stderr, known[0].higher_is_better)


def benchmark_means(
    scores: Mapping[str, TaskScore], benchmarks: Benchmarks, languages: Sequence[str]
) -> dict[str, Metric | None]:
    """The mean of each benchmark over languages, then, as `mean`, that over benchmarks."""
    means: dict[str, Metric | None] = {}
    for name, of in benchmarks.items():
        tasks = [scores[of[code]].metrics for code in languages if code in of and of[code] in scores]
        metric = next((known for known in ("acc_norm", "acc") if tasks and all(known in one for one in tasks)), None)
        means[name] = mean_metric(one.get(metric) if metric else next(iter(one.values()), None) for one in tasks)
    return {**means, "mean": mean_metric(list(means.values()))}
