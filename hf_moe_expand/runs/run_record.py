"""steps.json: the record of a run's steps."""

from pathlib import Path
from typing import Any

from pydantic import Field

from ..core.errors import InputError
from ..core.jsonfile import read_json
from ..core.schema import Coefficient, Count, Schema, Text, read

# The key under which the step at work stands.
BEGUN = "begun"
# Among a step's inputs, the form in which their hashes are taken; another one is an earlier version's.
FORM = "2"


class StepDone(Schema):
    """A step that is done: seconds that its attempts took together, their number, a line for the user, what it wrote
    (in the run's folder), facts, hashes of its inputs."""

    seconds: Coefficient
    summary: Text
    attempts: Count = 1
    output: Text | None = None
    facts: dict[Text, Any] = Field(default_factory=dict)
    made_from: dict[Text, Text] = Field(default_factory=dict)


class StepAtWork(Schema):
    """The step that has begun, hashes of its inputs, seconds of its earlier attempts, and the number of attempts."""

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
    """The record: the steps that are done, by name, and the step at work; empty where there is none. Refuses a file
    that is no such record."""
    steps = read_json(path, "the record of a run") if path.is_file() else {}
    begun = read(StepAtWork, steps.pop(BEGUN), f"{path}: {BEGUN}") if BEGUN in steps else None
    return {name: read(StepDone, step, f"{path}: {name}") for name, step in steps.items()}, begun
