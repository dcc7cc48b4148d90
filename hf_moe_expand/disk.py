"""The bytes that a training or a run will write, against the room on its disk."""

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError, is_full_disk

DEFAULT_SHARD_SIZE = "5GB"
# Training holds float32 weights; AdamW keeps two float32 moments of each weight that trains.
_WEIGHT, _MOMENTS = 4, 8
# The optimizers of transformers that keep both moments in float32; of the others, the state is not counted.
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused")


@dataclass(frozen=True)
class StepOutput:
    """What a step of a run writes.

    Attributes:
        output: the folder that the step leaves.
        size: bytes of this folder.
        working: most bytes of the files that it writes beside the folder and removes at its end.
    """

    output: Path
    size: int
    working: int = 0


def saved_at_once(config: Any) -> int:
    """The most training checkpoints that lie on the disk at once, by a stage's configuration.

    The Trainer removes an old checkpoint after it saved a new one, so one more than `save_total_limit` can be there.
    Where the number of steps is unknown before the text is read, they are assumed to be enough for that."""
    strategy, limit = str(getattr(config.save_strategy, "value", config.save_strategy)), config.save_total_limit
    most = limit + 1 if limit and limit > 0 else None
    saves = None
    if strategy == "no":
        saves = 0
    elif strategy == "steps" and config.save_steps < 1:  # a share of all steps
        saves = math.ceil(1 / config.save_steps)
    elif strategy == "steps" and config.max_steps > 0:
        saves = math.ceil(config.max_steps / config.save_steps)  # the last step is saved too
    elif strategy == "epoch" and config.max_steps <= 0:
        saves = math.ceil(config.num_train_epochs)
    known = [number for number in (saves, most) if number is not None]
    return min(known) if known else 2  # without a limit, at least this many


def training_checkpoint(parameters: int, trained: int, config: Any) -> int:
    """Bytes of one training checkpoint: float32 weights, and the optimizer's state of those that train."""
    return _WEIGHT * parameters + (_MOMENTS * trained if config.optim.value in _ADAMW else 0)


def peak(steps: Sequence[StepOutput]) -> int:
    """The most bytes that a run adds to its disk. Steps up to the last one whose output exists are done."""
    done = max((number for number, step in enumerate(steps, start=1) if step.output.exists()), default=0)
    total = most = 0
    for step in steps[done:]:
        total += step.size
        there = folder_bytes(step.output.with_name(f"{step.output.name}.training"))
        most = max(most, total + max(step.working - there, 0))
    return most


def free_bytes(path: Path) -> int:
    """Free bytes of the disk on which `path` is, or will be."""
    try:
        place = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        return shutil.disk_usage(place).free
    except OSError as error:
        raise InputError(f"{path}: the disk cannot be read ({error.strerror}).") from None


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder; 0 if there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def check_room(path: Path, needed: int, purpose: str) -> None:
    """Refuses work that would fill the disk.

    Args:
        path: where the work writes.
        needed: bytes that it needs there.
        purpose: what needs them, for the message.
    """
    if needed > (free := free_bytes(path)):
        raise InputError(
            f"{path}: needs {needed:,} bytes for {purpose}, but the disk has {free:,} bytes free: choose another disk, "
            'or keep fewer training checkpoints (`save_total_limit: 1`, or `save_strategy: "no"`).'
        )


@contextmanager
def full_disk_as(refusal: InputError) -> Iterator[None]:
    """Inside, the error of a full disk becomes `refusal`."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise refusal from error
