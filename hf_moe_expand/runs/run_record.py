"""steps.json: the record of a run's steps, with hashes of what each was made from."""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ..core.errors import InputError
from ..core.jsonfile import read_json, write_json
from ..core.recipe_paths import RECIPE, SETTINGS
from ..core.schema import Coefficient, Count, Schema, Text, changed, read

if TYPE_CHECKING:
    from ..stages.kind import StepResult
    from .steps.step import Step

BEGUN = "begun"  # the key of the step at work
FORM = "2"  # in which hashes of inputs are taken; another one is an earlier version's


class StepDone(Schema):
    """A step that is done: seconds and number of its attempts, a line for the user, what it wrote (in the run's
    folder), facts, hashes of its inputs."""

    seconds: Coefficient
    summary: Text
    attempts: Count = 1
    output: Text | None = None
    facts: dict[Text, Any] = Field(default_factory=dict)
    made_from: dict[Text, Text] = Field(default_factory=dict)


class StepAtWork(Schema):
    """The step that has begun, seconds of its earlier attempts, the number of attempts, hashes of its inputs."""

    step: Text
    seconds: Coefficient = 0.0
    attempts: Count = 1
    made_from: dict[Text, Text] = Field(default_factory=dict)


def run_folder(run: str | Path) -> Path:
    """The folder of a run; refuses a name that is no folder."""
    if not Path(run).is_dir():
        raise InputError(f"{run}: no such folder; give the `output` of a recipe that `hf-moe-expand run` has run.")
    return Path(run)


def read_steps(path: Path) -> tuple[dict[str, StepDone], StepAtWork | None]:
    """The record: the steps that are done, by name, and the step at work; empty where there is no file."""
    steps = read_json(path, "the record of a run") if path.is_file() else {}
    begun = read(StepAtWork, steps.pop(BEGUN), f"{path}: {BEGUN}") if BEGUN in steps else None
    return {name: read(StepDone, step, f"{path}: {name}") for name, step in steps.items()}, begun


class RunRecord:
    """`steps.json` of the run in `root`; one rank `writes` it. A step is made from all that those before it were made
    from: the first ones from `start`."""

    def __init__(self, root: Path, steps: "list[Step]", start: dict[str, Any], writes: bool) -> None:
        self.root, self.path, self.steps, self.writes = root, root / "steps.json", steps, writes
        self.done, self.begun = read_steps(self.path)
        self.inputs_of: dict[str, dict[str, str]] = {}
        made_from = _hashed({"form": FORM, **start})
        for step in steps:
            made_from |= _hashed({f"{step.name}: {key}": value for key, value in step.inputs().items()})
            self.inputs_of[step.name] = dict(made_from)

    def is_done(self, step: "Step") -> bool:
        """Whether its output is there, of the inputs that it has now."""
        redo = step.repeatable and self._changes(step)
        return step.name in self.done and step.output.exists() and not redo

    def _changes(self, step: "Step") -> list[str]:
        """The inputs that changed since the step ran."""
        unrecorded = self._is_begun(step) and step.output.exists()
        earlier = self.begun if unrecorded else self.done.get(step.name)
        if earlier is None:
            return []
        before, now = earlier.made_from, self.inputs_of[step.name]
        if before.get("form") != now["form"]:
            raise InputError(f"{self.path}: is of another version: finish it with that one, or give another `output`.")
        return [key for key in {**now, **before} if before.get(key) != now.get(key)]

    def _is_begun(self, step: "Step") -> bool:
        return self.begun is not None and self.begun.step == step.name

    def check(self, text: str | None) -> None:
        """Refuses a folder that is no run of this recipe, whose file has this text: one with outputs that the record
        does not know, and one whose inputs were changed after a step on which others depend had run with them."""
        recipe_file, is_new = self.root / RECIPE, not (self.done or self.begun)
        same = text is not None and recipe_file.is_file() and recipe_file.read_bytes() == text.encode()
        written = [recipe_file, self.root / SETTINGS] if is_new and not same else []
        known = {*self.done, *([] if self.begun is None else [self.begun.step])}
        written += [step.output for step in self.steps if step.name not in known and (is_new or not step.repeatable)]
        if there := [path for path in written if path.exists()]:
            raise InputError(f"{self.root}: holds {there[0].name}, which is not of this run: give another `output`.")
        for step in self.steps:
            if step.name.removeprefix("expansion 1: ") in {*self.done} - {step.name}:
                raise InputError(
                    f"{self.root}: holds a run of one expansion, whose steps have other names and folders than those "
                    f"of several (`{step.name}`): give another `output`, or grow the finished model (docs/packs.md)."
                )
            if not step.repeatable and (changed := self._changes(step)):
                raise InputError(
                    f"{self.root}: {', '.join(changed[:3])}: changed after step `{step.name}` had run with it. Give "
                    "another `output`, undo the change, or delete this folder."
                )

    def replaced_by(self, step: "Step") -> "Step | None":
        """The first later step whose output makes this step's output unnecessary: a checkpoint replaces all outputs
        before it, a plan replaces an analysis."""
        if step.repeatable or step.name not in self.done:
            return None
        for other in self.steps[self.steps.index(step) + 1 :]:
            stands_for = not other.repeatable and (other.output.suffix != ".json" or step.output.suffix == ".json")
            if stands_for and other.output.exists() and (other.name in self.done or self._is_begun(other)):
                return other
        return None

    @contextmanager
    def attempt(self, step: "Step") -> Iterator[None]:
        """Records that a step is running, at its next attempt where its inputs are those of an interrupted one, and
        adds the time inside; forgets later repeatable steps, which used its former output."""
        begun = StepAtWork(step=step.name, made_from=self.inputs_of[step.name])
        if self.begun is not None and (self.begun.step, self.begun.made_from) == (begun.step, begun.made_from):
            begun = changed(begun, seconds=self.begun.seconds, attempts=self.begun.attempts + 1)
        for later in self.steps[self.steps.index(step) + 1 :]:
            if later.repeatable:
                self.done.pop(later.name, None)
        self._write(begun)
        started = time.monotonic()
        try:
            yield
        finally:
            self._write(changed(begun, seconds=round(begun.seconds + time.monotonic() - started, 1)))

    def end(self, step: "Step", done: "StepResult") -> float:
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
