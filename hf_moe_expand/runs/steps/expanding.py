"""The steps that make the model of an expansion: plan and new experts, or language packs or fine-tunes joined."""

from pathlib import Path
from typing import Any

from ...analysis.gating import gate_from_file
from ...analysis.routers import nearest_experts
from ...checkpoint.arguments import JoinSettings
from ...checkpoint.compare import differing_tensor
from ...checkpoint.expand import expand_checkpoint, grow_checkpoint
from ...checkpoint.facts import Facts
from ...checkpoint.join import Pack, join_expansions, load_packs
from ...checkpoint.reader import CheckpointReader, headers_alone
from ...checkpoint.source import load_config, pack_and_name, resolve_checkpoint
from ...checkpoint.stored import StoredModel
from ...checkpoint.tuned import codes_of, expand_tuned
from ...core.errors import InputError, errors_at
from ...data.rows import counted
from ...inference.models import load_for_inference
from ...modeling.part_expansion_only import RECORD
from ...planning.make import make_plan
from ...planning.plan import Plan
from ...planning.results import DeviationResult, Result, SimilarityResult
from ...stages.kind import StepResult, Trial
from .analyses import ANALYSIS, GATE, check_tokens, gates_base
from .step import ExpansionRun, Step, digest_of

PLAN = "plan.json"
_RESULTS: dict[str, type[Result]] = {"similarity": SimilarityResult, "deviation": DeviationResult}


def plan_step(run: ExpansionRun) -> Step:
    """Decides how many experts each layer gets."""
    planned, output = run.expansion.planned, run.folder / PLAN

    def inputs() -> dict[str, Any]:
        vectors = digest_of(getattr(planned, "grouping", None))  # a file of linguistic vectors, if it is one
        return {**vectors, "plan": planned.model_dump(), "old": run.old, "new": run.new}

    def made(needs: str | None, measured: bool) -> Plan:
        facts = Facts(load_config(resolve_checkpoint(run.start, run.revision)))
        plan = make_plan(
            planned, len(facts.counts), run.old, run.new,
            _RESULTS[needs].load(run.folder / ANALYSIS) if needs else None, run.recipe.seed,
            grows_from=facts.counts if facts.grown else (), encoder_layers=facts.encoder_layers,
            exclusive=facts.exclusive, measured=measured,
        )  # fmt: skip
        output.parent.mkdir(parents=True, exist_ok=True)
        plan.save(output)
        return plan

    def check(trial: Trial) -> list[str]:
        """Makes the largest plan that the analysis may give."""
        plan = made(None, measured=False)
        line = f"expansion {run.number}: {plan.method}, {plan.total_experts} experts, "
        waits = "; the analysis says in which layers, and these are the most" if planned.needs else ""
        return [line + _classifiers(run, len(plan.classifier_layers)) + waits]

    def work() -> StepResult:
        plan = made(planned.needs, measured=True)
        summary = f"experts per layer {plan.counts_in_words}"
        if plan.groups:
            return StepResult(f"{summary}; groups {'; '.join(' '.join(group) for group in plan.groups)}")
        classifiers = f"; classifiers in layers {plan.classifiers_in_words}" if plan.classifier_layers else ""
        return StepResult(f"{summary}{classifiers}")

    return run.step("plan", PLAN, inputs, work, check)


def _classifiers(run: ExpansionRun, placed: int) -> str:
    expansion = run.expansion
    if later := next((s.classifier_layers for stage, s in expansion.stages() if stage.key == "review"), None):
        return f"{counted(later, 'classifier')}, placed after stage 1"
    return counted(placed, "classifier") + ("" if placed else expansion.planned.without_classifiers)


def expand_step(run: ExpansionRun) -> Step:
    """Writes the checkpoint with new experts: of a dense checkpoint, or of an expanded one, which grows."""
    settings, analysis = run.expansion.expand, run.expansion.analysis.model_dump()
    copies_nearest = run.number > 1 and settings.copy_from == "nearest"

    def inputs() -> dict[str, Any]:
        nearest = {"analysis": analysis, "texts": run.contents(run.new)} if copies_nearest else {}
        return {"expand": settings.model_dump(), **nearest}

    def check(trial: Trial) -> list[str]:
        lines = check_tokens(run, trial) if copies_nearest else []
        with errors_at("expand"), headers_alone():
            written(0 if copies_nearest else _certain(run))
        return lines

    def work() -> StepResult:
        if not copies_nearest:
            return written(settings.copy_from)
        model, tokenizer = load_for_inference(run.start)
        return written(nearest_experts(model, tokenizer, run.texts(run.new, model.config), **analysis))

    def written(copied: Any) -> StepResult:
        """Writes the checkpoint; `copied` is the expert that further experts copy, or that of each layer."""
        plan, out = Plan.load(run.folder / PLAN), run.folder / "expanded"
        options: dict[str, Any] = {"max_shard_size": settings.max_shard_size, "seed": run.recipe.seed}
        if plan.grows_from:
            origin = copied if isinstance(copied, dict) else dict.fromkeys(range(len(plan.grows_from)), copied)
            grow_checkpoint(run.start, out, plan, copy_from=origin, overwrite=True, **options)
            near = f"; nearest in each layer {' '.join(map(str, origin.values()))}" if copies_nearest else ""
            return StepResult(f"{plan.total_experts - sum(plan.grows_from)} new experts{near}")
        gate, file = None, run.folder / GATE
        if gates_base(run) and file.is_file():
            gate, _ = gate_from_file(file, run.start, plan.new, run.revision)
        options |= {"revision": run.revision, "gate": gate, "overwrite": True}
        report = expand_checkpoint(run.start, out, plan, **settings.experts.model_dump(), **options)
        return StepResult(f"{report.base_parameters:,} -> {report.parameters:,} parameters")

    return run.step("expand", "expanded", inputs, work, check)


def _certain(run: ExpansionRun) -> int:
    """The expert that new ones copy; refuses one of a further expansion that some layer may not have."""
    copied, number = run.expansion.expand.copy_from, run.number
    if number == 1 or copied == "nearest":
        return 0
    config: Any = load_config(Path(run.start))
    plans = [expansion.planned for expansion in run.recipe.all_expansions[: number - 1]]
    least = min(count for count in config.num_experts_per_layer if count > 1)
    if not all(plan.fixed_counts for plan in plans):
        further = [plan for plan in plans[1:] if not getattr(plan, "only_layers", None)]  # else others do not grow
        least = (getattr(plans[0], "minimum", None) or 2) + sum(getattr(p, "minimum", None) or 1 for p in further)
    if int(copied) >= least:
        raise InputError(f"expansion {number}: copy_from is {copied}: a layer may have only 0..{least - 1}.")
    return int(copied)


def join_step(run: ExpansionRun, settings: JoinSettings) -> Step:
    """Writes the model that joins language packs, in place of a plan, an expansion and stage 1."""
    out, places = run.folder / "joined", [pack_and_name(pack)[0] for pack in settings.packs]

    def inputs() -> dict[str, Any]:
        return {"join": settings.model_dump(), "packs": _fingerprints(places)}

    def check(trial: Trial) -> list[str]:
        """Checks all but the bytes of the packs' bases, which `work` compares."""
        if trial.offline and not all(Path(one).is_dir() and not Path(one, RECORD).is_file() for one in places):
            return ["skipped: join: base and packs are not whole on this machine"]
        with headers_alone():
            done = work()
        old, new = Facts(load_config(out)).languages
        for kind, ours, theirs in (("old", run.old, old), ("new", run.new, new)):
            if wrong := [code for code in ours if code not in theirs]:
                raise InputError(f"{kind}: {', '.join(wrong)}: the packs have {', '.join(theirs) or 'none'}.")
        return [f"join: {done.summary}"]

    def work() -> StepResult:
        with errors_at("join.packs"):
            _check_base(run, load_packs(settings.packs, out, overwrite=True)[0])
            report = join_expansions(settings.packs, out, max_shard_size=settings.max_shard_size, overwrite=True)
        counts = " ".join(map(str, report.experts_per_layer))
        return StepResult(f"{', '.join(report.packs)}; experts per layer {counts}")

    return run.step("join", "joined", inputs, work, check)


def tuned_step(run: ExpansionRun, models: dict[str, str]) -> Step:
    """Writes the model whose languages are fine-tunes of the base, by language, in place of a plan, an expansion and
    stage 1."""

    def inputs() -> dict[str, Any]:
        return {"tuned": models, "models": _fingerprints(models.values())}

    def check(trial: Trial) -> list[str]:
        """Checks all but the tensors, which `work` compares with the base's."""
        new = [code for codes in models for code in codes_of(codes)]
        if wrong := [code for code in run.new if code not in new]:
            raise InputError(f"new: {', '.join(wrong)}: `tuned` has no fine-tune for it (it has {', '.join(new)}).")
        if trial.offline and not all(Path(model).is_dir() for model in (run.start, *models.values())):
            return ["skipped: tuned: base and fine-tunes are not all on this machine"]
        with headers_alone():
            return [f"tuned: {work().summary}, if all of their tensors differ"]

    def work() -> StepResult:
        size = run.expansion.expand.max_shard_size
        options: dict[str, Any] = {"revision": run.revision, "max_shard_size": size, "overwrite": True}
        with errors_at("tuned"):
            report = expand_tuned(run.start, models, run.folder / "tuned", list(run.old), **options)
        return StepResult(f"{', '.join(models)}; {report.base_parameters:,} -> {report.parameters:,} parameters")

    return run.step("tuned", "tuned", inputs, work, check)


def _fingerprints(models: Any) -> list[Any]:
    return [CheckpointReader(resolve_checkpoint(model)).fingerprint() for model in models]


def _check_base(run: ExpansionRun, pack: Pack) -> None:
    """Refuses a pack that is no expansion of the recipe's base; a graft changes the base's tensors."""
    if any(stage.changes_everything for stage in pack.facts.history.stages):
        return
    base = StoredModel(run.recipe.base, revision=run.recipe.revision)
    if (dense := differing_tensor(base, pack.stored)) is not None:
        raise InputError(f"{pack.name}: is no expansion of `base`, {run.recipe.base}: tensor {dense!r} differs.")
