"""Joins language packs: expansions of one base with exclusive experts, made apart, become one model without training.
All is streamed."""

import copy
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import torch

from ..core.errors import InputError, errors_at
from ..core.languages import same_language
from ..core.schema import changed, checked
from ..modeling import LayerMoEConfig, count_layers
from .compare import differing_tensor
from .facts import Facts, set_kinds, set_part
from .reader import StoredTensor
from .records import History
from .source import differences, load_expanded_config, pack_and_name
from .stored import Place, StoredModel
from .table import Copy, New, Rule, rewrite
from .writer import DEFAULT_SHARD_SIZE, check_output

# Fields of a configuration in which packs may differ: those that the join computes, and those that computation ignores.
_MAY_DIFFER = (
    "num_experts_per_layer", "earlier_experts_per_layer", "classifier_layers", "expansions", "parts",
    "architectures", "auto_map", "transformers_version", "_name_or_path", "use_cache",
)  # fmt: skip
# Why a checkpoint is no language pack.
REFUSED = {
    ("dmoe", "joined"): "nothing of a DMoE's base is frozen",
    ("routed", "joined"): "its routers choose among all experts, and a language pack has exclusive ones",
}


@dataclass(frozen=True)
class Pack:
    """A pack, which is an expanded checkpoint: one expansion, or several that were joined or grown. Its name is the
    last part of its folder or hub id, or the name that the user gives (`is_named`)."""

    name: str
    stored: StoredModel
    is_named: bool = False

    @cached_property
    def facts(self) -> Facts:
        return Facts(self.stored.config)

    @property
    def new_languages(self) -> list[str]:
        return list(dict.fromkeys(code for codes in self.facts.history.by_expansion[1:] for code in codes))

    @property
    def names(self) -> list[str]:
        """The name of each of its expansions: that of the pack which brought it, or its own."""
        records = self.facts.history.expansions
        return [self.name if self.is_named else record.pack or self.name for record in records]


@dataclass(frozen=True)
class JoinReport:
    """Result of `join_expansions`: the packs in order, the languages that each adds, the base's languages that any pack
    names, and the experts of each layer, expert 0 counted."""

    out: Path
    packs: list[str]
    new_languages: list[list[str]]
    old_languages: list[str]
    experts_per_layer: list[int]

    def lines(self) -> list[str]:
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
    max_shard_size: str | int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> JoinReport:
    """Writes one model with the experts of several packs, expansions of one and the same base.

    Experts, their routers and the base's tensors stay byte for byte. The model has a class for each expansion of each
    pack, and no gate: `fit_gates` fits one that tells the packs apart.

    Args:
        packs: folders or hub ids of expanded checkpoints, whole or with only the tensors that the expansion added. A
            joined model counts as its packs. `NAME=FOLDER` names a pack; else the folder of its run does, or its own.

    Raises:
        InputError: the packs do not fit together: of another base (the message names the first tensor that differs),
            for one language, with experts that are not exclusive, or with shared weights that were trained.
    """
    loaded = load_packs(packs, out, overwrite)
    _check_packs(loaded)
    config = _joined_config(loaded)
    rewrite(
        [pack.stored for pack in loaded], config, _joined(loaded), out, record=History.of(config),
        title="join", max_shard_size=max_shard_size, overwrite=overwrite,
    )  # fmt: skip
    history = History.of(config)
    named: dict[str, list[str]] = {}
    for record in history.expansions:
        named.setdefault(record.pack or "", []).extend(record.new_languages)
    return JoinReport(
        Path(out), list(named), list(named.values()), history.first.old_languages, config.num_experts_per_layer
    )


def load_packs(packs: Sequence[str | os.PathLike], out: str | os.PathLike, overwrite: bool) -> list[Pack]:
    """The packs, in order; refuses a checkpoint that is none."""
    if len(packs) < 2:
        raise InputError("A join needs two or more packs.")
    loaded: list[Pack] = []
    for pack in packs:
        place, name = pack_and_name(pack)
        stored = StoredModel(place, load=load_expanded_config)
        check_output(out, overwrite, stored.folder)
        with errors_at(str(pack)):
            if not isinstance(stored.config, LayerMoEConfig):
                raise InputError(f"{REFUSED['dmoe', 'joined']}.")
            if not stored.config.exclusive_experts:
                raise InputError(f"{REFUSED['routed', 'joined']}: expand the base by a plan with `exclusive`.")
            if len(stored.config.packs or []) > 1 and str(pack) != place:
                raise InputError("joins packs already, which keep their names: give it without a name.")
            # It is published.
            if not name.strip() or len(name) > 200 or not name.isprintable():
                raise InputError("a pack's name must be of 1 to 200 printable characters.")
        loaded.append(Pack(name, stored, str(pack) != place))
    return loaded


def _check_packs(packs: Sequence[Pack]) -> None:
    first, *others = packs
    if len({any(stage.stage == "graft" for stage in pack.facts.history.stages) for pack in packs}) > 1:
        raise InputError("some packs got a graft, and some did not: join them first and graft the joined model.")
    for pack in packs:
        if stage := pack.facts.history.trained_base:
            raise InputError(f"{pack.name}: `{stage}` trained the base inside, which the other packs do not share.")
    for pack in others:
        kinds = {one.facts.kinds[0].name for one in (first, pack)}
        if len(kinds) > 1 and kinds & {"added", "adapter"}:
            raise InputError(f"{first.name}, {pack.name}: added experts and adapters are joined with their own kind.")
        for name, ours, theirs in differences(first.stored.config, pack.stored.config, _MAY_DIFFER):
            raise InputError(f"{name} is {ours!r} in {first.name}, but {theirs!r} in {pack.name}.")
    for pack, other in combinations(packs, 2):
        if twice := [code for code in other.new_languages if any(same_language(code, c) for c in pack.new_languages)]:
            raise InputError(f"{', '.join(sorted(twice))}: {pack.name} and {other.name} both add it: leave one out.")
    names = [name for pack in packs for name in dict.fromkeys(pack.names)]
    for name in {name for name in names if names.count(name) > 1}:
        raise InputError(f"{name}: two packs have this name: name one, NAME=FOLDER.")
    for pack in others:
        if (dense := differing_tensor(first.stored, pack.stored)) is not None:
            raise InputError(f"{pack.name}: is no expansion of the base of {first.name}: tensor {dense!r} differs.")


def _joined_config(packs: Sequence[Pack]) -> Any:
    config: Any = copy.deepcopy(packs[0].stored.config)
    cumulated = [1] * count_layers(config)
    counts, records = [], []
    new = {code for pack in packs for code in pack.new_languages}
    firsts = [pack.facts.history.first for pack in packs]
    known = list(dict.fromkeys(code for record in firsts for code in record.old_languages if code not in new))
    for pack in packs:
        before, own = cumulated, pack.stored.config.counts_of_expansions
        for after, record, name in zip(own, pack.facts.history.expansions, pack.names, strict=True):
            cumulated = [a + b - 1 for a, b in zip(before, after, strict=True)]
            counts.append(cumulated)
            # What an expansion added is its own, the totals are the joined model's.
            records.append(
                changed(
                    record, pack=name, old_languages=list(known), experts_per_layer=cumulated, classifier_layers=[],
                    language_gate=None, parameters=None,
                )
            )  # fmt: skip
            known += [code for code in record.new_languages if code not in known]
    config.num_experts_per_layer, config.earlier_experts_per_layer = counts[-1], counts[:-1] or None
    set_part(config, "joined", [size for pack in packs for size in pack.facts.sizes])
    config.classifier_layers = []  # they, and a gate, know nothing of the other packs' languages
    set_part(config, "gate", None)
    set_kinds(config, [kind for pack in packs for kind in pack.facts.kinds])
    History(records).write(config)
    return config


def _joined(packs: Sequence[Pack]) -> Rule:
    base = packs[0].stored.base

    def rule(place: Place) -> Copy | New | None:
        if not place.expert and not place.is_routing:
            return Copy(base[place.dense]) if place.dense in base else None
        added = [pack.facts.counts[place.layer] - 1 for pack in packs]
        if place.is_routing:
            routers = [pack.stored[place.key] if place.key in pack.stored.shapes else None for pack in packs]
            like = next(router for router in routers if router is not None)
            return New(partial(_joined_router, added, routers), like.dtype)
        # A language's modules outside the layers have the number of its class.
        ends = [*accumulate(added if place.layer >= 0 else [len(pack.facts.history) for pack in packs])]
        number = bisect_left(ends, place.expert)  # type: ignore[type-var]
        return Copy(place.of_expert(place.expert - [0, *ends][number]), number)  # type: ignore[operator]

    return rule


def _joined_router(added: Sequence[int], routers: Sequence[StoredTensor | None]) -> torch.Tensor:
    """The rows of each pack's own experts. Those that no choice reads, expert 0's or without a router, are zeros."""
    loaded = [None if router is None else router.load()[1:] for router in routers]
    like = next(rows for rows in loaded if rows is not None)
    blank = (like.new_zeros(count, like.shape[1]) for count in added)
    own = (zeros if rows is None else rows for rows, zeros in zip(loaded, blank, strict=True))
    return torch.cat([like.new_zeros(1, like.shape[1]), *own])
