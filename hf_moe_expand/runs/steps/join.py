"""The step that joins language packs, in place of a plan, an expansion and stage 1."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...analysis.calibration import OF_CALIBRATION, check_calibrated, first_tokens, join_calibrated
from ...analysis.gating import check_languages
from ...analysis.settings import GateSettings
from ...checkpoint.join import join_expansions, joined_config, load_packs
from ...checkpoint.local import pack_and_name
from ...checkpoint.packs import Pack, check_packs
from ...checkpoint.reader import CheckpointReader
from ...checkpoint.records import History
from ...checkpoint.settings import JoinSettings
from ...checkpoint.source import resolve_checkpoint
from ...checkpoint.stored import StoredModel, network_of
from ...checkpoint.writer import check_shard_size
from ...core.disk import StepOutput
from ...core.errors import InputError, errors_at
from ...inference.models import check_decoder, load_tokenizer
from ...modeling.expansion_only import RECORD
from ...stages.config import languages_of
from ...stages.kinds.gates import check_text
from ...stages.outlook import Found, Outlook, StepResult
from .base import RunStep


@dataclass
class JoinPacks(RunStep):
    """Writes the model that joins the packs."""

    title, writes = "join", "joined"
    settings: JoinSettings

    @property
    def _given(self) -> list[str]:
        """The languages with training text."""
        return [*self.run.old, *self.run.new]

    def inputs(self) -> dict[str, Any]:
        folders = [resolve_checkpoint(pack_and_name(pack)[0]) for pack in self.settings.packs]
        inputs = {"join": self.settings.model_dump(), "packs": [CheckpointReader(it).fingerprint() for it in folders]}
        return inputs | ({"texts": self.run.contents(self._given)} if self.settings.calibrate else {})

    def check(self, outlook: Outlook) -> Found:
        """Checks all but the bytes of the packs' bases, which `work` compares."""
        settings = self.settings
        with errors_at("join"):
            check_shard_size(settings.max_shard_size)
        if outlook.offline and (outlook.config is None or not all(map(_is_whole_folder, settings.packs))):
            return Found(outlook, ["skipped: join: base and packs are not whole on this machine"])
        with errors_at("join.packs"):
            packs = load_packs(settings.packs, self.output, overwrite=True)
            check_packs(packs, settings.keep_both, bytes_too=False)
            self._check_base(packs[0], contents=False)
        config = joined_config(packs)
        self._check_text(packs, config, outlook)
        outlook = replace(outlook, network=network_of(config))
        line = f"join: {_in_words([pack.name for pack in packs], config.num_experts_per_layer)}"
        return Found(outlook, [line], [StepOutput(self.output, outlook.checkpoint_bytes)])

    def _check_base(self, pack: Pack, contents: bool) -> None:
        """Refuses a pack that is no expansion of the recipe's base; a graft changes the base's tensors."""
        if any(stage.changes_everything for stage in pack.history.stages):
            return
        recipe = self.run.recipe
        base = StoredModel(recipe.base, revision=recipe.revision)
        for dense, key in sorted(pack.base.items()):
            same = dense in base.shapes and base.shapes[dense] == pack.stored.shapes[key]
            if not same or (contents and not base[dense].same_bytes(pack.stored[key])):
                raise InputError(f"{pack.name}: is no expansion of `base`, {recipe.base}: tensor {dense!r} differs.")

    def _check_text(self, packs: Sequence[Pack], config: Any, outlook: Outlook) -> None:
        old, new = languages_of(config)
        for kind, ours, theirs in (("old", self.run.old, old), ("new", self.run.new, new)):
            if wrong := [code for code in ours if code not in theirs]:
                raise InputError(
                    f"{kind}: {', '.join(wrong)}: the packs do not have it as {'an' if kind == 'old' else 'a'} {kind} "
                    f"language (old: {', '.join(old) or 'none'}; new: {', '.join(new)})."
                )
        reviewed = self.run.expansion.has("review")
        if reviewed and (missing := [code for code in (*old, *new) if code not in self._given]):
            raise InputError(f"review: {', '.join(missing)}: needs text of every language of the packs; give some.")
        if not self.settings.calibrate:
            return
        with errors_at("join.calibrate"):
            check_decoder(config, self.run.recipe.base, OF_CALIBRATION)
        with errors_at("join"):
            check_calibrated(self._given, History.of(config), self.settings.tokens)
            anchors = self.run.recipe.anchor_sources
            check_languages(History.of(config).classes, self._given, anchors or None)
            check_text(anchors, GateSettings().anchor_tokens, outlook)
        tokenizer = None if outlook.offline else load_tokenizer(packs[0].stored.folder, packs[0].name)
        for code in self._given:
            source = self.run.sources[code]
            if tokenizer is not None and source.files():
                first_tokens(code, source.documents(), tokenizer, self.settings.tokens)

    def work(self) -> StepResult:
        settings, recipe = self.settings, self.run.recipe
        options: dict[str, Any] = {
            "keep_both": settings.keep_both, "max_shard_size": settings.max_shard_size, "overwrite": True
        }  # fmt: skip
        with errors_at("join.packs"):
            self._check_base(load_packs(settings.packs, self.output, overwrite=True)[0], contents=True)
        if not settings.calibrate:
            report = join_expansions(settings.packs, self.output, **options)
            return StepResult(_in_words(report.packs, report.experts_per_layer))
        report, calibration = join_calibrated(
            settings.packs,
            self.output,
            {code: self.run.sources[code].load().shuffle(seed=recipe.seed)["text"] for code in self._given},
            tokens=settings.tokens,
            anchors={code: source.load()["text"] for code, source in recipe.anchor_sources.items()} or None,
            **options,
        )
        facts = {"before": calibration.before, "after": calibration.after}
        return StepResult(_in_words(report.packs, report.experts_per_layer), facts)


def _is_whole_folder(pack: str) -> bool:
    place = Path(pack_and_name(pack)[0])
    return place.is_dir() and not (place / RECORD).is_file()


def _in_words(packs: Sequence[str], experts_per_layer: Sequence[int]) -> str:
    return f"{', '.join(packs)}; experts per layer {' '.join(map(str, experts_per_layer))}"
