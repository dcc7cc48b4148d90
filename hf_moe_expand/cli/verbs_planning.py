"""`plan METHOD`, a verb for each registered method, with options and help from the method's class; and `curriculum`,
which plans when each language enters training."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from ..checkpoint.arguments import NewCodes, NewFile, OldCodes, codes, expanded
from ..core.errors import InputError, library_errors_at
from ..core.printing import print_table
from ..core.verbs import Group, Keys
from ..planning.methods import METHODS, PlanSettings

plan = Group("Decide which layer gets how many experts.")


def _plan(
    *,
    analysis: Path | None = None,
    deviation: Path | None = None,
    settings: PlanSettings,
    out: NewFile,
    layers: str | None = None,
    old: OldCodes = (),
    new: NewCodes = (),
    seed: int = 0,
    from_: str | None = None,
) -> None:
    """Makes a plan by the method of its settings.

    Args:
        analysis: analysis.json of `analyze similarity`; for methods without one, of classifiers by similarity.
        deviation: deviation.json of `analyze deviation`.
        layers: number of layers (6+6: an encoder's and its decoder's), or the checkpoint to count them in.
        from_: expanded checkpoint that the plan grows; numbers of experts then count new ones.
    """
    from ..planning.make import make_plan
    from ..planning.results import DeviationResult, SimilarityResult

    alike = SimilarityResult.load(analysis) if analysis else None
    moved = DeviationResult.load(deviation) if deviation else None
    if settings.analysis == "deviation" and (alike is None) == (moved is None):
        raise InputError("Give --deviation (of `analyze deviation`) or --analysis (of `analyze similarity`).")
    if alike is not None and not settings.makes_groups:
        old, new = old or alike.old, new or alike.new
    counts, known, encoder, exclusive = _of_base(from_) if from_ else ([], [], 0, False)
    encoder = encoder if from_ or alike is None else alike.encoder_layers
    num_layers = len(counts) or len(alike.similarity if alike else moved.deviation if moved else [])
    if layers:
        num_layers, encoder = _num_layers(layers)
    if not num_layers:
        raise InputError("The number of layers is not known: give --layers (a number or the checkpoint), or --from.")
    of_model: dict[str, Any] = {"grows_from": counts, "encoder_layers": encoder, "exclusive": exclusive}
    made = make_plan(settings, num_layers, [*(old or known)], [*new], alike or moved, seed, **of_model)
    made.save(out)
    _show(made, settings, counts, from_)
    print(f"wrote {out}")


for _word, _method in METHODS.items():
    _fixed: dict[str, Any] = {"layers": None, "old": (), "new": ()} if _method.analysis else {}
    _fixed |= {} if _method.analysis == "deviation" else {"deviation": None}
    _fixed |= {} if _method.grows else {"from_": None}
    _settings = Annotated[_method, Keys(without=("method",), defaults={"method": _word})]  # type: ignore[valid-type]
    plan.add(_plan, _word, _fixed, {"settings": _settings}, help=inspect.getdoc(_method))


def _of_base(name: str) -> tuple[list[int], list[str], int, bool]:
    """Of the checkpoint that a plan grows: numbers of experts, languages, encoder's layers, and whether its experts are
    exclusive."""
    expanded(name, {})
    from ..checkpoint.facts import Facts
    from ..checkpoint.source import load_expanded_config, resolve_checkpoint

    facts = Facts(load_expanded_config(resolve_checkpoint(name, weights=False)))
    if facts.groups:
        raise InputError(f"{name}: is a DMoE checkpoint, which does not grow by plans: `train adapt` adds a language.")
    return facts.counts, facts.history.languages, facts.encoder_layers, facts.exclusive


def _show(made: Any, settings: PlanSettings, counts: list[int], base: str | None) -> None:
    """Prints a plan; `counts` are the experts of the model that grows."""
    for expert, languages in enumerate(made.groups):
        print(f"expert {expert}  {', '.join(languages)}")
    print(f"experts per layer  {made.counts_in_words} (total {made.total_experts})")
    if counts:
        beside = f"beside the {sum(counts)} of {base}: with --from, numbers of experts count new ones alone"
        print(f"new experts        {made.total_experts - sum(counts)}, {beside}")
    if not made.groups:
        without = "" if made.classifier_layers else settings.without_classifiers
        print(f"classifier layers  {made.classifiers_in_words}{without}")


def _num_layers(layers: str) -> tuple[int, int]:
    """The number of layers, given or that of the given checkpoint, and of the encoder's among them."""
    try:
        numbers = [int(part) for part in layers.split("+")]
    except ValueError:
        from ..checkpoint.facts import Facts
        from ..checkpoint.source import load_config, resolve_checkpoint

        facts = Facts(load_config(resolve_checkpoint(layers, weights=False)))
        return len(facts.counts), facts.encoder_layers
    if len(numbers) > 2 or min(numbers) < 1:
        raise InputError(f"--layers is {layers}: must be at least 1, or a checkpoint.")
    return sum(numbers), numbers[0] if len(numbers) == 2 else 0


curriculum = Group("Decide which language enters training when.")


@curriculum.verb("derive")
def curriculum_derive(
    run: Path, *, out: NewFile, bins: int = 5, merge_first: int = 1, steps: int | None = None
) -> None:
    """Let languages that over-fitted early in a first run enter late in the next run (step-based).

    Example: hf-moe-expand curriculum derive qwen-el-1 --bins 5 --merge-first 3 --out curriculum.json

    Args:
        run: a stage's folder with a validation.json, or the file.
        bins: number of evenly spaced steps at which languages may enter.
        merge_first: number of first bins to merge into one (3 in the paper).
        steps: steps of the next training; by default those of the run.
    """
    from ..data.curriculum import step_based
    from ..evaluation.validation import ValidationCurves

    curves = ValidationCurves.load(run)
    best = curves.best_steps()
    _write(step_based(best, bins, curves.total_steps, merge_first, steps), out, "best step", best)


@curriculum.verb("counts")
def curriculum_counts(
    *, out: NewFile, steps: int, counts: str, thresholds: str = "5e6,8e5", shares: str = "1,0.4,0.2"
) -> None:
    """Let languages with little text enter late (count-based).

    Example: hf-moe-expand curriculum counts --counts el=6000000,hi=900000 --steps 2000 --out curriculum.json

    Args:
        steps: steps of the training.
        counts: examples of each language, e.g. el=6000000,tr=900000.
        thresholds: minimum of examples for each bin but the last.
        shares: share of the training steps in which each bin trains.
    """
    from ..data.curriculum import count_based

    examples: dict[str, float] = {}
    for part in codes(counts):
        language, _, number = part.partition("=")
        if language in examples:
            raise InputError(f"--counts: language {language!r} is given twice; give it once.")
        examples[language] = _numbers(number, f"--counts {part}")[0]
    bins = _numbers(thresholds, "--thresholds"), _numbers(shares, "--shares")
    _write(count_based(examples, steps, *bins), out, "examples", examples)


def _numbers(argument: str, what: str) -> list[float]:
    with library_errors_at(what, ValueError):
        return [float(part) for part in argument.split(",")]


def _write(made: Any, out: Path, what: str, known: Mapping[str, float]) -> None:
    order = sorted(made.entry, key=lambda code: (made.entry[code], -known[code]))
    rows = [[code, f"{known[code]:,.0f}", f"{made.entry[code]:,}"] for code in order]
    print_table(["language", what, "enters at step"], rows)
    made.save(out)
    print(f"wrote {out}")
