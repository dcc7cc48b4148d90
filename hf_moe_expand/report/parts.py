"""The folders of which a page tells: the expansions of a run, or checkpoints that single commands made."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.local import EXPANDED
from ..errors import InputError
from ..jsonfile import read_json
from ..planning.plan import Plan
from ..records import History, StageRecord
from ..run_record import run_folder
from ..stages import all_stages, stages_for


@dataclass(frozen=True)
class Part:
    """One expansion of a run: its number (0 if it is the only one) and its folder."""

    number: int
    folder: Path

    @property
    def prefix(self) -> str:
        """The prefix of its steps' names in steps.json."""
        return f"expansion {self.number}: " if self.number else ""

    @property
    def title(self) -> str:
        return f"Expansion {self.number}" if self.number else ""

    def stages(self) -> list[str]:
        """Names of its stages' folders, in the order in which they were written."""
        plan = self.plan()
        order = [stage.key for stage in stages_for("dmoe" if plan is not None and plan.groups else "layer_moe")]
        return [name for name in order if (self.folder / name / "config.json").is_file()]

    def plan(self) -> Plan | None:
        path = self.folder / "plan.json"
        return Plan.load(path) if path.is_file() else None

    def history(self) -> History:
        """The history of the last checkpoint."""
        for name in [*reversed(self.stages()), "joined", "expanded"]:
            if (self.folder / name / "config.json").is_file():
                return history_of(self.folder / name)
        return History()

    def title_of(self, stage: str) -> str:
        """The heading of a stage, by the name of its folder."""
        name = all_stages()[stage].title
        return f"{self.title}: {name[0].lower()}{name[1:]}" if self.number else name


@dataclass(frozen=True)
class Loose(Part):
    """Checkpoints that single commands made, in the order of their stages, and a folder with JSON files."""

    checkpoints: tuple[Path, ...] = ()

    def stages(self) -> list[str]:
        return [str(path.absolute()) for path in self.checkpoints]  # beside `folder`, such a path stands for itself

    def history(self) -> History:
        return history_of(self.checkpoints[-1])

    def title_of(self, stage: str) -> str:
        record = last_stage(Path(stage))
        name = "expanded" if record is None else record.stage
        titles = {known.name: known.title for known in all_stages().values()}
        return f"{titles.get(name, name)}: {Path(stage).name}"


def history_of(folder: Path) -> History:
    """The history in a checkpoint's config.json."""
    return History.of(read_json(folder / "config.json", "a checkpoint's configuration"))


def last_stage(folder: Path) -> StageRecord | None:
    """The record of the last stage in a checkpoint's history."""
    expansions = history_of(folder).expansions
    return expansions[-1].stages[-1] if expansions and expansions[-1].stages else None


def records_and_checkpoints(folders: Sequence[str | Path]) -> list[Path]:
    """The folder with a run's JSON files, then the checkpoints among `folders`, if there are any. Checkpoints alone
    have none: the first stands for it.
    """
    resolved = [run_folder(folder) for folder in folders]
    checkpoints = [folder for folder in resolved if (folder / "config.json").is_file()]
    for folder in checkpoints:
        kind = read_json(folder / "config.json", "a checkpoint's configuration").get("model_type")
        if kind not in EXPANDED:
            raise InputError(f"{folder}: a {kind} checkpoint, not an expanded one, of which a page would tell nothing.")
    others = [folder for folder in resolved if folder not in checkpoints]
    if len(others) > 1:
        raise InputError(
            f"{others[1]}: a page tells of one run: give one folder, or one folder with the JSON files of single "
            "commands (plan.json, evaluation.json) and the checkpoints that they made."
        )
    return [*(others or checkpoints[:1]), *checkpoints]
