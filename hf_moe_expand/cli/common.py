"""Functions that several verbs share: they read arguments, check outputs and print tables."""

from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError
from ..evaluation.settings import EvaluationSettings

if TYPE_CHECKING:
    from ..evaluation.harness import HarnessTasks
    from ..evaluation.report import Evaluation


def text_sources(arguments: list[str], look: bool = False) -> dict[str, Any]:
    """The texts of `LANGUAGE=FILE` arguments, by language.

    Args:
        look: refuse files that are not there now, before any work.
    """
    from ..core.languages import check_named_once
    from ..data.sources import LanguageText

    sources: dict[str, LanguageText] = {}
    for argument in arguments:
        source = LanguageText.parse(argument)
        if source.language in sources:
            raise InputError(f"Language {source.language!r} is given twice; put its files into one folder.")
        sources[source.language] = source
        if look:
            source.files()
    check_named_once(list(sources))
    return sources


def texts_of(arguments: list[str], seed: int | None = None) -> dict[str, Any]:
    """The documents of `LANGUAGE=FILE` arguments, by language; with a seed shuffled, as a recipe's are."""
    loaded = {code: source.load() for code, source in text_sources(arguments).items()}
    return {code: (rows if seed is None else rows.shuffle(seed=seed))["text"] for code, rows in loaded.items()}


def check_checkpoints(*names: str, revision: str | None = None, expanded: bool = False) -> None:
    """Refuses names that are neither a checkpoint's folder nor a hub id, before any work.

    Args:
        expanded: refuse dense checkpoints too.
    """
    from ..checkpoint.source import check_expanded, local_checkpoint

    for name in names:
        (check_expanded if expanded else local_checkpoint)(name, revision)


def evaluate_models(
    models: list[str],
    sources: dict[str, Any],
    languages: list[list[str]],
    settings: EvaluationSettings,
    ensemble: int | None = None,
    tasks: "HarnessTasks | None" = None,
) -> "Evaluation":
    """Scores models side by side and prints the tables.

    Args:
        languages: the old languages, then the languages of each expansion.
        tasks: tasks of lm-evaluation-harness to run as well.
    """
    from ..evaluation.report import check_decoders, in_time, score_models

    labels: dict[str, tuple[str, str | None]] = {}
    for name in models:
        labels[model_label(name, labels)] = (name, None)
    if ensemble is not None:
        check_decoders(labels, "ensembles")
    settings = in_time(settings, labels, sources)
    result = score_models(labels, sources, languages, settings, tasks)
    if ensemble is not None:
        from ..baselines.ensemble import evaluate_ensemble
        from ..checkpoint.source import resolve_checkpoint
        from ..inference.models import load_tokenizer

        texts = {code: source.load()["text"] for code, source in sources.items()}
        tokenizer = load_tokenizer(resolve_checkpoint(models[-1]), models[-1])
        result.models[f"ensemble of {len(models)}, top {ensemble}"] = evaluate_ensemble(
            models, tokenizer, texts, ensemble, **settings.model_dump(exclude={"questions"})
        )
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


def model_label(name: str, taken: Collection[str]) -> str:
    """The name of a model in results: its folder's name, in a run `RUN/STAGE`, or its hub id."""
    from ..checkpoint.source import name_in_results

    label = name_in_results(name)
    if label in taken:
        raise InputError(f"{name}: two models are called {label!r}; rename a folder.")
    return label


def codes(argument: str) -> list[str]:
    return [code.strip() for code in argument.split(",") if code.strip()]


def check_file(path: Path | None, overwrite: bool) -> None:
    """Refuses a file that exists (without `overwrite`), is a folder or cannot be written, before the work of hours that
    it is for; None is no file."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder; give the name of a file in it.")
        if path.exists() and not overwrite:
            raise InputError(f"{path}: exists already; choose another file or pass --overwrite.")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{path}: cannot be written there ({error.strerror}).") from None


def print_or_write(text: str, out: Path | None, overwrite: bool) -> None:
    """Prints a page, or writes it to a file."""
    check_file(out, overwrite)
    if out is None:
        print(text, end="" if text.endswith("\n") else "\n")
    else:
        from ..core.jsonfile import write_text

        write_text(out, text)
        print(f"wrote {out}")


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Prints a table; if the terminal is too narrow, each word of a heading is printed on its own line."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for headings in (header, [heading.replace(" ", "\n") for heading in header]):
        table = Table(*headings)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        if Console(width=10_000).measure(table).maximum <= console.width:
            break
    console.print(table)
