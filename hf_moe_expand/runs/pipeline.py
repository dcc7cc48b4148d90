"""`run` and `validate`: run or check all steps of a recipe. Finished steps are not run again."""

import hashlib
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..checkpoint.promises import check_architecture
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.source import base_config_at_hand, load_base_config, load_config, pack_and_name, resolve_checkpoint
from ..checkpoint.tokenizer import load_tokenizer
from ..checkpoint.writer import check_apart, check_writable
from ..core.disk import check_room, free_bytes, peak, readable_size
from ..core.errors import InputError, errors_at, goes_on, named_as
from ..core.jsonfile import write_json, write_text
from ..core.recipe_paths import RECIPE, SETTINGS, unset_variable, without_paths
from ..core.schema import changed, checked
from ..core.scratch import FolderLock
from ..data.lost import LostText, check_lost, lost_lines, token_line
from ..data.pairs import check_pairs, lost_of
from ..data.places import is_elsewhere
from ..data.sources import LanguageText, all_left_out, counted
from ..evaluation.known import swapped
from ..evaluation.report import Evaluation
from ..inference.asking import why_no_base_inside
from ..modeling import stack_sizes
from ..stages.config import StageConfig
from ..stages.distributed import launched
from ..stages.kind import StepResult
from ..stages.trial import Trial, weight_bytes, write_base
from .recipe import Recipe
from .run_record import BEGUN, FORM, StepAtWork, StepDone, read_steps
from .steps.analyze import AnalyzeDeviation, AnalyzeSimilarity
from .steps.base_gate import FitBaseGate, changes_base, fits_base
from .steps.evaluate import Evaluate
from .steps.expanding import Expand
from .steps.joining import JoinPacks
from .steps.planning import MakePlan
from .steps.stage import StageStep, TrainStep
from .steps.step import ExpansionRun, Step
from .steps.tuning import JoinFineTunes

_WRITTEN = "checkpoints, with those that a stage keeps while it trains"


def steps_of(recipe: Recipe) -> tuple[list[Step], Path]:
    """The steps of a recipe in order, and the folder of its final checkpoint."""
    root, sources = Path(recipe.output), recipe.training_sources
    steps: list[Step] = []
    models: dict[str, str] = {"base": recipe.base}
    start, old = recipe.base, list(recipe.old)
    lifelong = len(recipe.all_expansions) > 1
    for number, expansion in enumerate(recipe.all_expansions, start=1):
        texts = {code: sources[code] for code in (*old, *expansion.new)}
        work = ExpansionRun(recipe, expansion, number, root / str(number) if lifelong else root, start, old, texts)
        if not recipe.joins:
            steps += _planned(work)
        else:
            join = JoinFineTunes(work, recipe.tuned) if recipe.join is None else JoinPacks(work, recipe.join)
            steps.append(join)
            models[join.writes] = str(join.output)
        for stage, settings in expansion.stages():
            if stage.key == "gates" and fits_base(work) and not changes_base(work):
                continue
            step = TrainStep if isinstance(settings, StageConfig) else StageStep
            steps.append(step(work, stage, settings, steps[-1].output))
            if not lifelong:
                models[stage.result_name] = str(steps[-1].output)
        start, old = str(steps[-1].output), [*old, *expansion.new]
        if lifelong:
            models[f"after expansion {number}"] = start
    if recipe.test:
        steps.append(Evaluate(recipe, models))
    return steps, Path(start)


def _planned(work: ExpansionRun) -> list[Step]:
    """The steps from the analyses to the expanded checkpoint."""
    steps: list[Step] = []
    if needs := work.expansion.needs:
        steps.append({"similarity": AnalyzeSimilarity, "deviation": AnalyzeDeviation}[needs](work))
    if fits_base(work):
        steps.append(FitBaseGate(work))
    return [*steps, MakePlan(work), Expand(work)]


@checked
def validate_recipe(recipe: Recipe, offline: bool = False, here: bool = True) -> list[str]:
    """Checks a recipe as far as possible before anything runs; returns one line for each check that passed. Loads the
    base, if it is small, to see whether old and new languages are swapped.

    Reads local text until it is known to be enough; does not read text on the hub.

    Args:
        offline: download nothing; skip, with a line that says so, every check that needs a base that is not on this
            machine or a variable that is not set.
        here: refuse what this machine cannot do, such as a training of far more memory than it has; with `offline`,
            another machine is taken to be the one that trains.

    Raises:
        InputError: the recipe has a mistake; the message names the first one.
    """
    lines, written = _checked(recipe, offline, here)
    if offline:
        return lines
    if here:
        check_room(Path(recipe.output), peak(written), _WRITTEN)
    given = dict(recipe.keyed_sources())
    old, new = ({t.language: t for key, t in given.items() if kind in key.split(".")[:-1]} for kind in ("old", "new"))
    config = load_base_config(resolve_checkpoint(recipe.base, recipe.revision))
    return lines + swapped(recipe.base, recipe.revision, config, old, new)


def _checked(recipe: Recipe, offline: bool = False, here: bool = True) -> tuple[list[str], list[tuple[Path, int, int]]]:
    """The lines of a recipe's checks, and what its steps write to the disk, as `peak` takes it."""
    if offline:
        config: Any = None if unset_variable(recipe.base) else base_config_at_hand(recipe.base, recipe.revision)
    else:
        config = load_base_config(resolve_checkpoint(recipe.base, recipe.revision))
        check_architecture(config, recipe.base)
    trial = Trial(recipe.base, recipe.revision, config, offline, here=here and not offline)
    lines: list[str] = []
    if config is None:
        lines.append(f"skipped: architecture, plans, stages and disk: {recipe.base} is not on this machine")
    else:
        stacks = [f"{size} {stack} layers".replace("  ", " ") for stack, size in stack_sizes(config).items()]
        lines.append(", ".join([f"base: {recipe.base}", config.model_type, *stacks]))
    lost: dict[str, LostText] = {}
    for key, source in recipe.keyed_sources():
        if offline and (unset := unset_variable(source.source)):
            lines.append(f"skipped: {key}: {source.source}: {unset} is not set")
            continue
        with errors_at(key):
            if config is not None and config.is_encoder_decoder:
                check_pairs(source, trial.tokenizer)
            else:
                source.check()
            if not offline and is_elsewhere(source.source):
                source.shards()  # refuses an address of nothing
            lines.append(f"{key}: {_looked_at(source, config)}")
        if not offline and source.files():
            lost[key] = lost_of(source, trial.tokenizer, config.is_encoder_decoder)
    lines += [*token_line(lost), *lost_lines(lost)]
    check_lost(lost, recipe.allow_lost_text)
    if not offline:  # else another machine may be the one that runs
        check_writable(Path(recipe.output) / RECIPE)
    grafts = [expansion.graft.instruct for expansion in recipe.all_expansions if expansion.graft is not None]
    packs = [] if recipe.join is None else [pack_and_name(pack)[0] for pack in recipe.join.packs]
    models = [name for name in (recipe.base, *grafts, *packs, *recipe.tuned.values()) if Path(name).is_dir()]
    for step in steps_of(recipe)[0]:
        with errors_at("output"):
            check_apart(step.output, *models)
    tried, written = _tried(recipe, trial)
    lines += tried
    if written:
        output = Path(recipe.output)
        needed, free = readable_size(peak(written)), readable_size(free_bytes(output))
        lines.append(f"disk: up to {needed} for {_WRITTEN}; {free} are free at {output}")
    return lines + recipe.unread() + needs_of_a_push(recipe), written


def _tried(recipe: Recipe, trial: Trial) -> tuple[list[str], list[tuple[Path, int, int]]]:
    """Tries the steps of a recipe in a folder of its own, which is removed; those that need a base, if it is there."""
    lines: list[str] = []
    written: list[tuple[Path, int, int]] = []
    with TemporaryDirectory(prefix="hf-moe-expand-") as folder:
        output, base = Path(folder, "run"), Path(folder, "base")
        copy = changed(recipe, output=str(output))
        if trial.config is not None and trial.offline:
            write_base(deepcopy(trial.config), base)
            copy = changed(copy, base=str(base), revision=None)
        with named_as(output, recipe.output), named_as(base, recipe.base):
            for step, named in zip(steps_of(copy)[0], steps_of(recipe)[0], strict=True):
                base_is_there = trial.config is not None and getattr(step, "before", output.parent).exists()
                if not base_is_there and not isinstance(step, Evaluate):
                    continue
                lines += step.check(trial)
                if (step.output / "config.json").is_file():
                    written.append((named.output, weight_bytes(step.output), step.beside))
    return lines, written


def _looked_at(source: LanguageText, config: Any) -> str:
    """A text's files, and what is left out at their beginning."""
    files = source.files()
    if not files:
        where = "elsewhere" if is_elsewhere(source.source) else "on the hub"
        return f"{source.source}, {where}"
    beginnings = list(source.beginnings(as_pairs=config is not None and config.is_encoder_decoder))
    words = [f"{source.source}, {len(files)} file(s)", source.files_left_out()]
    if left_out := all_left_out(beginnings):
        kept, whole = sum(len(one.rows) for one in beginnings), all(one.read == 1 for one in beginnings)
        words.append(f"{'' if whole else 'at the beginning '}{counted(kept, 'document')} kept, {left_out}")
    return "; ".join(filter(None, words))


def needs_of_a_push(recipe: Recipe) -> list[str]:
    """What a push of the finished model will take, one line each."""
    lines = []
    if Path(recipe.base).is_dir():
        lines.append(
            f"push: {recipe.base} is a local folder: where it is published, name it with `push --base HUB_ID`; "
            "--expansion-only needs that"
        )
    if recipe.text is not None and without_paths(recipe.text) != recipe.text:
        lines.append("push: of local paths in the recipe, the last part is published; $VARIABLES stay as written")
    return lines


@checked
def run_recipe(recipe: Recipe, say: Callable[[str], None] = print) -> Path:
    """Runs a recipe: analyses, plans, expands (or joins packs) and trains for each of its expansions, then evaluates.

    A second run after an interruption resumes the first: finished steps are skipped, and training resumes from its
    last checkpoint. Under `accelerate launch` all ranks train, and the first rank does all other steps.

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
    # The inputs of every step.
    start = {"form": FORM, "base": [recipe.base, recipe.revision, base], "seed": recipe.seed}
    record = _StepRecord(root, steps, start, state.is_main_process)
    record.refuse_foreign(recipe.text)
    record.refuse_changes()
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
    if state.is_main_process:
        say("\n".join(["what follows:", *(f"  {command}" for command in _what_follows(root, final))]))
    return final


def _what_follows(root: Path, final: Path) -> list[str]:
    """The commands that show, ask and publish the model of a finished run."""
    config: Any = load_config(final)
    asks = ["inspect", str(final)]
    if not config.is_encoder_decoder:
        inside = [] if why_no_base_inside(config) else ["--base", "inside"]
        talks = bool(load_tokenizer(final, final).chat_template)
        asks = ["chat", str(final), *([] if talks else ["--prompt", "PROMPT"]), *inside]
    name = "-".join(re.findall(r"[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*", root.resolve().name)) or "model"
    commands = [["report", str(root)], asks, ["push", str(final), f"me/{name}", "--dry-run"]]
    return [shlex.join(["hf-moe-expand", *command]) for command in commands]


def _run_steps(steps: list[Step], record: "_StepRecord", state: Any, say: Callable[[str], None]) -> None:
    """Runs the steps that are not done."""
    for number, step in enumerate(steps, start=1):
        label = f"[{number}/{len(steps)}] {step.name}"
        exists, replaced_by = step.output.exists(), record.replaced_by(step, steps[number:])
        redo = step.repeatable and bool(record.changes(step))
        state.wait_for_everyone()  # all ranks have looked before the first one writes
        if step.name in record.done and exists and not redo:
            say(f"{label}: done already ({record.done[step.name].summary})")
            continue
        if replaced_by:
            say(f"{label}: done, its output is no longer kept; to run it again, delete {replaced_by.output} too")
            continue
        say(f"{label} ...")
        unrecorded = exists and record.is_begun(step)
        done = StepResult("")
        with record.attempt(step, steps[number:]):
            if step.every_rank or state.is_main_process:
                done = (step.finish() if unrecorded else None) or step.work()
        state.wait_for_everyone()
        if state.is_main_process:
            seconds = record.end(step, done)
            say(f"{label}: {done.summary} ({seconds:.0f} s)")


class _StepRecord:
    """`steps.json`: the finished steps with hashes of their inputs, and the running step; one rank `writes` it."""

    def __init__(self, root: Path, steps: list[Step], start: dict[str, Any], writes: bool) -> None:
        self.root, self.path, self.steps, self.writes = root, root / "steps.json", steps, writes
        self.done, self.begun = read_steps(self.path)
        # A step is made from all that the steps before it were made from.
        self.inputs_of: dict[str, dict[str, str]] = {}
        before = _hashed(start)
        for step in steps:
            before = {**before, **_hashed({f"{step.name}: {key}": value for key, value in step.inputs().items()})}
            self.inputs_of[step.name] = before

    def is_begun(self, step: Step) -> bool:
        return self.begun is not None and self.begun.step == step.name

    def changes(self, step: Step) -> list[str]:
        """The inputs that changed since the step ran."""
        unrecorded = self.is_begun(step) and step.output.exists()
        earlier = self.begun if unrecorded else self.done.get(step.name)
        if earlier is None:
            return []
        before, now = earlier.made_from, self.inputs_of[step.name]
        if before.get("form") != now["form"]:
            raise InputError(
                f"{self.path}: was written by another version of this package: give another `output`, or finish the "
                "run with that version."
            )
        return [key for key in dict.fromkeys([*now, *before]) if before.get(key) != now.get(key)]

    def refuse_foreign(self, text: str | None) -> None:
        """Refuses a first run whose output folder holds files that its steps would overwrite."""
        if self.done or self.begun:
            return
        recipe_file = self.root / RECIPE
        same = text is not None and recipe_file.is_file() and recipe_file.read_bytes() == text.encode()
        written = [*([] if same else [recipe_file, self.root / SETTINGS]), *(step.output for step in self.steps)]
        if there := [path for path in written if path.exists()]:
            raise InputError(
                f"{self.root}: holds {there[0].name}, which this run would overwrite, but no record of a run "
                f"({self.path.name}): give another `output`, or move the folder away."
            )

    def refuse_changes(self) -> None:
        """Refuses a run whose inputs were changed after a step on which others depend had run with them."""
        if alone := [step for step in self.steps if step.name in {f"expansion 1: {name}" for name in self.done}]:
            raise InputError(
                f"{self.root}: holds a run of one expansion, whose steps have other names and folders than those of "
                f"several (`{alone[0].name}`): give another `output`, or grow the finished model with a recipe of its "
                "own (`base`)."
            )
        for step in self.steps:
            if not step.repeatable and (changed := self.changes(step)):
                raise InputError(
                    f"{self.root}: {', '.join(changed[:3])}: changed after step `{step.name}` had run with it. Give "
                    "another `output`, undo the change, or delete this folder."
                )

    def replaced_by(self, step: Step, later: list[Step]) -> Step | None:
        """The first later step whose output makes this step's output unnecessary: a checkpoint replaces all outputs
        before it, a plan replaces an analysis; only the last checkpoint replaces an output that later steps read."""
        if step.repeatable or step.name not in self.done:
            return None
        if step.read_later:
            later = [other for other in later if not other.repeatable][-1:]
        for other in later:
            stands_for = not other.repeatable and (other.output.suffix != ".json" or step.output.suffix == ".json")
            if stands_for and other.output.exists() and (other.name in self.done or self.is_begun(other)):
                return other
        return None

    @contextmanager
    def attempt(self, step: Step, later: list[Step]) -> Iterator[None]:
        """Records that a step is running, and adds the time inside to the step's; forgets later repeatable steps, which
        used its former output. A step that was interrupted with the same inputs is at its next attempt. Where one with
        other inputs is refused, the file still tells of the attempts before."""
        begun = StepAtWork(step=step.name, seconds=0.0, attempts=1, made_from=self.inputs_of[step.name])
        other = self.begun if self.is_begun(step) else None
        if other is not None and other.made_from == begun.made_from:
            begun, other = changed(begun, seconds=other.seconds, attempts=other.attempts + 1), None
        for repeatable in (one.name for one in later if one.repeatable):
            self.done.pop(repeatable, None)
        self._write(begun)
        started, refused = time.monotonic(), False
        try:
            yield
        except InputError:
            refused = True
            raise
        finally:
            begun = changed(begun, seconds=round(begun.seconds + time.monotonic() - started, 1))
            self._write((refused and other) or begun)

    def end(self, step: Step, done: StepResult) -> float:
        """Records that the step is done; returns the seconds that its attempts took."""
        assert self.begun is not None
        seconds, attempts = self.begun.seconds, self.begun.attempts
        several = {"attempts": attempts} if attempts > 1 else {}
        self.done[step.name] = StepDone(
            seconds=seconds, summary=done.summary, **several, output=step.output.relative_to(self.root).as_posix(),
            facts=done.facts, made_from=self.inputs_of[step.name],
        )  # fmt: skip
        self._write(None)
        return seconds

    def _write(self, begun: StepAtWork | None) -> None:
        self.begun = begun
        if self.writes:
            records = {**self.done, **({} if begun is None else {BEGUN: begun})}
            write_json(self.path, {name: record.model_dump(exclude_unset=True) for name, record in records.items()})


def _hashed(inputs: dict[str, Any]) -> dict[str, str]:
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for key, value in inputs.items()
    }
