"""Takes a language pack out of a joined model; streamed."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import InputError
from ..records import History, StageRecord
from .folder import write_checkpoint
from .gates import Gates, stored_gates, without_classes
from .join import Routing, routers_changed, write_joined
from .packs import PACK_FILE, ROUTING, Pack, packs_inside
from .source import COMPANIONS
from .stored import StoredModel, network_of, places
from .writer import DEFAULT_SHARD_SIZE, check_output, in_memory


@dataclass(frozen=True)
class LeaveOutReport:
    """Result of `leave_out_pack`.

    Attributes:
        left: names of the packs that stay.
        restored: whether their routers are the bytes that they were before the pack came; else the joined model's
            routers were trained, and their rows stay as they are.
    """

    out: Path
    left: list[str]
    restored: bool


def leave_out_pack(
    model: str | os.PathLike,
    out: str | os.PathLike,
    pack: str,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> LeaveOutReport:
    """Writes a joined checkpoint without one of its packs.

    All other tensors stay byte for byte. If nothing trained the joined routers, the result is what a join of the other
    packs writes, or the one pack that is left, as it was.

    Args:
        pack: name of the pack, or one of its languages.

    Raises:
        InputError: the checkpoint joins no packs, it has no such pack or several, or it was grown after the join.
    """
    stored = StoredModel(model)
    check_output(out, overwrite, stored.folder)
    packs = packs_inside(stored)
    gone = _find(packs, pack)
    left = [one for one in packs if one is not gone]
    history = History.of(stored.config)
    if len(history) > sum(stored.config.packs):
        raise InputError(f"{stored.folder}: was grown after its packs were joined: `shrink --to` the join first.")
    if not left:
        raise InputError(f"{stored.folder}: {gone.name} is its only pack; without it, it is the base model.")
    later = history.last.stages[len(packs[-1].history.last.stages) :]
    names = [one.name for one in left]
    gates = stored_gates(stored)
    if gates is not None:
        first = 1 + sum(one.expansions for one in packs[: packs.index(gone)])
        gates = without_classes(gates, range(first, first + gone.expansions))
    if later or routers_changed(stored):
        _write_trained(stored, packs, left, later, out, max_shard_size, overwrite, gates)
        return LeaveOutReport(Path(out), names, False)
    if len(left) > 1:
        write_joined(left, out, max_shard_size=max_shard_size, overwrite=overwrite, gates=gates)
    else:
        _write_alone(left[0], out, max_shard_size, overwrite)
    return LeaveOutReport(Path(out), names, True)


def _find(packs: Sequence[Pack], wanted: str) -> Pack:
    named = [pack for pack in packs if pack.name == wanted]
    named = named or [pack for pack in packs if wanted in pack.new_languages]
    if len(named) != 1:
        known = "; ".join(f"{pack.name} ({', '.join(pack.new_languages)})" for pack in packs)
        problem = "several packs have it" if named else "no pack has this name or language"
        raise InputError(f"{wanted!r}: {problem}; the model joins {known}.")
    return named[0]


def _write_alone(pack: Pack, out: str | os.PathLike, max_shard_size: str | int, overwrite: bool) -> None:
    """Writes a pack as it was."""
    stored, where = pack.stored, places(network_of(pack.config))
    keys = {(place.layer, place.inner): key for key, place in where.items() if place.layer >= 0}
    outputs = []
    for key, place in where.items():
        if place.dense in pack.base and place.expert in (None, 0):
            source = pack.base[place.dense]
            outputs += stored.copies(source, None if source == key else key)
    for layer, number, rest, key in pack.experts:
        outputs.append(stored.copied(key, keys[layer, f"experts.{number}.{rest}"]))
    for (layer, inner), tensor in pack.routing.items():
        outputs.append(in_memory(keys[layer, inner], tensor))
    companions = [pattern for pattern in COMPANIONS if pattern != PACK_FILE.format("*")]
    write_checkpoint(
        out, pack.config, outputs, [(stored.folder, companions)], "shrink",
        files={"config.json": pack.config_text.encode()}, max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip


def _write_trained(
    stored: StoredModel,
    packs: Sequence[Pack],
    left: Sequence[Pack],
    later: Sequence[StageRecord],
    out: str | os.PathLike,
    max_shard_size: str | int,
    overwrite: bool,
    gates: Gates | None,
) -> None:
    """Writes the packs that stay with their rows of the trained routers."""
    if stage := next((stage.stage for stage in later if stage.changes_everything), None):
        raise InputError(
            f"{stored.folder}: `{stage}` changed the shared weights after the join: leaving a pack out would not "
            "restore them. Take it out of the checkpoint from before that stage."
        )
    keys = {(place.layer, place.inner): key for key, place in left[0].places.items()}

    def routing(layer: int) -> dict[str, torch.Tensor]:
        experts, classes = [0], [0]
        next_expert = next_class = 1
        for pack in packs:
            own = pack.config.num_experts_per_layer[layer] - 1
            if pack in left:
                experts += range(next_expert, next_expert + own)
                classes += range(next_class, next_class + pack.expansions)
            next_expert, next_class = next_expert + own, next_class + pack.expansions
        rows = dict(zip(ROUTING, (experts, classes), strict=False))
        known = rows if gates is None else ROUTING[:1]
        in_use = [inner for inner in known if any((layer, inner) in pack.routing for pack in left)]
        return {inner: stored.reader.tensor(stored.home(keys[layer, inner]))[rows[inner]] for inner in in_use}

    made: Routing = routing
    write_joined(left, out, max_shard_size=max_shard_size, overwrite=overwrite, routing=made, stages=later, gates=gates)
