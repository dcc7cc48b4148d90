"""`run`: the whole way, step by step. A step that is done is not done again."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState

from .analysis.deviation import measure_deviation
from .analysis.result import DeviationResult, SimilarityResult
from .analysis.routing import nearest_experts
from .analysis.similarity import measure_similarity
from .checkpoint.expand import expand_checkpoint
from .checkpoint.graft import graft_delta
from .checkpoint.grow import grow_checkpoint
from .checkpoint.source import load_config, resolve_checkpoint
from .data.sources import LanguageText
from .distributed import launched
from .errors import InputError
from .evaluation.perplexity import evaluate_model
from .evaluation.report import Evaluation
from .jsonfile import read_json, write_json
from .models import load_for_inference
from .planning.make import make_plan
from .planning.plan import Plan
from .recipe import Expansion, Recipe
from .recipe_checks import validate_recipe
from .training import check_frozen, train_stage

# What the evaluation calls the checkpoint of each.
PARTICIPLES = {
    "post_pretrain": "post-pretrained", "graft": "grafted", "review": "reviewed",
    "group": "group-trained", "normal": "trained normally",
}  # fmt: skip

# The key of a run's record under which the step at work stands.
_BEGUN = "begun"


@dataclass(frozen=True)
class Step:
    """One step of a run.

    Attributes:
        output: what it makes.
        settings: the part of the recipe that it is made from.
        work: makes it, and returns a summary.
        every_rank: all ranks work, not the first alone.
        repeatable: is done again where its settings changed: nothing follows from it.
        finish: what is left to do where an interruption came after the output.
    """

    name: str
    output: Path
    settings: Any
    work: Callable[[], str]
    every_rank: bool = False
    repeatable: bool = False
    finish: Callable[[], str] | None = None


def run_recipe(recipe: Recipe, say: Callable[[str], None] = print) -> Path:
    """Runs a recipe: analyse, plan, expand and train, for each of its expansions; evaluate.

    Run again after an interruption it goes on where it stopped: finished steps are skipped, and training resumes
    from its last checkpoint. Under `accelerate launch` all ranks train, and the first does everything else.

    Returns:
        The folder of the final checkpoint.

    Raises:
        InputError: the recipe is wrong, or it was changed after one of its steps had run; what is evaluated may change.
    """
    state = launched()
    if not state.is_main_process:
        say = _say_nothing
    validate_recipe(recipe)
    root = Path(recipe.output)
    record = root / "steps.json"
    done: dict[str, Any] = read_json(record, "the record of a run") if record.is_file() else {}
    fingerprint = _fingerprint("start", {"base": recipe.base, "revision": recipe.revision, "seed": recipe.seed})
    steps, final = _steps(recipe, root)
    _refuse_changed(done, steps, fingerprint, root)
    state.wait_for_everyone()  # all have read the record before the first writes to it
    if state.is_main_process:
        _keep_text(recipe, root)
    for number, step in enumerate(steps, start=1):
        fingerprint = _fingerprint(fingerprint, step.settings)
        label = f"[{number}/{len(steps)}] {step.name}"
        changed = step.repeatable and done.get(step.name, {}).get("fingerprint") != fingerprint
        if step.name in done and step.output.exists() and not changed:
            say(f"{label}: done already ({done[step.name]['summary']})")
            continue
        later = [other for other in steps[number:] if _stands_for(other, step) and _still_there(other, done)]
        if step.name in done and later and not step.repeatable:
            say(f"{label}: done, no longer kept; to make it anew, delete {later[0].output} too")
            continue
        say(f"{label} ...")
        unrecorded = step.output.exists() and done.get(_BEGUN, {}).get("step") == step.name
        work = step.finish if step.finish and unrecorded else step.work
        for other in steps[number:]:
            if other.repeatable:
                done.pop(other.name, None)  # it is of what was there before
        if state.is_main_process:
            write_json(record, {**done, _BEGUN: {"step": step.name, "fingerprint": fingerprint}})
        started = time.time()
        summary = work() if step.every_rank or state.is_main_process else ""
        state.wait_for_everyone()
        done.pop(_BEGUN, None)
        if state.is_main_process:
            seconds = round(time.time() - started, 1)
            done[step.name] = {"fingerprint": fingerprint, "seconds": seconds, "summary": summary}
            write_json(record, done)
            say(f"{label}: {summary} ({seconds:.0f} s)")
    if recipe.test:
        say("bits per byte of held-out text, lower is better:")
        say(Evaluation.from_json(root / "evaluation.json").markdown())
    say(f"final checkpoint: {final}")
    return final


def _steps(recipe: Recipe, root: Path) -> tuple[list[Step], Path]:
    sources = recipe.training_sources
    steps: list[Step] = []
    models: dict[str, str] = {"base": recipe.base}
    start, old = recipe.base, list(recipe.old)
    for number, expansion in enumerate(recipe.rounds, start=1):
        lifelong = len(recipe.rounds) > 1
        prefix, folder = (f"expansion {number}: ", root / str(number)) if lifelong else ("", root)
        work = _Round(recipe, expansion, folder, start, old, {code: sources[code] for code in (*old, *expansion.new)})
        made, stages = work.steps(prefix)
        steps += made
        start = str(stages[list(stages)[-1]])
        if lifelong:
            models[f"after expansion {number}"] = start
        else:
            models |= {PARTICIPLES[name]: str(path) for name, path in stages.items()}
        old = [*old, *expansion.new]
    if recipe.test:
        evaluation = {"settings": asdict(recipe.evaluation), "test": recipe.test}
        output = root / "evaluation.json"
        steps.append(Step("evaluate", output, evaluation, lambda: _evaluate(recipe, root, models), repeatable=True))
    return steps, Path(start)


@dataclass(frozen=True)
class _Round:
    """One expansion of a run: from the checkpoint `start`, with what it makes in `folder`."""

    recipe: Recipe
    expansion: Expansion
    folder: Path
    start: str
    old: list[str]
    sources: dict[str, LanguageText]

    def steps(self, prefix: str) -> tuple[list[Step], dict[str, Path]]:
        """The steps, and the checkpoint that each stage leaves."""
        plan = self.expansion.plan
        languages: dict[str, Any] = {"old": self.old, "new": list(self.expansion.new)}
        texts = {code: source.source for code, source in self.sources.items()}
        steps = []
        fingerprint: dict[str, Any]
        if self.expansion.is_dmoe:
            fingerprint = {"settings": asdict(self.expansion.deviation), "new": self.expansion.new}
            steps.append(Step(f"{prefix}analyze", self.folder / "analysis.json", fingerprint, self.deviation))
        elif self.expansion.measures_similarity:
            fingerprint = {"settings": asdict(self.expansion.analysis), "texts": texts, **languages}
            steps.append(Step(f"{prefix}analyze", self.folder / "analysis.json", fingerprint, self.similarity))
        steps.append(
            Step(f"{prefix}plan", self.folder / "plan.json", {"settings": asdict(plan), **languages}, self.plan)
        )
        expanded = self.folder / "expanded"
        fingerprint = asdict(self.expansion.expand)
        if fingerprint["copy_from"] == "nearest":
            fingerprint |= {"analysis": asdict(self.expansion.analysis), "texts": texts}
        steps.append(Step(f"{prefix}expand", expanded, fingerprint, self.expand))
        stages: dict[str, Path] = {}
        before = expanded
        for name, settings in self.expansion.stages().items():
            stages[name] = self.folder / name
            if name == "graft":
                steps.append(self.graft(prefix, before, stages[name]))
            else:
                steps.append(self.training(prefix, name, before, stages[name], settings))
            before = stages[name]
        return steps, stages

    def training(self, prefix: str, name: str, before: Path, after: Path, settings: Any) -> Step:
        data = {code: self.sources[code] for code in self.expansion.trained_languages(name, self.old)}

        def work() -> str:
            train_stage(before, after, data, settings, self.recipe.seed)
            return check()

        def check() -> str:
            if not PartialState().is_main_process:
                return ""
            entry = load_config(after).expansions[-1]["stages"][-1]
            frozen = check_frozen(before, after, entry["stage"])
            return f"{entry['steps']} steps; {frozen} frozen tensors are byte-identical"

        fingerprint = {"settings": asdict(settings), "data": {code: text.source for code, text in data.items()}}
        return Step(f"{prefix}{name}", after, fingerprint, work, every_rank=True, finish=check)

    def graft(self, prefix: str, before: Path, after: Path) -> Step:
        recipe, settings = self.recipe, self.expansion.graft
        assert settings is not None

        def work() -> str:
            report = graft_delta(
                before, after, recipe.base, settings.instruct, scale=settings.scale,
                keep_tokenizer=settings.keep_tokenizer, revision=recipe.revision,
                max_shard_size=self.expansion.expand.max_shard_size, overwrite=True,
            )  # fmt: skip
            return f"base and instruct have a cosine of {report.instruct_cosine:.4f}"

        return Step(f"{prefix}graft", after, asdict(settings), work)

    @property
    def revision(self) -> str | None:
        return self.recipe.revision if self.start == self.recipe.base else None

    def texts(self, languages: Iterable[str]) -> dict[str, list[str]]:
        return {code: self.sources[code].load().shuffle(seed=self.recipe.seed)["text"] for code in languages}

    def similarity(self) -> str:
        model, tokenizer = load_for_inference(self.start, self.revision)
        settings, new = self.expansion.analysis, list(self.expansion.new)
        result = measure_similarity(
            model, tokenizer, self.texts([*self.old, *new]), self.old, new,
            tokens=settings.tokens, block_size=settings.block_size, batch_size=settings.batch_size,
        )  # fmt: skip
        result.to_json(self.folder / "analysis.json")
        low, high = min(result.similarity), max(result.similarity)
        return f"similarity {low:.3f} to {high:.3f} over {len(result.similarity)} layers"

    def deviation(self) -> str:
        model, tokenizer = load_for_inference(self.start, self.revision)
        work = self.folder / "deviation.work"
        result = measure_deviation(
            model, tokenizer, self.texts(self.expansion.new), work_dir=work, seed=self.recipe.seed,
            **asdict(self.expansion.deviation),
        )  # fmt: skip
        result.to_json(self.folder / "analysis.json")
        shutil.rmtree(work)
        low, high = min(result.deviation), max(result.deviation)
        return f"deviation {low:.4g} to {high:.4g} over {len(result.deviation)} layers"

    def plan(self) -> str:
        path = self.folder / "analysis.json"
        dmoe = self.expansion.is_dmoe
        similarity = SimilarityResult.from_json(path) if path.is_file() and not dmoe else None
        deviation = DeviationResult.from_json(path) if dmoe else None
        config = load_config(resolve_checkpoint(self.start, self.revision))
        counts = getattr(config, "num_experts_per_layer", None) or ()
        plan = make_plan(
            self.expansion.plan, config.num_hidden_layers, self.old, list(self.expansion.new), similarity,
            self.recipe.seed, deviation, grows_from=counts,
        )  # fmt: skip
        plan.save(self.folder / "plan.json")
        said = f"experts per layer {' '.join(map(str, plan.experts_per_layer))}"
        if plan.groups:
            return f"{said}; groups {'; '.join(' '.join(group) for group in plan.groups)}"
        return f"{said}; classifiers in layers {', '.join(map(str, plan.classifier_layers)) or 'none'}"

    def expand(self) -> str:
        plan, settings = Plan.load(self.folder / "plan.json"), self.expansion.expand
        options: dict[str, Any] = {
            "seed": self.recipe.seed,
            "max_shard_size": settings.max_shard_size,
            "overwrite": True,
        }
        if plan.grows_from:
            copied = settings.copy_from
            nearest = isinstance(copied, str)
            origin: dict[int, Any] = self.nearest() if nearest else dict.fromkeys(range(len(plan.grows_from)), copied)
            grow_checkpoint(self.start, self.folder / "expanded", plan, copy_from=origin, keep_routers=True, **options)
            said = f"{plan.total_experts - sum(plan.grows_from)} new experts"
            return f"{said}; nearest in each layer {' '.join(map(str, origin.values()))}" if nearest else said
        report = expand_checkpoint(
            self.start,
            self.folder / "expanded",
            plan,
            expert_init=settings.expert_init,
            conditional_routing=settings.conditional_routing,
            expert_kind=settings.expert_kind,
            lora_rank=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            revision=self.revision,
            **options,
        )
        return f"{report.base_parameters:,} -> {report.parameters:,} parameters"

    def nearest(self) -> dict[int, int]:
        model, tokenizer = load_for_inference(self.start)
        return nearest_experts(model, tokenizer, self.texts(self.expansion.new), **asdict(self.expansion.analysis))


def _evaluate(recipe: Recipe, root: Path, models: dict[str, str]) -> str:
    texts = {code: source.load()["text"] for code, source in recipe.test_sources.items()}
    expansions = [list(expansion.new) for expansion in recipe.rounds]
    result = Evaluation(list(recipe.old), [code for new in expansions for code in new], expansions=expansions)
    settings = recipe.evaluation
    there = {name: path for name, path in models.items() if name == "base" or Path(path).exists()}
    for name, path in there.items():
        model, tokenizer = load_for_inference(path, recipe.revision if name == "base" else None)
        result.models[name] = evaluate_model(
            model, tokenizer, texts, settings.block_size, settings.batch_size, settings.max_tokens
        )
    result.to_json(root / "evaluation.json")
    gone = f" ({', '.join(set(models) - set(there))}: no longer kept)" if len(there) < len(models) else ""
    return f"{len(texts)} languages, {len(there)} models{gone}"


def _refuse_changed(done: dict[str, Any], steps: list[Step], fingerprint: str, root: Path) -> None:
    for step in steps:
        fingerprint = _fingerprint(fingerprint, step.settings)
        begun = done.get(_BEGUN, {})
        unrecorded = begun.get("step") == step.name and step.output.exists()
        earlier = begun if unrecorded else done.get(step.name)
        if earlier is not None and earlier["fingerprint"] != fingerprint and not step.repeatable:
            raise InputError(
                f"{root}: the recipe was changed after step `{step.name}` had run with it. Give another `output`, undo "
                "the change, or delete this folder."
            )


def _stands_for(later: Step, step: Step) -> bool:
    """Whether an earlier step's output is no longer needed: a checkpoint is made from any, a plan from an analysis."""
    return not later.repeatable and (later.output.suffix != ".json" or step.output.suffix == ".json")


def _still_there(step: Step, done: dict[str, Any]) -> bool:
    return step.output.exists() and (step.name in done or done.get(_BEGUN, {}).get("step") == step.name)


def _keep_text(recipe: Recipe, root: Path) -> None:
    """Copies the recipe's file as it is: with variables not filled in, `push` finds no path of this machine in it."""
    kept = root / "recipe.yaml"
    if recipe.text is not None and not (kept.is_file() and kept.read_text(encoding="utf-8") == recipe.text):
        root.mkdir(parents=True, exist_ok=True)
        kept.write_text(recipe.text, encoding="utf-8")


def _fingerprint(before: str, settings: Any) -> str:
    return hashlib.sha256((before + json.dumps(settings, sort_keys=True)).encode()).hexdigest()[:16]


def _say_nothing(line: str) -> None:
    pass
