"""The folders of which a page tells: the expansions of a run, or checkpoints that single commands made."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.local import EXPANDED
from ..checkpoint.records import History, StageRecord
from ..core.errors import InputError
from ..core.jsonfile import read_json
from ..runs.run_record import run_folder
from ..stages import recipe_stages


@dataclass(frozen=True)
class Part:
    """An expansion: its heading, empty if a run has no other; its folder; headings and checkpoints of its stages, in
    their order; the history of its last checkpoint."""

    title: str
    folder: Path
    stages: list[tuple[str, Path]]
    history: History


def parts_of(root: Path, checkpoints: Sequence[Path]) -> list[Part]:
    """The expansions of a run, or checkpoints as one part."""
    if checkpoints:
        stages = [(f"{r.stage if (r := last_stage(path)) else 'expanded'}: {path.name}", path) for path in checkpoints]
        return [Part("", root, stages, history_of(checkpoints[-1]))]
    numbered = sorted((p for p in root.iterdir() if p.name.isdecimal() and p.is_dir()), key=lambda p: int(p.name))
    return [_expansion(f"Expansion {folder.name}", folder) for folder in numbered] or [_expansion("", root)]


def _expansion(title: str, folder: Path) -> Part:
    found = [stage for stage in recipe_stages().values() if (folder / stage.key / "config.json").is_file()]
    stages = [(f"{title}: {stage.title}".removeprefix(": "), folder / stage.key) for stage in found]
    made = [path for path in (folder / "expanded", folder / "joined") if (path / "config.json").is_file()]
    made += [checkpoint for _, checkpoint in stages]
    return Part(title, folder, stages, history_of(made[-1]) if made else History())


def history_of(folder: Path) -> History:
    """The history in a checkpoint's config.json."""
    return History.of(read_json(folder / "config.json", "a checkpoint's configuration"))


def last_stage(folder: Path) -> StageRecord | None:
    """The last record in a checkpoint's history, if anything came after its last expansion."""
    history = history_of(folder)
    return history.last.stages[-1] if len(history) and history.last.stages else None


def records_and_checkpoints(folders: Sequence[str | Path]) -> list[Path]:
    """The folder with a run's JSON files, for which the first of checkpoints alone stands; then all checkpoints."""
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
