"""`run`: the whole way, step by step. A step that is done is not done again."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from .analysis.result import SimilarityResult
from .analysis.similarity import measure_similarity
from .checkpoint.expand import expand_checkpoint
from .checkpoint.source import load_base_config, resolve_checkpoint
from .data.sources import LanguageText
from .errors import InputError
from .evaluation.perplexity import evaluate_model
from .evaluation.report import Evaluation
from .jsonfile import read_json, write_json
from .models import load_for_inference
from .planning.make import make_plan
from .planning.plan import Plan
from .recipe import Recipe
from .training import check_frozen, check_training_arguments, train_stage


@dataclass(frozen=True)
class Step:
    """One step of a run: what it makes (`output`), from which part of the recipe, and how."""

    name: str
    output: Path
    settings: Any
    work: Callable[[], str]
    every_rank: bool = False


def run_recipe(recipe: Recipe, say: Callable[[str], None] = print) -> Path:
    """Runs a recipe: analyse, plan, expand, post-pretrain, review, evaluate.

    Run again after an interruption it goes on where it stopped: finished steps are skipped, and training resumes
    from its last checkpoint. Under `accelerate launch` all ranks train, and the first does everything else.

    Returns:
        The folder of the final checkpoint.

    Raises:
        InputError: the recipe is wrong, or it was changed after one of its steps had run.
    """
    # The other ranks wait while the first analyses and evaluates, which may take hours. Without `cpu`, accelerate takes
    # each rank of a machine without an accelerator for a run of its own.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))
    if not state.is_main_process:
        say = _say_nothing
    validate_recipe(recipe)
    root = Path(recipe.output)
    record = root / "steps.json"
    done: dict[str, Any] = read_json(record, "the record of a run") if record.is_file() else {}
    fingerprint = _fingerprint("start", {"base": recipe.base, "revision": recipe.revision, "seed": recipe.seed})
    steps, final = _steps(recipe, root)
    _refuse_changed(done, steps, fingerprint, root)
    for number, step in enumerate(steps, start=1):
        fingerprint = _fingerprint(fingerprint, step.settings)
        label = f"[{number}/{len(steps)}] {step.name}"
        if step.name in done and step.output.exists():
            say(f"{label}: done already ({done[step.name]['summary']})")
            continue
        say(f"{label} ...")
        started = time.time()
        summary = step.work() if step.every_rank or state.is_main_process else ""
        state.wait_for_everyone()
        if state.is_main_process:
            seconds = round(time.time() - started, 1)
            done[step.name] = {"fingerprint": fingerprint, "seconds": seconds, "summary": summary}
            write_json(record, done)
            say(f"{label}: {summary} ({seconds:.0f} s)")
    if recipe.test:
        say(Evaluation.from_json(root / "evaluation.json").markdown())
    say(f"final checkpoint: {final}")
    return final


def validate_recipe(recipe: Recipe) -> list[str]:
    """Checks all that can be checked without loading weights; returns what was found to be right, one line each.

    Raises:
        InputError: the first mistake found.
    """
    folder = resolve_checkpoint(recipe.base, recipe.revision)
    config = load_base_config(folder)
    found = [f"base: {recipe.base}, {config.model_type}, {config.num_hidden_layers} layers"]
    for kind in ("old", "new", "test"):
        for source in recipe.sources(kind).values():
            files = source.files()
            where = f"{len(files)} file(s)" if files else "on the hub"
            found.append(f"{kind} {source.language}: {source.source}, {where}")
    # A plan from similarities of 1 has the real one's totals and layer counts; only their distribution is unknown.
    same = [1.0] * config.num_hidden_layers
    unknown = SimilarityResult(list(recipe.old), list(recipe.new), 0, {}, None, same, same)
    plan = make_plan(recipe.plan, config.num_hidden_layers, unknown.old, unknown.new, unknown, recipe.seed)
    found.append(f"plan: {plan.method}, {plan.total_experts} experts, {len(plan.classifier_layers)} classifiers")
    check_training_arguments(recipe.post_pretrain.training, "post_pretrain.training")
    if recipe.review is not None:
        check_training_arguments(recipe.review.training, "review.training")
    longest = getattr(config, "max_position_embeddings", None)
    for name in ("post_pretrain", "review"):
        settings = getattr(recipe, name)
        if settings is not None and longest is not None and settings.block_size > longest:
            raise InputError(f"{name}.block_size is {settings.block_size}, but the base takes {longest} positions.")
    found.append("training: settings are known to TrainingArguments")
    return found


def _steps(recipe: Recipe, root: Path) -> tuple[list[Step], Path]:
    old, new = list(recipe.old), list(recipe.new)
    expanded, stage1, stage2 = root / "expanded", root / "post_pretrain", root / "review"
    final = stage1 if recipe.review is None else stage2
    steps = []
    by_similarity = recipe.plan.classifier_choice == "similarity" and recipe.plan.classifier_layers > 0
    if recipe.plan.method == "layer-moe" or by_similarity:
        analysis = {"settings": asdict(recipe.analysis), "old": recipe.old, "new": recipe.new}
        steps.append(Step("analyze", root / "analysis.json", analysis, lambda: _analyze(recipe, root)))
    plan = {"settings": asdict(recipe.plan), "old": old, "new": new}
    steps.append(Step("plan", root / "plan.json", plan, lambda: _plan(recipe, root)))
    steps.append(Step("expand", expanded, asdict(recipe.expand), lambda: _expand(recipe, root)))
    stage_data = {**(recipe.sources("old") if recipe.post_pretrain.replay else {}), **recipe.sources("new")}
    steps.append(_training_step("post_pretrain", expanded, stage1, stage_data, recipe.post_pretrain, recipe.seed))
    if recipe.review is not None:
        both = {**recipe.sources("old"), **recipe.sources("new")}
        steps.append(_training_step("review", stage1, stage2, both, recipe.review, recipe.seed))
    if recipe.test:
        models = {"base": recipe.base, "post-pretrained": str(stage1), "reviewed": str(stage2)}
        if recipe.review is None:
            del models["reviewed"]
        evaluation = {"settings": asdict(recipe.evaluation), "test": recipe.test}
        steps.append(Step("evaluate", root / "evaluation.json", evaluation, lambda: _evaluate(recipe, root, models)))
    return steps, final


def _training_step(
    name: str, before: Path, after: Path, data: dict[str, LanguageText], settings: Any, seed: int
) -> Step:
    def work() -> str:
        entry = train_stage(before, after, data, settings, seed)
        if not PartialState().is_main_process:
            return ""
        frozen = check_frozen(before, after, entry["stage"])
        return f"{entry['steps']} steps; {frozen} frozen tensors are byte-identical"

    fingerprint = {"settings": asdict(settings), "data": {code: text.source for code, text in data.items()}}
    return Step(name, after, fingerprint, work, every_rank=True)


def _analyze(recipe: Recipe, root: Path) -> str:
    model, tokenizer = load_for_inference(recipe.base, recipe.revision)
    sources = {**recipe.sources("old"), **recipe.sources("new")}
    texts = {code: source.load().shuffle(seed=recipe.seed)["text"] for code, source in sources.items()}
    settings = recipe.analysis
    result = measure_similarity(
        model, tokenizer, texts, list(recipe.old), list(recipe.new),
        tokens=settings.tokens, block_size=settings.block_size, batch_size=settings.batch_size,
    )  # fmt: skip
    result.to_json(root / "analysis.json")
    return (
        f"similarity {min(result.similarity):.3f} to {max(result.similarity):.3f} over {len(result.similarity)} layers"
    )


def _plan(recipe: Recipe, root: Path) -> str:
    layers = load_base_config(resolve_checkpoint(recipe.base, recipe.revision)).num_hidden_layers
    path = root / "analysis.json"
    analysis = SimilarityResult.from_json(path) if path.is_file() else None
    plan = make_plan(
        recipe.plan, layers, list(recipe.old), list(recipe.new),
        analysis, recipe.seed,
    )  # fmt: skip
    plan.save(root / "plan.json")
    counts = " ".join(map(str, plan.experts_per_layer))
    classifiers = ", ".join(map(str, plan.classifier_layers)) or "none"
    return f"experts per layer {counts}; classifiers in layers {classifiers}"


def _expand(recipe: Recipe, root: Path) -> str:
    report = expand_checkpoint(
        recipe.base, root / "expanded", Plan.load(root / "plan.json"),
        expert_init=recipe.expand.expert_init, seed=recipe.seed, revision=recipe.revision,
        max_shard_size=recipe.expand.max_shard_size, overwrite=True,
    )  # fmt: skip
    return f"{report.base_parameters:,} -> {report.parameters:,} parameters"


def _evaluate(recipe: Recipe, root: Path, models: dict[str, str]) -> str:
    texts = {code: source.load()["text"] for code, source in recipe.sources("test").items()}
    result = Evaluation(list(recipe.old), list(recipe.new))
    settings = recipe.evaluation
    for name, path in models.items():
        model, tokenizer = load_for_inference(path, recipe.revision if name == "base" else None)
        result.models[name] = evaluate_model(
            model, tokenizer, texts, settings.block_size, settings.batch_size, settings.max_tokens
        )
    result.to_json(root / "evaluation.json")
    return f"{len(texts)} languages, {len(models)} models"


def _refuse_changed(done: dict[str, Any], steps: list[Step], fingerprint: str, root: Path) -> None:
    for step in steps:
        fingerprint = _fingerprint(fingerprint, step.settings)
        if step.name in done and done[step.name]["fingerprint"] != fingerprint:
            raise InputError(
                f"{root}: the recipe was changed after step `{step.name}` had run with it. Give another `output`, undo "
                "the change, or delete this folder."
            )


def _fingerprint(before: str, settings: Any) -> str:
    return hashlib.sha256((before + json.dumps(settings, sort_keys=True)).encode()).hexdigest()[:16]


def _say_nothing(line: str) -> None:
    pass
