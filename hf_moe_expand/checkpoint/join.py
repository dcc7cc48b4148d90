"""Joins language packs: expansions of one base, made apart, become one model without training; and takes one out of
such a model. All is streamed."""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch

from ..core.errors import InputError
from ..core.schema import changed, checked
from ..modeling import LayerMoEConfig, count_layers
from .gate_file import GATE_FIELDS, Gate, stored_gate
from .local import pack_and_name
from .packs import (
    PACK_FILE,
    ROUTING,
    Pack,
    Rows,
    check_pack_name,
    check_packs,
    joined_routing,
    own_pack,
    packs_inside,
    stages_after_join,
)
from .reader import TORCH_DTYPES, is_finite
from .records import History, StageRecord
from .source import COMPANIONS
from .stored import StoredModel, network_of, places
from .writer import DEFAULT_SHARD_SIZE, OutputTensor, check_output, in_memory, write_checkpoint

_COMPANIONS = [pattern for pattern in COMPANIONS if pattern != PACK_FILE.format("*")]


@dataclass(frozen=True)
class JoinReport:
    """Result of `join_expansions`.

    Attributes:
        packs: the packs' names, in order.
        new_languages: the languages of each pack.
        old_languages: the base model's languages that any pack names.
        experts_per_layer: experts of each layer, expert 0 counted.
    """

    out: Path
    packs: list[str]
    new_languages: list[list[str]]
    old_languages: list[str]
    experts_per_layer: list[int]

    def lines(self) -> list[str]:
        """The lines that the command line prints."""
        packs = enumerate(zip(self.packs, self.new_languages, strict=True), start=1)
        lines = [f"pack {number}  {name}: {', '.join(codes)}" for number, (name, codes) in packs]
        lines.append(f"old languages      {', '.join(self.old_languages) or 'none'}")
        lines.append(f"experts per layer  {' '.join(map(str, self.experts_per_layer))}")
        return [*lines, f"wrote {self.out}"]


@checked
def join_expansions(
    packs: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    *,
    keep_both: bool = False,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> JoinReport:
    """Writes one model with the experts of several packs, expansions of one and the same base.

    Experts and the base's tensors stay byte for byte. The routers are joined by `packs.joined_rows`: expert 0's logit
    is their common zero. Classifiers become one with a class for each expansion of each pack;
    `join_calibrated` fits a gate that tells the packs apart. Each pack's own routers and configuration are kept beside
    the weights, for `leave_out_pack`.

    Args:
        packs: folders or hub ids of expanded checkpoints, whole or with only the tensors that the expansion added. A
            joined model counts as its packs. `NAME=FOLDER` names a pack; else the folder of its run does, or its own.
        out: folder to write; appears whole or not at all.
        keep_both: join packs that add one and the same language, which then has two classes: the later one counts.

    Raises:
        InputError: the packs do not fit together: of another base (the message names the first tensor that differs),
            the same twice, for one language, of DMoE, with another top-k, or with shared weights that were trained.
    """
    loaded = load_packs(packs, out, overwrite)
    check_packs(loaded, keep_both)
    if fitted := [pack.name for pack in loaded if pack.config.language_gate]:
        raise InputError(
            f"{', '.join(fitted)}: has a gate that was fitted for it alone: a join fits one anew, on text in each "
            "pack's languages (--calibrate LANGUAGE=FILE; `join: {calibrate: true}` in a recipe)."
        )
    return write_joined(loaded, out, max_shard_size=max_shard_size, overwrite=overwrite)


def load_packs(packs: Sequence[str | os.PathLike], out: str | os.PathLike, overwrite: bool) -> list[Pack]:
    """The packs in the checkpoints, in order."""
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
            later = [stage for stage in stages_after_join(stored.folder, stored.config) if stage.stage != "gates"]
            if later or len(History.of(stored.config)) > sum(stored.config.packs) or routers_changed(stored):
                raise InputError(
                    f"{stored.folder}: was trained or grown after its packs were joined"
                    f"{f' (`{later[0].stage}`)' if later else ''}: join the packs themselves, and do that afterwards."
                )
            loaded += packs_inside(stored)
        else:
            check_pack_name(name)  # it is published: a local folder's path is not
            loaded.append(own_pack(name, stored))
    return loaded


def routers_changed(stored: StoredModel) -> bool:
    """Whether the routers or classifiers of a joined checkpoint are not those that the join made. A gate is the join's
    own, which no pack knows, and takes the place of all classifiers."""
    gated = stored.config.language_gate is not None
    rows = joined_routing(packs_inside(stored))
    for key, place in stored.places.items():
        if place.inner in ROUTING[: 1 if gated else None]:
            today, made = stored.tensor(key), rows.get((place.layer, place.inner))
            if made is None or not torch.equal(made.to(today.dtype), today):
                return True
    return False


def write_joined(
    packs: Sequence[Pack],
    out: str | os.PathLike,
    *,
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    routing: Rows | None = None,
    stages: Sequence[StageRecord] = (),
    gate: Gate | None = None,
) -> JoinReport:
    """Writes the model that joins packs which fit together.

    Args:
        routing: the routers and classifiers, where they are not the packs' own.
        stages: steps after the join.
        gate: a language gate in place of the packs' classifiers.
    """
    config = joined_config(packs, gate)
    made = joined_routing(packs) if routing is None else {}
    made |= gate.rows if gate is not None else {}
    routing = (routing or {}) | {place: rows.to(_router_type(packs, place[0])) for place, rows in made.items()}
    outputs = _outputs(packs, config, routing)
    history = History.of(config)
    parameters = sum(tensor.numel for tensor in outputs)
    history.with_last(parameters=parameters, stages=[*history.last.stages, *stages]).write(config)
    files = {PACK_FILE.format(number): pack.to_keep() for number, pack in enumerate(packs, start=1)}
    companions = [(packs[0].stored.folder, _COMPANIONS)]
    write_checkpoint(out, config, outputs, companions, "join", max_shard_size, overwrite, files)
    return JoinReport(
        Path(out),
        [pack.name for pack in packs],
        [pack.new_languages for pack in packs],
        history.first.old_languages,
        config.num_experts_per_layer,
    )


def _router_type(packs: Sequence[Pack], layer: int) -> torch.dtype:
    """The type of the layer's routers or, where exclusive experts need none, of its experts."""
    routers = [pack.routing[layer, ROUTING[0]].dtype for pack in packs if (layer, ROUTING[0]) in pack.routing]
    experts = (pack.stored[key].dtype for pack in packs for own, *_, key in pack.experts if own == layer)
    return routers[0] if routers else next(TORCH_DTYPES[dtype] for dtype in experts if dtype in TORCH_DTYPES)


def joined_config(packs: Sequence[Pack], gate: Gate | None = None) -> Any:
    """The configuration of the joined model, with the packs' histories one after the other."""
    config: Any = copy.deepcopy(packs[0].config)
    cumulated = [1] * count_layers(config)
    history, records = [], []
    new = {code for pack in packs for code in pack.new_languages}
    old = list(dict.fromkeys(code for pack in packs for code in pack.history.first.old_languages if code not in new))
    classifiers = sorted({layer for pack in packs for layer in pack.config.classifier_layers})
    known = list(old)
    for pack in packs:
        before = cumulated
        steps = [*(pack.config.earlier_experts_per_layer or []), pack.config.num_experts_per_layer]
        for counts, record in zip(steps, pack.history.expansions, strict=True):
            cumulated = [a + b - 1 for a, b in zip(before, counts, strict=True)]
            history.append(cumulated)
            # What an expansion added is its own, the totals are the joined model's.
            records.append(
                changed(
                    record, pack=pack.name, old_languages=list(known), experts_per_layer=cumulated,
                    classifier_layers=classifiers, parameters=None,
                    router_scale=None if pack.scale == 1 else pack.scale,
                )
            )  # fmt: skip
            known += [code for code in record.new_languages if code not in known]
    config.num_experts_per_layer = history[-1]
    config.earlier_experts_per_layer = history[:-1] or None
    config.packs = [pack.expansions for pack in packs]
    config.classifier_layers = classifiers
    config.language_gate = None
    if gate is not None:
        gate.set_in(config)
        facts = {name: getattr(config, name) for name in GATE_FIELDS}
        records = [changed(record, **facts) for record in records]
    kinds = [pack.kind for pack in packs]
    if config.expert_kind == "adapter":
        config.adapters = [adapter for pack in packs for adapter in pack.config.adapters]
    elif any(kind != kinds[0] for kind in kinds):
        for name in kinds[0].names:
            setattr(config, name, None)
        config.expert_kind = "ffn"
        config.updates_of_packs = [kind.settings for kind in kinds]
    History(records).write(config)
    return config


def _outputs(packs: Sequence[Pack], config: Any, routing: Rows) -> list[OutputTensor]:
    base, first = packs[0].base, packs[0].stored
    experts: dict[tuple[int, str], OutputTensor] = {}
    before = [0] * count_layers(config)
    for pack in packs:
        for layer, own, rest, key in pack.experts:
            experts[layer, f"experts.{before[layer] + own}.{rest}"] = pack.stored.copied(key)
        before = [count + own - 1 for count, own in zip(before, pack.config.num_experts_per_layer, strict=True)]
    outputs = []
    for key, place in places(network_of(config)).items():
        if place.is_routing:
            rows = routing[place.layer, place.inner]
            tensor = in_memory(key, rows)
            if not is_finite(rows):
                raise InputError(f"{key}: the joined values are not finite in {tensor.dtype}.")
            outputs.append(tensor)
        elif place.expert:
            outputs.append(replace(experts[place.layer, place.inner], name=key))
        elif place.dense in base:
            source = base[place.dense]
            # A shared tensor keeps its name in the files; an FFN that becomes expert 0 gets its new one.
            outputs += first.copies(source, None if source == key else key)
    return outputs


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


@checked
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
    later = stages_after_join(stored.folder, stored.config)
    if stage := next((stage.stage for stage in later if stage.changes_everything), None):
        raise InputError(
            f"{stored.folder}: `{stage}` changed the shared weights after the join: leaving a pack out would not "
            "restore them. Take it out of the checkpoint from before that stage."
        )
    packs = packs_inside(stored)
    gone = _find(packs, pack)
    left = [one for one in packs if one is not gone]
    if len(History.of(stored.config)) > sum(stored.config.packs):
        raise InputError(f"{stored.folder}: was grown after its packs were joined: `shrink --to` the join first.")
    if not left:
        raise InputError(f"{stored.folder}: {gone.name} is its only pack; without it, it is the base model.")
    gate = stored_gate(stored)
    if gate is not None:
        first = 1 + sum(one.expansions for one in packs[: packs.index(gone)])
        gate = gate.without_classes(range(first, first + gone.expansions))
    trained = bool(later) or routers_changed(stored)
    if trained or len(left) > 1:
        routing = _trained_rows(stored, packs, left, gate is not None) if trained else None
        write_joined(
            left, out, max_shard_size=max_shard_size, overwrite=overwrite, routing=routing, stages=later, gate=gate
        )
    else:  # the one pack that is left, as it was
        alone = left[0]
        outputs = _outputs(left, alone.config, alone.routing)
        companions, files = [(stored.folder, _COMPANIONS)], {"config.json": alone.config_text.encode()}
        write_checkpoint(out, alone.config, outputs, companions, "shrink", max_shard_size, overwrite, files)
    return LeaveOutReport(Path(out), [pack.name for pack in left], not trained)


def _find(packs: Sequence[Pack], wanted: str) -> Pack:
    named = [pack for pack in packs if pack.name == wanted]
    named = named or [pack for pack in packs if wanted in pack.new_languages]
    if len(named) != 1:
        known = "; ".join(f"{pack.name} ({', '.join(pack.new_languages)})" for pack in packs)
        problem = "several packs have it" if named else "no pack has this name or language"
        raise InputError(f"{wanted!r}: {problem}; the model joins {known}.")
    return named[0]


def _trained_rows(stored: StoredModel, packs: Sequence[Pack], left: Sequence[Pack], gated: bool) -> Rows:
    """A joined model's trained routers and, unless fitted gates take their place (`gated`), classifiers: the rows that
    belong to the packs which stay."""
    ends = zip(packs, accumulate(pack.expansions for pack in packs), strict=True)
    classes = [0, *chain.from_iterable(range(end - pack.expansions + 1, end + 1) for pack, end in ends if pack in left)]
    rows = {}
    for key, place in stored.places.items():
        where = place.layer, place.inner
        if place.inner not in ROUTING[: 1 if gated else 2] or not any(where in pack.routing for pack in left):
            continue
        chosen = classes
        if place.inner == ROUTING[0]:
            firsts = [(pack.before[place.layer] + 1, pack.config.num_experts_per_layer[place.layer]) for pack in left]
            chosen = [0, *chain.from_iterable(range(first, first + count - 1) for first, count in firsts)]
        rows[where] = stored.tensor(key)[chosen]
    return rows
