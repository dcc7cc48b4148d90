"""`plan METHOD`, a verb for each registered method, with options and help from the method's class; and `curriculum`,
which plans when each language enters training."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from pydantic.fields import FieldInfo

from ..core.errors import InputError
from ..planning.methods import METHODS, Option, PlanSettings, read_plan_settings
from . import kinds
from .groups import group, verb
from .kinds import NewFile, Overwrite, Texts, codes
from .printing import print_table
from .signature import Parameters, key_options, with_parameters

_EMPTY = inspect.Parameter.empty
# The option for the file of each analysis.
_ANALYSES = {"similarity": "analysis", "deviation": "deviation"}


@group
def plan() -> None:
    """Decide which layer gets how many experts."""


def _add_method(method: type[PlanSettings], name: str) -> None:
    """Adds `plan NAME`."""

    def work(context: typer.Context, **arguments: Any) -> None:
        _plan(method, name, arguments)

    plan.command(name, help=inspect.getdoc(method))(with_parameters(work, _parameters(method)))


def _option(hint: Any, flag: str, help: str, default: Any = None) -> tuple[Any, Any]:
    return Annotated[hint, typer.Option(flag, help=help)], default


def _parameters(method: type[PlanSettings]) -> Parameters:
    """The options of a method, required ones first: its analysis, its keys, and the options of every plan."""
    parameters: Parameters = {}
    hint: Any
    if method.analysis:
        file = _ANALYSES[method.analysis]
        others = [option.flag for key in method.own_keys().values() for option in _options(key)]
        hint, unset = (Path | None, None) if "--analysis" in others else (Path, _EMPTY)  # which may take its place
        parameters[file] = _option(hint, f"--{file}", f"{file}.json of `analyze {method.analysis}`.", unset)
    for name, key in method.own_keys().items():
        parameters |= _key_options(name, key)
    parameters["out"] = _option(Path, "--out", "File to write.", _EMPTY)
    if not method.analysis:
        about = "Number of layers (6+6: an encoder's and its decoder's), or the checkpoint to count them in."
        hint, unset = (str | None, None) if method.grows else (str, _EMPTY)
        parameters["layers"] = _option(hint, "--layers", about, unset)
        parameters["old"] = _option(str, "--old", "Codes of the old languages, e.g. en,es,zh.", "")
        parameters["new"] = _option(str, "--new", "Codes of the new languages, e.g. el,hu,tr.", "")
    for name, key in method.all_keys().items():
        parameters |= {} if name in method.own_keys() else _key_options(name, key)
    if not method.analysis:
        parameters["analysis"] = _option(Path | None, "--analysis", "analysis.json, for classifiers by similarity.")
    parameters["seed"] = _option(int, "--seed", "Random seed.", 0)
    if method.grows:
        about = "Expanded checkpoint that the plan grows; numbers of experts then count new ones."
        parameters["grows_from"] = _option(str | None, "--from", about)
    parameters["overwrite"] = _option(bool, "--overwrite", "Replace the output if it exists.", False)
    return dict(sorted(parameters.items(), key=lambda item: item[1][1] is not _EMPTY))


def _key_options(name: str, key: FieldInfo) -> Parameters:
    """The options for a key: those in its annotation, or `--key VALUE`."""
    given: Parameters = {}
    for option in _options(key):
        hint, unset = (bool, False) if option.kind is bool else (Optional[option.kind], None)  # noqa: UP045
        given[_name(option)] = _option(hint, option.flag, option.help, unset)
    return given or key_options({name: key})


def _options(key: FieldInfo) -> list[Option]:
    return [part for part in key.metadata if isinstance(part, Option)]


def _name(option: Option) -> str:
    return option.flag.removeprefix("--").replace("-", "_")


def _keys_given(method: type[PlanSettings], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The method's keys, from the options."""
    keys = {}
    for name, key in method.all_keys().items():
        options = _options(key)
        if not options:
            keys[name] = arguments[name]
            continue
        flags = [option.flag for option in options]
        values = [(option, arguments[_name(option)]) for option in options]
        chosen = [option.value(value) for option, value in values if value is not None and value is not False]
        if len(chosen) > 1:
            raise InputError(f"{' and '.join(flags)}: give only one of them.")
        if chosen:
            keys[name] = chosen[0]
        elif key.is_required():
            raise InputError(f"Give {' or '.join(flags)}.")
    return keys


def _plan(method: type[PlanSettings], name: str, arguments: Mapping[str, Any]) -> None:
    out, seed = arguments["out"], arguments["seed"]
    kinds.check_seed(seed)
    kinds.check_file(out, arguments["overwrite"])
    settings = read_plan_settings({"method": name, **_keys_given(method, arguments)})
    from ..planning.make import make_plan
    from ..planning.results import DeviationResult, SimilarityResult

    similarity = SimilarityResult.from_json(arguments["analysis"]) if arguments.get("analysis") else None
    deviation = DeviationResult.from_json(arguments["deviation"]) if arguments.get("deviation") else None
    if method.analysis == "deviation" and (similarity is None) == (deviation is None):
        raise InputError(
            "Give --deviation (the file of `analyze deviation`), or in its place --analysis (that of `analyze "
            "similarity`)."
        )
    old, new = codes(arguments.get("old", "")), codes(arguments.get("new", ""))
    if similarity is not None and not method.makes_groups:
        old, new = old or similarity.old, new or similarity.new
    counts: list[int] = []
    exclusive = False
    encoder = similarity.encoder_layers if similarity is not None else 0
    if base := arguments.get("grows_from"):
        kinds.expanded(base, {})
        from ..checkpoint.source import grown_from
        from ..core.languages import check_named_once

        counts, known, encoder, exclusive = grown_from(base)
        old = old or known
        if again := [code for code in new if code in known]:
            raise InputError(f"{', '.join(again)}: already a language of {base}; leave it out of --new.")
        check_named_once([*known, *new])
    measured = similarity.similarity if similarity else deviation.deviation if deviation else []
    num_layers = len(counts) or len(measured)
    if arguments.get("layers"):
        num_layers, encoder = _num_layers(arguments["layers"])
    if not num_layers:
        raise InputError("The number of layers is not known: give --layers (a number or the checkpoint), or --from.")
    made = make_plan(settings, num_layers, old, new, similarity, seed, deviation, counts, encoder, exclusive)
    made.save(out)
    for expert, languages in enumerate(made.groups):
        print(f"expert {expert}  {', '.join(languages)}")
    print(f"experts per layer  {made.counts_in_words} (total {made.total_experts})")
    if counts:
        beside = f"beside the {sum(counts)} of {base}: with --from, numbers of experts count new ones alone"
        print(f"new experts        {made.total_experts - sum(counts)}, {beside}")
    if not made.groups:
        without = "" if made.classifier_layers else settings.without_classifiers
        print(f"classifier layers  {made.classifiers_in_words}{without}")
    print(f"wrote {out}")


def _num_layers(layers: str) -> tuple[int, int]:
    """The number of layers, given or that of the given checkpoint, and of the encoder's among them."""
    try:
        numbers = [int(part) for part in layers.split("+")]
    except ValueError:
        from ..checkpoint.source import load_config, resolve_checkpoint
        from ..modeling import stack_sizes

        sizes = stack_sizes(load_config(resolve_checkpoint(layers, weights=False)))
        return sum(sizes.values()), sizes.get("encoder", 0)
    if len(numbers) > 2 or min(numbers) < 1:
        raise InputError(f"--layers is {layers}: must be at least 1, or a checkpoint.")
    return sum(numbers), numbers[0] if len(numbers) == 2 else 0


for _word, _method in METHODS.items():
    _add_method(_method, _word)


@group
def curriculum() -> None:
    """Decide which language enters training when."""


@verb(curriculum, "derive")
def curriculum_derive(
    run: Path,
    *,
    out: NewFile,
    bins: int = 5,
    merge_first: int = 1,
    steps: int | None = None,
    overwrite: Overwrite = False,
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


@verb(curriculum, "counts")
def curriculum_counts(
    *,
    out: NewFile,
    steps: int,
    counts: str = "",
    data: Texts | None = None,
    thresholds: str = "5e6,8e5",
    shares: str = "1,0.4,0.2",
    overwrite: Overwrite = False,
) -> None:
    """Let languages with little text enter late (count-based).

    Example: hf-moe-expand curriculum counts --data el=el.jsonl --data hi=hi.jsonl --thresholds 1000,100 --steps 2000
    --out curriculum.json

    Args:
        steps: steps of the training.
        counts: examples of each language, e.g. el=6000000,tr=900000.
        data: LANGUAGE=FILE whose documents are counted; repeat.
        thresholds: minimum of examples for each bin but the last.
        shares: share of the training steps in which each bin trains.
    """
    from ..data.curriculum import count_based

    examples = _counts(counts)
    for language, source in (data or {}).items():
        if language in examples:
            raise InputError(f"Language {language!r} is given with --counts and with --data; give it once.")
        examples[language] = len(source.load())
    if not examples:
        raise InputError("No language was given: use --counts el=6000000,... or --data el=FILE.")
    bins = _numbers(thresholds, "--thresholds"), _numbers(shares, "--shares")
    _write(count_based(examples, steps, *bins), out, "examples", examples)


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


def _write(made: Any, out: Path, what: str, known: Mapping[str, float]) -> None:
    order = sorted(made.entry, key=lambda code: (made.entry[code], -known[code]))
    rows = [[code, f"{known[code]:,.0f}", f"{made.entry[code]:,}"] for code in order]
    print_table(["language", what, "enters at step"], rows)
    made.save(out)
    print(f"wrote {out}")
