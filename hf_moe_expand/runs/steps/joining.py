"""The step that joins language packs, in place of a plan, an expansion and stage 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...analysis.gating import anchors_for
from ...checkpoint.facts import Facts
from ...checkpoint.join import Pack, join_expansions, load_packs
from ...checkpoint.operation_settings import JoinSettings
from ...checkpoint.reader import CheckpointReader, headers_alone
from ...checkpoint.source import load_config, pack_and_name, resolve_checkpoint
from ...checkpoint.stored import StoredModel
from ...core.errors import InputError, errors_at
from ...modeling.part_expansion_only import RECORD
from ...stages.kind import StepResult
from ...stages.trial import Trial
from .step import RunStep


@dataclass
class JoinPacks(RunStep):
    """Writes the model that joins the packs."""

    title, writes = "join", "joined"
    settings: JoinSettings

    def inputs(self) -> dict[str, Any]:
        folders = [resolve_checkpoint(pack_and_name(pack)[0]) for pack in self.settings.packs]
        return {"join": self.settings.model_dump(), "packs": [CheckpointReader(it).fingerprint() for it in folders]}

    def check(self, trial: Trial) -> list[str]:
        """Checks all but the bytes of the packs' bases, which `work` compares."""
        if trial.offline and not all(map(_is_whole_folder, self.settings.packs)):
            return ["skipped: join: base and packs are not whole on this machine"]
        with headers_alone():
            done = self.work()
        self._check_languages(load_config(self.output))
        return [f"join: {done.summary}"]

    def _check_base(self, pack: Pack) -> None:
        """Refuses a pack that is no expansion of the recipe's base; a graft changes the base's tensors."""
        if any(stage.changes_everything for stage in pack.history.stages):
            return
        recipe = self.run.recipe
        base = StoredModel(recipe.base, revision=recipe.revision)
        for dense, key in sorted(pack.stored.base.items()):
            same = dense in base.shapes and base.shapes[dense] == pack.stored.shapes[key]
            if not same or not base[dense].same_bytes(pack.stored[key]):
                raise InputError(f"{pack.name}: is no expansion of `base`, {recipe.base}: tensor {dense!r} differs.")

    def _check_languages(self, config: Any) -> None:
        """Refuses text of languages that the packs do not have so, and a gate without text of each new one."""
        run, (old, new) = self.run, Facts(config).languages
        for kind, ours, theirs in (("old", run.old, old), ("new", run.new, new)):
            if wrong := [code for code in ours if code not in theirs]:
                raise InputError(
                    f"{kind}: {', '.join(wrong)}: the packs do not have it as {'an' if kind == 'old' else 'a'} {kind} "
                    f"language (old: {', '.join(old) or 'none'}; new: {', '.join(new)})."
                )
        if run.expansion.has("gates"):
            anchors_for(Facts(config).history.classes, [*run.old, *run.new], run.recipe.anchor_sources or None)

    def work(self) -> StepResult:
        settings = self.settings
        with errors_at("join.packs"):
            self._check_base(load_packs(settings.packs, self.output, overwrite=True)[0])
            report = join_expansions(
                settings.packs, self.output, max_shard_size=settings.max_shard_size, overwrite=True
            )
        return StepResult(_in_words(report.packs, report.experts_per_layer))


def _is_whole_folder(pack: str) -> bool:
    place = Path(pack_and_name(pack)[0])
    return place.is_dir() and not (place / RECORD).is_file()


def _in_words(packs: Sequence[str], experts_per_layer: Sequence[int]) -> str:
    return f"{', '.join(packs)}; experts per layer {' '.join(map(str, experts_per_layer))}"
