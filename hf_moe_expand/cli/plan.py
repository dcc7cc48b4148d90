"""`plan METHOD`, a verb for each registered method, with options and help from the method's function; and `curriculum`,
which plans when each language enters training."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from pydantic.fields import FieldInfo

from ..core.errors import InputError
from ..planning.methods import METHODS, Option, PlanSettings, read_plan_settings
from . import options as opt
from .common import check_checkpoints, check_file, codes, print_table, text_sources

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..data.curriculum import Curriculum

_EMPTY = inspect.Parameter.empty
# The option for the file of each analysis.
_ANALYSES = {"similarity": "analysis", "deviation": "deviation"}


def _verb(method: type[PlanSettings], name: str) -> None:
    """Adds `plan NAME`."""

    def verb(**arguments: Any) -> None:
        _plan(method, name, arguments)

    verb.__doc__ = inspect.getdoc(method)
    opt.plan_app.command(name)(opt.with_parameters(verb, _parameters(method)))


def _parameters(method: type[PlanSettings]) -> opt.Parameters:
    """The options of a method, required ones first: its analysis, its keys, and the options of every plan."""
    parameters: opt.Parameters = {}
    if method.analysis:
        file = _ANALYSES[method.analysis]
        help_ = f"{file}.json of `analyze {method.analysis}`."
        others = [option.flag for key in method.own_keys().values() for option in _options(key)]
        kind, unset = (Path | None, None) if "--analysis" in others else (Path, _EMPTY)  # which may take its place
        parameters[file] = (Annotated[kind, typer.Option(help=help_)], unset)
    for name, key in method.own_keys().items():
        parameters |= _key_options(name, key)
    parameters["out"] = (opt.Out, _EMPTY)
    if not method.analysis:
        parameters |= {
            "layers": (opt.Layers, None if method.grows else _EMPTY),
            "old": (opt.OldCodes, ""),
            "new": (opt.NewCodes, ""),
        }
    for name, key in method.all_keys().items():
        parameters |= {} if name in method.own_keys() else _key_options(name, key)
    if not method.analysis:
        help_ = "analysis.json, for classifiers by similarity."
        parameters["analysis"] = (Annotated[Path | None, typer.Option(help=help_)], None)
    parameters["seed"] = (opt.Seed, 0)
    if method.grows:
        parameters["grows_from"] = (opt.GrowsFrom, None)
    parameters["overwrite"] = (opt.Overwrite, False)
    return dict(sorted(parameters.items(), key=lambda item: item[1][1] is not _EMPTY))


def _key_options(name: str, key: FieldInfo) -> opt.Parameters:
    """The options for a key: those in its annotation, or `--key VALUE`."""
    if options := _options(key):
        given = {}
        for option in options:
            kind, unset = (bool, False) if option.kind is bool else (Optional[option.kind], None)  # noqa: UP045
            given[_name(option)] = (Annotated[kind, typer.Option(option.flag, help=option.help)], unset)
        return given
    return opt.key_options({name: key}, {})


def _options(key: FieldInfo) -> list[Option]:
    return [part for part in key.metadata if isinstance(part, Option)]


def _name(option: Option) -> str:
    return option.flag.removeprefix("--").replace("-", "_")


def _keys_given(method: type[PlanSettings], arguments: dict[str, Any]) -> dict[str, Any]:
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


def _plan(method: type[PlanSettings], name: str, arguments: dict[str, Any]) -> None:
    out, seed = arguments["out"], arguments["seed"]
    check_file(out, arguments["overwrite"])
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
    if arguments.get("grows_from"):
        check_checkpoints(arguments["grows_from"], expanded=True)
        from ..checkpoint.source import grown_from
        from ..core.languages import check_named_once

        counts, known, encoder, exclusive = grown_from(arguments["grows_from"])
        old = old or known
        if again := [code for code in new if code in known]:
            raise InputError(
                f"{', '.join(again)}: already a language of {arguments['grows_from']}; leave it out of --new."
            )
        check_named_once([*known, *new])
    measured = similarity.similarity if similarity else deviation.deviation if deviation else []
    num_layers = len(counts) or len(measured)
    if arguments.get("layers"):
        num_layers, encoder = _num_layers(arguments["layers"])
    if not num_layers:
        raise InputError("The number of layers is not known: give --layers (a number or the checkpoint), or --from.")
    plan = make_plan(settings, num_layers, old, new, similarity, seed, deviation, counts, encoder, exclusive)
    plan.save(out)
    for expert, group in enumerate(plan.groups):
        print(f"expert {expert}  {', '.join(group)}")
    print(f"experts per layer  {plan.counts_in_words} (total {plan.total_experts})")
    if counts:
        print(
            f"new experts        {plan.total_experts - sum(counts)}, beside the {sum(counts)} of "
            f"{arguments['grows_from']}: with --from, numbers of experts count new ones alone"
        )
    if not plan.groups:
        without = "" if plan.classifier_layers else settings.without_classifiers
        print(f"classifier layers  {plan.classifiers_in_words}{without}")
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
    _verb(_method, _word)


@opt.curriculum_app.command("derive")
def curriculum_derive(
    run: Annotated[Path, typer.Argument(help="A stage's folder with a validation.json, or the file.")],
    out: opt.Out,
    bins: Annotated[int, opt.whole_number("Number of evenly spaced steps at which languages may enter.")] = 5,
    merge_first: Annotated[int, opt.whole_number("Number of first bins to merge into one (3 in the paper).")] = 1,
    steps: Annotated[int | None, opt.whole_number("Steps of the next training; by default those of the run.")] = None,
    overwrite: opt.Overwrite = False,
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


@opt.curriculum_app.command("counts")
def curriculum_counts(
    out: opt.Out,
    steps: Annotated[int, opt.whole_number("Steps of the training.")],
    counts: Annotated[str, typer.Option(help="Examples of each language, e.g. el=6000000,tr=900000.")] = "",
    data: Annotated[
        list[str] | None, typer.Option("--data", help="LANGUAGE=FILE whose documents are counted; repeat.")
    ] = None,
    thresholds: Annotated[str, typer.Option(help="Minimum of examples for each bin but the last.")] = "5e6,8e5",
    shares: Annotated[str, typer.Option(help="Share of the training steps in which each bin trains.")] = "1,0.4,0.2",
    overwrite: opt.Overwrite = False,
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
