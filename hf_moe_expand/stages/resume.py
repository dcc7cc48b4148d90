"""The folder beside a stage's output with its training checkpoints, from which an interrupted run resumes."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoint.reader import CheckpointReader
from ..core.errors import InputError
from ..core.jsonfile import read_json, write_json
from ..core.scratch import FolderLock, is_work_folder, remove_leftovers, remove_work_folder, training_of, work_folder
from ..data.sources import LanguageText

STARTED_WITH = "started_with.json"
FORM = "2"  # in which settings are compared; another one is another version's
_MAY_CHANGE = ("dataloader_num_workers", "dataset_num_proc")  # without it the same text is read


class TrainingFolder:
    """`OUT.training`: made by `begun`, removed by `remove`. Refuses a folder that is not ours or has an input in it."""

    def __init__(
        self, out: Path, model: Path, settings: dict[str, Any], data: Mapping[str, LanguageText], seed: int
    ) -> None:
        self.path = training_of(out)
        self.lock = FolderLock(self.path, f"trains {out.name}")
        sources = {code: text.contents() for code, text in data.items()}
        fingerprint = CheckpointReader(model).fingerprint()
        settings = {name: value for name, value in settings.items() if name not in _MAY_CHANGE}
        # What must match for a run to resume, as JSON keeps it.
        started_with = {"form": FORM, "model": fingerprint, "settings": settings, "seed": seed, "data": sources}
        self.started_with: dict[str, Any] = json.loads(json.dumps(started_with))
        inputs = [model, *(file for text in data.values() for file in text.files())]
        here = self.path.resolve()
        for path in inputs:
            if here == path.resolve() or here in path.resolve().parents:
                raise InputError(f"{path}: lies in {self.path}, which is removed at the end: move it.")
        if os.path.lexists(self.path) and not is_work_folder(self.path):
            raise InputError(f"{self.path}: is not the folder of an interrupted training of {out.name}: move it away.")

    def resume(self) -> str | None:
        """The last complete training checkpoint of an interrupted run; None without one. Refuses a run that had other
        settings, other data or another model."""
        record = self.path / STARTED_WITH
        # Saved last: if it is missing, the process was killed while it saved.
        whole = [path.parent for path in self.path.glob("checkpoint-*/trainer_state.json") if _is_json(path)]
        if not record.is_file() or not whole:
            return None
        before = read_json(record, "the record of a training run")
        if before.get("form") != FORM:
            raise InputError(f"{self.path}: holds an interrupted training of another version: finish it with that one.")
        before, now = ({**record.pop("settings", {}), **record} for record in (before, dict(self.started_with)))
        if changed := [name for name in {**now, **before} if before.get(name) != now.get(name)]:
            raise InputError(
                f"{self.path}: holds an interrupted run with other {', '.join(changed)}. Delete the folder to start "
                "from the beginning, or undo the change to resume."
            )
        return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2])))

    @contextmanager
    def begun(self, writes: bool) -> Iterator[None]:
        """Makes the folder and its record, and locks it until `remove` or an error inside; on the rank that `writes`.
        Refuses while another process trains the same output. An error removes the folder again where no training
        checkpoint was saved, from which to go on."""
        if writes:
            work_folder(self.path)
            self.lock.acquire()
        try:
            if writes:
                write_json(self.path / STARTED_WITH, self.started_with)
            yield
        except BaseException:
            if writes and not any(self.path.glob("checkpoint-*")):
                self.remove()
            self.lock.release()
            raise

    def remove(self) -> None:
        """Removes the folder."""
        remove_work_folder(self.path)
        self.lock.release()


def remove_training(out: Path) -> None:
    """Removes what an interrupted training of `out` left, once `out` is whole; somebody else's folder stays."""
    remove_leftovers(out)
    path = training_of(out)
    if is_work_folder(path):
        remove_work_folder(path)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True
