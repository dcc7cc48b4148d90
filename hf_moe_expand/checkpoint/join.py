"""Joins language packs: expansions of one base, made apart, become one model without training; streamed."""

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..modeling import LayerMoEConfig, count_layers
from ..records import ExpansionRecord, History, StageRecord
from ..schema import changed
from .folder import write_checkpoint
from .gates import GATE_FIELDS, Gates, gate_tensors, set_gates
from .local import pack_and_name
from .packs import PACK_FILE, ROUTING, Pack, check_pack_name, check_packs, own_pack, packs_inside, routing_of
from .reader import TORCH_DTYPES, is_finite
from .source import COMPANIONS
from .stored import StoredModel, network_of, places
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, in_memory

# The rows of a layer's router and classifier, by inner name.
Routing = Callable[[int], Mapping[str, torch.Tensor]]
_TYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class JoinReport:
    """Result of `join_expansions`.

    Attributes:
        packs: the packs' names, in order.
        new_languages: the languages of each pack.
        old_languages: the base model's languages that any pack names.
        experts_per_layer: experts of each layer, expert 0 counted.
        scales: factor of each pack's router, from the calibration; 1 without one.
    """

    out: Path
    packs: list[str]
    new_languages: list[list[str]]
    old_languages: list[str]
    experts_per_layer: list[int]
    scales: list[float]

    def lines(self) -> list[str]:
        """The lines that the command line prints."""
        lines = [
            f"pack {number}  {name}: {', '.join(codes)}" + (f" (router x {scale:g})" if scale != 1 else "")
            for number, (name, codes, scale) in enumerate(
                zip(self.packs, self.new_languages, self.scales, strict=True), start=1
            )
        ]
        lines.append(f"old languages      {', '.join(self.old_languages) or 'none'}")
        lines.append(f"experts per layer  {' '.join(map(str, self.experts_per_layer))}")
        return [*lines, f"wrote {self.out}"]


def join_expansions(
    packs: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    *,
    keep_both: bool = False,
    scales: Sequence[float] | None = None,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> JoinReport:
    """Writes one model with the experts of several packs, expansions of one and the same base.

    Experts and the base's tensors stay byte for byte. The routers are joined by `packs.joined_rows`: expert 0's logit
    is their common zero. Classifiers and two-class gates become one with a class for each expansion of each pack;
    `join_calibrated` fits gates that tell the packs apart. Each
    pack's own routers and configuration are kept beside the weights, for `leave_out_pack`.

    Args:
        packs: folders or hub ids of expanded checkpoints, whole or with only the tensors that the expansion added. A
            joined model counts as its packs. `NAME=FOLDER` names a pack; else the folder of its run does, or its own.
        out: folder to write; appears whole or not at all.
        keep_both: join packs that add one and the same language, which then has two classes: the later one counts.
        scales: factor of each pack's router (`calibrate_join` finds them); 1 by default.

    Raises:
        InputError: the packs do not fit together: of another base (the message names the first tensor that differs),
            the same twice, for one language, of DMoE, with another top-k, with shared weights that were trained; or
            `scales` are not one positive number for each pack.
    """
    loaded = load_packs(packs, out, overwrite)
    check_packs(loaded, keep_both)
    scales = [pack.scale for pack in loaded] if scales is None else list(scales)
    if len(scales) != len(loaded) or not all(0 < scale < float("inf") for scale in scales):
        raise InputError(f"scales is {scales}: must be a positive number for each of {len(loaded)} packs.")
    check_ungated(loaded)
    loaded = [replace(pack, scale=scale) for pack, scale in zip(loaded, scales, strict=True)]
    return write_joined(loaded, out, max_shard_size=max_shard_size, overwrite=overwrite)


def check_ungated(packs: Sequence[Pack]) -> None:
    """Refuses packs with fitted gates, which know one pack's languages alone.

    Raises:
        InputError: a pack has some.
    """
    if fitted := [pack.name for pack in packs if pack.config.gate_languages]:
        raise InputError(
            f"{', '.join(fitted)}: has gates that were fitted for it alone: a join fits them anew, on text in each "
            "pack's languages (--calibrate LANGUAGE=FILE; `join: {calibrate: true}` in a recipe)."
        )


def load_packs(packs: Sequence[str | os.PathLike], out: str | os.PathLike, overwrite: bool) -> list[Pack]:
    """The packs in the checkpoints, in order.

    Raises:
        InputError: a checkpoint is not an expanded one of LayerMoE, or a joined one that was trained afterwards; there
            are fewer than two; or `out` is one of them.
    """
    if len(packs) < 2:
        raise InputError("A join needs two or more packs.")
    loaded: list[Pack] = []
    for pack in packs:
        place, name = pack_and_name(pack)
        stored = StoredModel(place)
        check_output(out, overwrite, stored.folder)
        if not isinstance(stored.config, LayerMoEConfig):
            kind = stored.config.model_type
            why = "nothing of a DMoE's base is frozen" if kind == "dmoe" else "it is not an expanded checkpoint"
            raise InputError(f"{pack}: is a {kind} checkpoint, which is no language pack: {why}.")
        if stored.config.packs:
            if str(pack) != place:
                raise InputError(f"{pack}: joins packs already, which keep their names: give it without a name.")
            loaded += _packs_of_joined(stored)
        else:
            check_pack_name(name)  # it is published: a local folder's path is not
            loaded.append(own_pack(name, stored))
    return loaded


def _packs_of_joined(stored: StoredModel) -> list[Pack]:
    if routers_changed(stored) or len(History.of(stored.config)) > sum(stored.config.packs):
        raise InputError(
            f"{stored.folder}: was trained or grown after its packs were joined: join the packs themselves, and train "
            "afterwards."
        )
    return packs_inside(stored)


def routers_changed(stored: StoredModel) -> bool:
    """Whether the routers or classifiers of a joined checkpoint are not those that the join made. Gates that were
    fitted are the join's own, which no pack knows."""
    packs, gated = packs_inside(stored), stored.config.gate_languages is not None
    for key, place in places(stored.network).items():
        if place.inner in ROUTING[: 1 if gated else None]:
            today = stored.reader.tensor(stored.home(key))
            dtype = stored.reader.tensors[stored.home(key)].dtype
            made = routing_of(packs, place.layer, dtype, gated).get(place.inner)
            if made is None or made.shape != today.shape or not bool((made == today).all()):
                return True
    return False


def write_joined(
    packs: Sequence[Pack],
    out: str | os.PathLike,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    routing: Routing | None = None,
    stages: Sequence[StageRecord] = (),
    gates: Gates | None = None,
) -> JoinReport:
    """Writes the model that joins packs which fit together.

    Args:
        routing: rows of the routers and classifiers, where they are not the packs' own.
        stages: steps after the join.
        gates: fitted gates in place of the packs' classifiers.
    """
    config = joined_config(packs, gates)
    outputs = _outputs(packs, config, routing, gates)
    *earlier, last = History.of(config).expansions
    parameters = sum(tensor.numel for tensor in outputs)
    History([*earlier, changed(last, parameters=parameters, stages=[*last.stages, *stages])]).write(config)
    pack_files = {PACK_FILE.format(number): pack.to_keep() for number, pack in enumerate(packs, start=1)}
    companions = [pattern for pattern in COMPANIONS if pattern != PACK_FILE.format("*")]
    write_checkpoint(
        out, config, outputs, [(packs[0].stored.folder, companions)], "join", files=pack_files,
        max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip
    return JoinReport(
        Path(out),
        [pack.name for pack in packs],
        [pack.new_languages for pack in packs],
        History.of(config).first.old_languages,
        config.num_experts_per_layer,
        [pack.scale for pack in packs],
    )


def joined_config(packs: Sequence[Pack], gates: Gates | None = None) -> Any:
    """The configuration of the joined model, with the packs' histories one after the other."""
    config: Any = copy.deepcopy(packs[0].config)
    layers = range(count_layers(config))
    cumulated = [1] * count_layers(config)
    history, records = [], []
    new = {code for pack in packs for code in pack.new_languages}
    old = list(dict.fromkeys(code for pack in packs for code in pack.history.first.old_languages if code not in new))
    classifiers = sorted({layer for pack in packs for layer in pack.config.classifier_layers})
    known = list(old)
    for pack in packs:
        before = cumulated
        for counts, record in zip(pack.counts, pack.history.expansions, strict=True):
            cumulated = [before[layer] + counts[layer] - 1 for layer in layers]
            history.append(cumulated)
            records.append(_joined_record(record, pack, cumulated, classifiers, list(known)))
            known += [code for code in record.new_languages if code not in known]
    config.num_experts_per_layer = history[-1]
    config.earlier_experts_per_layer = history[:-1] or None
    config.packs = [pack.expansions for pack in packs]
    config.classifier_layers = classifiers
    config.prefix_gate = next((pack.config.prefix_gate for pack in packs if pack.config.classifier_layers), None)
    config.gate_languages = None
    if gates is not None:
        set_gates(config, gates)
        facts = {name: getattr(config, name) for name in GATE_FIELDS}
        records = [changed(record, **facts) for record in records]
    kinds = [pack.kind for pack in packs]
    if any(kind != kinds[0] for kind in kinds):
        for name in kinds[0].names:
            setattr(config, name, None)
        config.expert_kind = "ffn"
        config.updates_of_packs = [kind.settings for kind in kinds]
    History(records).write(config)
    return config


def _joined_record(
    record: ExpansionRecord, pack: Pack, counts: list[int], classifiers: list[int], known: list[str]
) -> ExpansionRecord:
    """An expansion of a pack as one of the joined model: what it added is its own, the totals are the model's."""
    return changed(
        record, pack=pack.name, old_languages=known, experts_per_layer=counts, classifier_layers=classifiers,
        parameters=None, router_scale=None if pack.scale == 1 else pack.scale,
    )  # fmt: skip


def _outputs(packs: Sequence[Pack], config: Any, routing: Routing | None, gates: Gates | None) -> list[OutputTensor]:
    network = network_of(config)
    where = places(network)
    base, first = packs[0].base, packs[0].stored
    keys = {(place.layer, place.inner): key for key, place in where.items() if place.layer >= 0}
    outputs = []
    for key, place in where.items():
        if place.dense in base and place.expert in (None, 0):
            source = base[place.dense]
            # A shared tensor keeps its name in the files; an FFN that becomes expert 0 gets its new one.
            outputs += first.copies(source, None if source == key else key)
    before = [0] * count_layers(config)
    for pack in packs:
        for layer, own, rest, key in pack.experts:
            outputs.append(pack.stored.copied(key, keys[layer, f"experts.{before[layer] + own}.{rest}"]))
        before = [count + own - 1 for count, own in zip(before, pack.config.num_experts_per_layer, strict=True)]
    for layer in range(count_layers(config)):
        outputs += _routing_outputs(packs, layer, keys, routing, gates)
    return outputs


def _routing_outputs(
    packs: Sequence[Pack],
    layer: int,
    keys: Mapping[tuple[int, str], str],
    routing: Routing | None,
    gates: Gates | None,
) -> Iterable[OutputTensor]:
    routed = next((pack for pack in packs if (layer, ROUTING[0]) in pack.routing), None)
    if routed is None:
        return
    dtype = _TYPES[routed.routing[layer, ROUTING[0]].dtype]
    made = dict(routing_of(packs, layer, dtype, gates is not None) if routing is None else routing(layer))
    if gates is not None and layer in gates.rows:
        made |= gate_tensors(gates, layer, dtype)
    for inner, rows in made.items():
        if not is_finite(rows):
            raise InputError(
                f"{keys[layer, inner]}: the joined values are not finite in {dtype}: a factor is too large."
            )
        yield in_memory(keys[layer, inner], rows)
