"""Verbs that decide when each language enters training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError
from .apps import curriculum_app
from .common import check_file, codes, print_table, text_sources
from .options import Out, Overwrite

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..data.curriculum import Curriculum


@curriculum_app.command("derive")
def curriculum_derive(
    run: Annotated[Path, typer.Argument(help="A stage's folder with a validation.json, or the file.")],
    out: Out,
    bins: Annotated[int, typer.Option(help="Number of evenly spaced steps at which languages may enter.")] = 5,
    merge_first: Annotated[int, typer.Option(help="Number of first bins to merge into one (3 in the paper).")] = 1,
    steps: Annotated[int | None, typer.Option(help="Steps of the next training; by default those of the run.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Let languages that over-fitted early in a first run enter late in the next run (step-based).

    Example: hf-moe-expand curriculum derive qwen-el-1 --bins 5 --merge-first 3 --out curriculum.json
    """
    check_file(out, overwrite)
    from ..data.curriculum import step_based
    from ..evaluation.validation import ValidationCurves

    curves = ValidationCurves.load(run)
    best = curves.best_steps()
    _write(step_based(best, bins, curves.total_steps, merge_first, steps), out, "best step", best)


@curriculum_app.command("counts")
def curriculum_counts(
    out: Out,
    steps: Annotated[int, typer.Option(help="Steps of the training.")],
    counts: Annotated[str, typer.Option(help="Examples of each language, e.g. el=6000000,tr=900000.")] = "",
    data: Annotated[
        list[str] | None, typer.Option("--data", help="LANGUAGE=FILE whose documents are counted; repeat.")
    ] = None,
    thresholds: Annotated[str, typer.Option(help="Minimum of examples for each bin but the last.")] = "5e6,8e5",
    shares: Annotated[str, typer.Option(help="Share of the training steps in which each bin trains.")] = "1,0.4,0.2",
    overwrite: Overwrite = False,
) -> None:
    """Let languages with little text enter late (count-based).

    Example: hf-moe-expand curriculum counts --data el=el.jsonl --data hi=hi.jsonl --thresholds 1000,100 --steps 2000
    --out curriculum.json
    """
    check_file(out, overwrite)
    from ..data.curriculum import count_based

    examples = _counts(counts)
    for language, source in text_sources(data or []).items():
        if language in examples:
            raise InputError(f"Language {language!r} is given with --counts and with --data; give it once.")
        examples[language] = len(source.load())
    if not examples:
        raise InputError("No language was given: use --counts el=6000000,... or --data el=FILE.")
    _write(
        count_based(examples, steps, _numbers(thresholds, "--thresholds"), _numbers(shares, "--shares")),
        out,
        "examples",
        examples,
    )


def _counts(argument: str) -> dict[str, float]:
    counts: dict[str, float] = {}
    for part in codes(argument):
        language, _, number = part.partition("=")
        if language in counts:
            raise InputError(f"--counts: language {language!r} is given twice; give it once.")
        counts[language] = _numbers(number, f"--counts {part}")[0]
    return counts


def _numbers(argument: str, what: str) -> list[float]:
    try:
        return [float(part) for part in argument.split(",")]
    except ValueError:
        raise InputError(f"{what}: {argument!r} is not a number or a list of numbers with commas.") from None


def _write(curriculum: "Curriculum", out: Path, what: str, known: "Mapping[str, float]") -> None:
    order = sorted(curriculum.entry, key=lambda code: (curriculum.entry[code], -known[code]))
    rows = [[code, f"{known[code]:,.0f}", f"{curriculum.entry[code]:,}"] for code in order]
    print_table(["language", what, "enters at step"], rows)
    curriculum.save(out)
    print(f"wrote {out}")
