"""`run` and `validate`: run or check all steps of a recipe. Finished steps are not run again."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..checkpoint.promises import check_architecture
from ..checkpoint.reader import CheckpointReader, headers_alone
from ..checkpoint.source import base_config_at_hand, load_base_config, pack_and_name, resolve_checkpoint
from ..checkpoint.stored import network_of
from ..checkpoint.table import New, rewrite
from ..checkpoint.writer import DTYPE_NAMES, check_apart, check_writable
from ..core.disk import check_room, free_bytes, peak, readable_size
from ..core.errors import errors_at, goes_on, named_as
from ..core.jsonfile import write_json, write_text
from ..core.recipe_paths import RECIPE, SETTINGS, unset_variable
from ..core.schema import changed, checked
from ..core.scratch import FolderLock
from ..data.lost import LostText, check_lost, lost_lines, token_line
from ..data.pairs import check_pairs, lost_of
from ..data.places import is_elsewhere
from ..data.rows import counted
from ..data.sources import LanguageText, all_left_out
from ..evaluation.report import Evaluation
from ..modeling import stack_sizes
from ..stages.distributed import launched
from ..stages.kind import StepResult, Trial
from .recipe import Recipe
from .run_record import RunRecord, read_steps
from .steps.analyses import changes_base, deviation_step, gate_step, gates_base, similarity_step
from .steps.evaluate import evaluate_step
from .steps.expanding import expand_step, join_step, plan_step, tuned_step
from .steps.stage import stage_step
from .steps.step import ExpansionRun, Step

_WRITTEN = "checkpoints, with those that a stage keeps while it trains"


def steps_of(recipe: Recipe) -> tuple[list[Step], Path]:
    """The steps of a recipe in order, and the folder of its final checkpoint."""
    root, sources = Path(recipe.output), recipe.training_sources
    steps: list[Step] = []
    models: dict[str, str] = {"base": recipe.base}
    start, old = recipe.base, list(recipe.old)
    lifelong = bool(recipe.expansions)  # of one too, to which further ones may come
    for number, expansion in enumerate(recipe.all_expansions, start=1):
        texts = {code: sources[code] for code in (*old, *expansion.new)}
        work = ExpansionRun(recipe, expansion, number, root / str(number) if lifelong else root, start, old, texts)
        steps += _made(work)
        if recipe.joins:
            models[steps[-1].output.name] = str(steps[-1].output)
        for stage, settings in expansion.stages():
            if stage.key == "gates" and gates_base(work) and not changes_base(work):
                continue
            steps.append(stage_step(work, stage, settings, steps[-1].output))
            if not lifelong:
                models[stage.result_name] = str(steps[-1].output)
        start, old = str(steps[-1].output), [*old, *expansion.new]
        if lifelong:
            models[f"after expansion {number}"] = start
    if recipe.test:
        steps.append(evaluate_step(recipe, models))
    return steps, Path(start)


def _made(work: ExpansionRun) -> list[Step]:
    """The steps that make an expansion's model, which its stages then train."""
    if work.recipe.join is not None:
        return [join_step(work, work.recipe.join)]
    if work.recipe.tuned:
        return [tuned_step(work, work.recipe.tuned)]
    steps = [similarity_step(work)] if work.expansion.needs == "similarity" else []
    steps += [deviation_step(work)] if work.expansion.needs == "deviation" else []
    steps += [gate_step(work)] if gates_base(work) else []
    return [*steps, plan_step(work), expand_step(work)]


@checked
def validate_recipe(recipe: Recipe, offline: bool = False, here: bool = True) -> list[str]:
    """Checks a recipe as far as possible before anything runs; returns one line for each check that passed.

    Args:
        offline: download nothing; skip, with a line that says so, every check that needs a base that is not on this
            machine or a variable that is not set.
        here: refuse what this machine cannot do; with `offline`, another machine is the one that trains.

    Raises:
        InputError: the recipe has a mistake; the message names the first one.
    """
    lines, written = _checked(recipe, offline, here)
    if here and not offline:
        check_room(Path(recipe.output), peak(written), _WRITTEN)
    return lines


def _checked(recipe: Recipe, offline: bool = False, here: bool = True) -> tuple[list[str], list[tuple[Path, int, int]]]:
    """The lines of a recipe's checks, and what its steps write to the disk, as `peak` takes it."""
    output = Path(recipe.output)
    if offline:
        config: Any = None if unset_variable(recipe.base) else base_config_at_hand(recipe.base, recipe.revision)
    else:
        config = load_base_config(resolve_checkpoint(recipe.base, recipe.revision))
        check_architecture(config, recipe.base)
    trial = Trial(recipe.base, recipe.revision, config, offline, here=here and not offline)
    if config is None:
        lines = [f"skipped: architecture, plans, stages and disk: {recipe.base} is not on this machine"]
    else:
        stacks = [f"{size} {stack} layers".replace("  ", " ") for stack, size in stack_sizes(config).items()]
        lines = [", ".join([f"base: {recipe.base}", config.model_type, *stacks])]
    lines += _text_lines(recipe, trial)
    if not offline:  # else another machine may be the one that runs
        check_writable(output / RECIPE)
    grafts = [expansion.graft.instruct for expansion in recipe.all_expansions if expansion.graft is not None]
    packs = [] if recipe.join is None else [pack_and_name(pack)[0] for pack in recipe.join.packs]
    models = [name for name in (recipe.base, *grafts, *packs, *recipe.tuned.values()) if Path(name).is_dir()]
    with errors_at("output"):
        for step in steps_of(recipe)[0]:
            check_apart(step.output, *models)
    tried, written = _tried(recipe, trial)
    if written:
        needed, free = readable_size(peak(written)), readable_size(free_bytes(output))
        tried.append(f"disk: up to {needed} for {_WRITTEN}; {free} are free at {output}")
    return [*lines, *tried, *recipe.unread()], written


def _text_lines(recipe: Recipe, trial: Trial) -> list[str]:
    """Checks each text, and what the tokenizer loses of it; says of each its files, and what is left out of them."""
    pairs = trial.config is not None and trial.config.is_encoder_decoder
    lines, lost = list[str](), dict[str, LostText]()
    for key, source in recipe.keyed_sources():
        if trial.offline and (unset := unset_variable(source.source)):
            lines.append(f"skipped: {key}: {source.source}: {unset} is not set")
            continue
        with errors_at(key):
            if pairs:
                check_pairs(source, trial.tokenizer)
            else:
                source.check()
            if not trial.offline and is_elsewhere(source.source):
                source.shards()  # refuses an address of nothing
            lines.append(f"{key}: {_looked_at(source, pairs)}")
        if not trial.offline and source.files():
            lost[key] = lost_of(source, trial.tokenizer, pairs)
    check_lost(lost, recipe.allow_lost_text)
    return [*lines, *token_line(lost), *lost_lines(lost)]


def _tried(recipe: Recipe, trial: Trial) -> tuple[list[str], list[tuple[Path, int, int]]]:
    """Tries the steps of a recipe in a folder of its own, which is removed; those that need a base, if it is there."""
    lines: list[str] = []
    written: list[tuple[Path, int, int]] = []
    with TemporaryDirectory(prefix="hf-moe-expand-") as folder:
        output, base = Path(folder, "run"), Path(folder, "base")
        copy = changed(recipe, output=str(output))
        if trial.config is not None and trial.offline:
            _write_base(deepcopy(trial.config), base)
            copy = changed(copy, base=str(base), revision=None)
        with named_as(output, recipe.output), named_as(base, recipe.base):
            for step, named in zip(steps_of(copy)[0], steps_of(recipe)[0], strict=True):
                base_is_there = trial.config is not None and (step.before is None or step.before.exists())
                if not base_is_there and not step.repeatable:
                    continue
                lines += step.check(trial)
                if (step.output / "config.json").is_file():
                    size = sum(tensor.nbytes for tensor in CheckpointReader(step.output).tensors.values())
                    written.append((named.output, size, trial.beside.get(step.name, 0)))
    return lines, written


def _write_base(config: Any, out: Path) -> None:
    """Writes the headers of a dense checkpoint of which the configuration alone is on this machine."""
    new = New(torch.Tensor, DTYPE_NAMES.get(config.dtype, DTYPE_NAMES[torch.float32]))
    tied = network_of(config).all_tied_weights_keys or {}
    with headers_alone():
        rewrite([], config, lambda place: None if place.key in tied else new, out)


def _looked_at(source: LanguageText, as_pairs: bool) -> str:
    """A text's files, and what is left out at their beginning."""
    files = source.files()
    if not files:
        return f"{source.source}, {'elsewhere' if is_elsewhere(source.source) else 'on the hub'}"
    beginnings = list(source.beginnings(as_pairs))
    words = [f"{source.source}, {len(files)} file(s)", source.files_left_out()]
    if left_out := all_left_out(beginnings):
        kept, whole = sum(len(one.rows) for one in beginnings), all(one.read == 1 for one in beginnings)
        words.append(f"{'' if whole else 'at the beginning '}{counted(kept, 'document')} kept, {left_out}")
    return "; ".join(filter(None, words))


@checked
def run_recipe(recipe: Recipe, say: Callable[[str], None] = print) -> Path:
    """Runs a recipe: analyses, plans, expands (or joins packs) and trains for each of its expansions, then evaluates.

    A second run resumes the first: finished steps are skipped, and training resumes from its last checkpoint. Under
    `accelerate launch` all ranks train, and the first rank does all other steps.

    Returns:
        The folder of the final checkpoint.

    Raises:
        InputError: the recipe is wrong; the disk has too little room; or the recipe, a text or the base was changed
            after a step had run with it (inputs of the evaluation may change).
        KeyboardInterrupt: Ctrl-C; its notes say where the same call goes on.
    """
    with goes_on(lambda: _next_step(recipe)):
        return _run_recipe(recipe, say)


def _next_step(recipe: Recipe) -> str:
    """The first step that is not done, for the message of an interrupt; empty if that is the first of all."""
    steps, done = steps_of(recipe)[0], read_steps(Path(recipe.output) / "steps.json")[0]
    number = next((number for number, step in enumerate(steps) if step.name not in done), len(steps) - 1)
    return f"with step {number + 1} of {len(steps)}, {steps[number].name}" if done else ""


def _run_recipe(recipe: Recipe, say: Callable[[str], None]) -> Path:
    state = launched()
    say = say if state.is_main_process else lambda _: None
    root = Path(recipe.output)
    lock = FolderLock(root, "runs this recipe or another one there")
    if state.is_main_process:
        lock.refuse_if_held()
    lines, written = _checked(recipe)
    steps, final = steps_of(recipe)
    base = CheckpointReader(resolve_checkpoint(recipe.base, recipe.revision)).fingerprint()
    start = {"base": [recipe.base, recipe.revision, base], "seed": recipe.seed}
    record = RunRecord(root, steps, start, state.is_main_process)
    record.check(recipe.text)
    if state.is_main_process:
        check_room(root, peak(written), _WRITTEN)
    state.wait_for_everyone()  # all ranks have read the record before the first rank writes to it
    with lock.held() if state.is_main_process else nullcontext():
        if state.is_main_process and recipe.text is not None:
            # Variables are not filled in, so that no local path is published.
            write_text(root / RECIPE, recipe.text)
            write_json(root / SETTINGS, recipe.values)
        for line in (*(line for line in lines if line.startswith("warning: ")), *recipe.unread()):
            say(line)
        _run_steps(steps, record, state, say)
    if recipe.test:
        say("bits per byte of held-out text, lower is better:")
        say(Evaluation.from_json(root / "evaluation.json").markdown())
    say(f"final checkpoint: {final}")
    return final


def _run_steps(steps: list[Step], record: RunRecord, state: Any, say: Callable[[str], None]) -> None:
    """Runs the steps that are not done."""
    for number, step in enumerate(steps, start=1):
        label = f"[{number}/{len(steps)}] {step.name}"
        is_done, replaced_by = record.is_done(step), record.replaced_by(step)
        state.wait_for_everyone()  # all ranks have looked before the first one writes
        if is_done:
            say(f"{label}: done already ({record.done[step.name].summary})")
            continue
        if replaced_by:
            say(f"{label}: done, its output is no longer kept; to run it again, delete {replaced_by.output} too")
            continue
        say(f"{label} ...")
        done = StepResult("")
        with record.attempt(step):
            if step.every_rank or state.is_main_process:
                done = step.work()
        state.wait_for_everyone()
        if state.is_main_process:
            say(f"{label}: {done.summary} ({record.end(step, done):.0f} s)")
