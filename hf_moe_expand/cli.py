"""The command line. Each verb is a function: its signature is the options, its docstring the help.

Nothing heavy is imported up here, so that `--help` answers at once.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import InputError

if TYPE_CHECKING:
    from .settings import PlanSettings

app = typer.Typer(
    help="Teach a dense language model new languages by growing its feed-forward layers into mixtures of experts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
analyze_app = typer.Typer(help="Measure a model on text.", no_args_is_help=True, rich_markup_mode=None)
plan_app = typer.Typer(help="Decide which layer gets how many experts.", no_args_is_help=True, rich_markup_mode=None)
train_app = typer.Typer(help="Train one stage.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(analyze_app, name="analyze")
app.add_typer(plan_app, name="plan")
app.add_typer(train_app, name="train")

Model = Annotated[str, typer.Argument(help="Folder or hub id of a checkpoint.")]
Old = Annotated[list[str], typer.Option("--old", help="LANGUAGE=FILE of an old language; repeat.")]
New = Annotated[list[str], typer.Option("--new", help="LANGUAGE=FILE of a new language; repeat.")]
Data = Annotated[list[str], typer.Option("--data", help="LANGUAGE=FILE; repeat for each language.")]
OldCodes = Annotated[str, typer.Option("--old", help="Codes of the old languages, e.g. en,es,zh.")]
NewCodes = Annotated[str, typer.Option("--new", help="Codes of the new languages, e.g. el,hu,tr.")]
Out = Annotated[Path, typer.Option("--out", help="File to write.")]
Revision = Annotated[str | None, typer.Option(help="Revision of a hub id.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what exists.")]
Config = Annotated[Path | None, typer.Option(help="YAML file with the stage's settings.")]
Layers = Annotated[str, typer.Option("--layers", help="Number of layers, or a checkpoint that has them.")]
TopK = Annotated[int, typer.Option(help="Active experts a token.")]
ClassifierCount = Annotated[int, typer.Option("--classifier-layers", help="How many layers get a classifier.")]
ClassifierChoice = Annotated[str, typer.Option(help="Which: similarity, random, last, all or none.")]
Analysis = Annotated[Path | None, typer.Option(help="analysis.json, for classifiers by similarity.")]
Total = Annotated[int, typer.Option("--total-experts", help="Experts in all layers, each layer's original counted.")]
Minimum = Annotated[int, typer.Option(help="Least experts a layer.")]
BatchSize = Annotated[int, typer.Option(help="Blocks in a forward pass.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.")]


@analyze_app.command("similarity")
def analyze_similarity(
    base: Model,
    old: Old,
    new: New,
    out: Out,
    tokens: Annotated[int, typer.Option(help="Tokens of each language.")] = 100_000,
    block_size: BlockSize = 1024,
    batch_size: BatchSize = 8,
    seed: Seed = 0,
    revision: Revision = None,
    overwrite: Overwrite = False,
) -> None:
    """How alike the languages are in each layer (LayerMoE), dense or expanded model.

    Example: hf-moe-expand analyze similarity Qwen/Qwen2.5-0.5B --old en=en.jsonl --new el=el.jsonl --out analysis.json
    """
    _check_file(out, overwrite)
    old_sources, new_sources = _sources(old), _sources(new)
    from .data.sources import check_languages

    check_languages(old_sources, new_sources)
    for source in [*old_sources.values(), *new_sources.values()]:
        source.files()
    from .analysis.similarity import measure_similarity
    from .models import load_for_inference

    model, tokenizer = load_for_inference(base, revision)
    texts = {c: s.load().shuffle(seed=seed)["text"] for c, s in {**old_sources, **new_sources}.items()}
    result = measure_similarity(
        model, tokenizer, texts, list(old_sources), list(new_sources), tokens, block_size, batch_size
    )
    result.to_json(out)
    print("layer  similarity")
    for layer, value in enumerate(result.similarity):
        print(f"{layer:5d}  {value:.4f}")
    print(f"wrote {out}")


@plan_app.command("layer-moe")
def plan_layer_moe(
    analysis: Annotated[Path, typer.Option(help="analysis.json of `analyze similarity`.")],
    total_experts: Total,
    out: Out,
    minimum: Minimum = 2,
    similarity_floor: Annotated[float | None, typer.Option(help="Count smaller similarities as this.")] = None,
    classifier_layers: ClassifierCount = 0,
    classifier_choice: ClassifierChoice = "similarity",
    top_k: TopK = 2,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Fewer experts where languages are more alike (LayerMoE).

    Example: hf-moe-expand plan layer-moe --analysis analysis.json --total-experts 72 --classifier-layers 7 --out p.json
    """
    from .settings import PlanSettings

    settings = PlanSettings(
        "layer-moe", total_experts=total_experts, minimum=minimum, similarity_floor=similarity_floor,
        classifier_layers=classifier_layers, classifier_choice=classifier_choice, top_k=top_k,
    )  # fmt: skip
    _plan(settings, out, overwrite, seed, analysis=analysis)


@plan_app.command("uniform")
def plan_uniform(
    layers: Layers,
    experts: Annotated[int, typer.Option(help="Experts in each layer, the original counted.")],
    out: Out,
    old: OldCodes = "",
    new: NewCodes = "",
    classifier_layers: ClassifierCount = 0,
    classifier_choice: ClassifierChoice = "none",
    analysis: Analysis = None,
    top_k: TopK = 2,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """The same number of experts in every layer (MoE-LPR).

    Example: hf-moe-expand plan uniform --layers 24 --experts 6 --old en,es,zh --new el,hu,tr --out plan.json
    """
    from .settings import PlanSettings

    settings = PlanSettings(
        "uniform",
        experts=experts,
        classifier_layers=classifier_layers,
        classifier_choice=classifier_choice,
        top_k=top_k,
    )
    _plan(settings, out, overwrite, seed, layers, old, new, analysis)


@plan_app.command("mola")
def plan_mola(
    layers: Layers,
    out: Out,
    shape: Annotated[
        str, typer.Option(help="inverted-triangle (2 4 6 8 by quarters), triangle, hourglass or rectangle.")
    ] = "inverted-triangle",
    old: OldCodes = "",
    new: NewCodes = "",
    classifier_layers: ClassifierCount = 0,
    classifier_choice: ClassifierChoice = "none",
    analysis: Analysis = None,
    top_k: TopK = 2,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """More experts in higher layers, by a fixed shape (MoLA).

    Example: hf-moe-expand plan mola --layers 24 --old en,es,zh --new el,hu,tr --out plan.json
    """
    from .settings import PlanSettings

    settings = PlanSettings(
        "mola", shape=shape, classifier_layers=classifier_layers, classifier_choice=classifier_choice, top_k=top_k
    )
    _plan(settings, out, overwrite, seed, layers, old, new, analysis)


@plan_app.command("random")
def plan_random(
    layers: Layers,
    total_experts: Total,
    out: Out,
    minimum: Minimum = 2,
    old: OldCodes = "",
    new: NewCodes = "",
    classifier_layers: ClassifierCount = 0,
    classifier_choice: ClassifierChoice = "none",
    analysis: Analysis = None,
    top_k: TopK = 2,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """A total shared out at random (LayerMoE's ablation).

    Example: hf-moe-expand plan random --layers 24 --total-experts 72 --old en,es,zh --new el,hu,tr --out plan.json
    """
    from .settings import PlanSettings

    settings = PlanSettings(
        "random", total_experts=total_experts, minimum=minimum,
        classifier_layers=classifier_layers, classifier_choice=classifier_choice, top_k=top_k,
    )  # fmt: skip
    _plan(settings, out, overwrite, seed, layers, old, new, analysis)


@app.command()
def expand(
    base: Model,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    plan: Annotated[Path, typer.Option(help="plan.json of `plan`.")],
    expert_init: Annotated[
        str, typer.Option(help="New experts: copy of the original FFN, or random weights.")
    ] = "copy",
    seed: Seed = 0,
    revision: Revision = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Write the expanded checkpoint. Needs little memory, whatever the model's size.

    Example: hf-moe-expand expand Qwen/Qwen2.5-0.5B qwen-el --plan plan.json
    """
    from .checkpoint.expand import expand_checkpoint
    from .planning.plan import Plan

    report = expand_checkpoint(
        base, out, Plan.load(plan), expert_init=expert_init, seed=seed, revision=revision,
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip
    if report.left_out:
        print(f"left out, as the backbone does not use them: {', '.join(report.left_out)}")
    print(f"wrote {out}: {report.base_parameters:,} -> {report.parameters:,} parameters")


@train_app.command("post-pretrain")
def train_post_pretrain(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    data: Data,
    config: Config = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Stage 1: new experts and routers learn new-language text; the base model is frozen.

    Example: hf-moe-expand train post-pretrain qwen-el qwen-el-1 --data el=el.jsonl --config stage1.yaml
    """
    from .settings import PostPretrainSettings

    _train(PostPretrainSettings, model, out, data, config, seed, overwrite)


@train_app.command("review")
def train_review(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    data: Data,
    config: Config = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Stage 2: routers and classifiers learn, on old and new text, to send old-language tokens home.

    Example: hf-moe-expand train review qwen-el-1 qwen-el-2 --data en=en.jsonl --data el=el.jsonl --config stage2.yaml
    """
    from .settings import ReviewSettings

    _train(ReviewSettings, model, out, data, config, seed, overwrite)


@app.command()
def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Folders or hub ids; the first is what the others are compared with.")
    ],
    data: Data,
    out: Out,
    old: OldCodes = "",
    new: NewCodes = "",
    block_size: BlockSize = 1024,
    batch_size: BatchSize = 8,
    max_tokens: Annotated[int | None, typer.Option(help="Score this many tokens of a language at most.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Perplexity and bits per byte on each language, several models side by side.

    Example: hf-moe-expand evaluate Qwen/Qwen2.5-0.5B qwen-el-2 --data en=en.jsonl --data el=el.jsonl --out eval.json
    """
    _check_file(out, overwrite)
    sources = _sources(data)
    for source in sources.values():
        source.files()
    from .evaluation.perplexity import evaluate_model
    from .evaluation.report import Evaluation
    from .models import load_for_inference

    result = Evaluation(*_old_and_new(models, list(sources), _codes(old), _codes(new)))
    texts = {code: source.load()["text"] for code, source in sources.items()}
    for name in models:
        model, tokenizer = load_for_inference(name)
        label = Path(name).name if Path(name).is_dir() else name
        if label in result.models:
            raise InputError(f"{name}: two models are called {label!r}; rename a folder.")
        result.models[label] = evaluate_model(model, tokenizer, texts, block_size, batch_size, max_tokens)
    result.to_json(out)
    print("bits per byte")
    _print_table(*result.rows())
    print("perplexity")
    _print_table(*result.rows("perplexity"))
    print(f"wrote {out}")


@app.command()
def inspect(model: Model, revision: Revision = None) -> None:
    """Layers, experts, parameters (total, active, trained by each stage) and history of an expanded checkpoint.

    Example: hf-moe-expand inspect qwen-el-2
    """
    from .inspection import inspect_checkpoint

    print("\n".join(inspect_checkpoint(model, revision).lines()))


@app.command()
def validate(recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")]) -> None:
    """Check everything in a recipe that can be checked before the first GPU hour.

    Example: hf-moe-expand validate recipe.yaml
    """
    from .pipeline import validate_recipe
    from .recipe import Recipe

    for line in validate_recipe(Recipe.load(recipe)):
        print(line)
    print(f"{recipe}: ok")


@app.command()
def run(recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")]) -> None:
    """The whole way: analyse, plan, expand, post-pretrain, review, evaluate. Run again to go on after an interruption.

    Example: accelerate launch $(which hf-moe-expand) run recipe.yaml
    """
    from .pipeline import run_recipe
    from .recipe import Recipe

    run_recipe(Recipe.load(recipe))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything that the demo makes.")] = Path("runs/demo"),
    seed: Seed = 0,
) -> None:
    """The whole way on a tiny model that is made on the spot, on a CPU, in a few minutes.

    Example: hf-moe-expand demo
    """
    from .demo.run import run_demo

    run_demo(out, seed)


def _sources(arguments: list[str]) -> dict[str, Any]:
    from .data.sources import LanguageText

    sources: dict[str, LanguageText] = {}
    for argument in arguments:
        source = LanguageText.parse(argument)
        if source.language in sources:
            raise InputError(f"Language {source.language!r} is given twice; put its files into one folder.")
        sources[source.language] = source
    return sources


def _codes(argument: str) -> list[str]:
    return [code.strip() for code in argument.split(",") if code.strip()]


def _old_and_new(
    models: list[str], languages: list[str], old: list[str], new: list[str]
) -> tuple[list[str], list[str]]:
    """Which of the evaluated languages are old and which new: as told, else as an expanded model's history says."""
    from .checkpoint.source import expansion_languages, resolve_checkpoint

    if not old and not new:
        known = filter(None, (expansion_languages(resolve_checkpoint(name, weights=False)) for name in models))
        old, new = next(known, (languages, []))
    if unknown := sorted(set(languages) - set(old) - set(new)):
        raise InputError(
            f"{', '.join(unknown)}: neither an old nor a new language of these models; say so with --old, --new."
        )
    return [code for code in languages if code in old], [code for code in languages if code in new]


def _check_file(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise InputError(f"{path}: exists already; choose another file or pass --overwrite.")


def _plan(
    settings: "PlanSettings",
    out: Path,
    overwrite: bool,
    seed: int,
    layers: str | None = None,
    old: str = "",
    new: str = "",
    analysis: Path | None = None,
) -> None:
    from .planning.make import make_plan

    _check_file(out, overwrite)
    measured = None
    if analysis is not None:
        from .analysis.result import SimilarityResult

        measured = SimilarityResult.from_json(analysis)
    old_codes, new_codes = _codes(old), _codes(new)
    if measured is not None:
        old_codes, new_codes = old_codes or measured.old, new_codes or measured.new
    if layers is None:
        num_layers = len(measured.similarity) if measured is not None else 0
    else:
        num_layers = int(layers) if layers.isdecimal() else _layers_of(layers)
    plan = make_plan(
        settings,
        num_layers,
        old_codes,
        new_codes,
        measured,
        seed,
    )
    plan.save(out)
    print(f"experts per layer  {' '.join(map(str, plan.experts_per_layer))} (total {plan.total_experts})")
    print(f"classifier layers  {', '.join(map(str, plan.classifier_layers)) or 'none'}")
    print(f"wrote {out}")


def _layers_of(checkpoint: str) -> int:
    from .checkpoint.source import load_config, resolve_checkpoint

    return load_config(resolve_checkpoint(checkpoint, weights=False)).num_hidden_layers


def _train(
    settings: Any, model: str, out: Path, data: list[str], config: Path | None, seed: int, overwrite: bool
) -> None:
    from .settings import from_mapping, read_yaml

    values = from_mapping(settings, {} if config is None else read_yaml(config), str(config or ""))
    from .training import check_frozen, train_stage

    entry = train_stage(model, out, _sources(data), values, seed, overwrite)
    if int(os.environ.get("RANK", "0")) == 0:
        frozen = check_frozen(model, out, entry["stage"])
        print(f"wrote {out}: {entry['steps']} steps; {frozen} frozen tensors are byte-identical")


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def main() -> None:
    """Entry point: wrong input is told in one line, without a traceback (HF_MOE_EXPAND_DEBUG=1 shows it)."""
    try:
        app()
    except InputError as error:
        if os.environ.get("HF_MOE_EXPAND_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        _leave_ranks()


def _leave_ranks() -> None:
    # A rank that exits inside its process group may abort when another is gone already.
    if "torch" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
