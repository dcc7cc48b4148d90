"""Checks that language packs fit together: one base, one kind of routing, different languages."""

from collections.abc import Sequence

from ..errors import InputError
from .packs import MAY_DIFFER, Pack
from .stored import StoredModel


def check_packs(packs: Sequence[Pack], keep_both: bool, bytes_too: bool = True) -> None:
    """Refuses packs that do not fit together.

    Args:
        bytes_too: compare the bytes of their bases too, which reads them.

    Raises:
        InputError: see `join_expansions`.
    """
    first, *others = packs
    names = [pack.name for pack in packs]
    grafted = [any(stage.stage == "graft" for stage in pack.history.stages) for pack in packs]
    for pack, is_grafted in zip(packs, grafted, strict=True):
        if stage := pack.history.trained_base:
            raise InputError(
                f"{pack.name}: `{stage}` trained the base inside, which the other packs do not share: join packs whose "
                "base stayed frozen."
            )
        if pack.config.conditional_routing:
            raise InputError(
                f"{pack.name}: has conditional routing, whose gate weighs its own experts against expert 0 alone: it "
                "cannot be joined."
            )
        if is_grafted != grafted[0]:
            with_, without = (names[grafted.index(flag)] for flag in (True, False))
            raise InputError(
                f"{with_}: got a graft, and {without} did not: join the packs first and graft the joined model, or "
                "graft all of them with the same model."
            )
    for pack in others:
        _check_config(first, pack)
    for number, pack in enumerate(packs):
        for other in packs[:number]:
            if pack.config_text == other.config_text and _same_routing(pack, other):
                raise InputError(f"{pack.name}: is the same pack as {other.name}: name each pack once.")
            twice = sorted({*pack.new_languages} & {*other.new_languages})
            if twice and not keep_both:
                raise InputError(
                    f"{', '.join(twice)}: {other.name} and {pack.name} both add it: leave one of them out, or keep "
                    "both (--keep-both)."
                )
    for name in {pack.name for pack in packs if names.count(pack.name) > 1}:
        raise InputError(f"{name}: two packs have this name, by which they are told apart: name one, NAME=FOLDER.")
    for pack in others if bytes_too else ():
        _check_base(first, pack)


def _same_routing(one: Pack, other: Pack) -> bool:
    return one.routing.keys() == other.routing.keys() and all(
        bool((one.routing[key] == other.routing[key]).all()) for key in one.routing
    )


def _check_config(first: Pack, pack: Pack) -> None:
    if (first.kind.name == "added") != (pack.kind.name == "added"):
        added, another = (first, pack) if first.kind.name == "added" else (pack, first)
        raise InputError(
            f"{added.name}: its experts are added to expert 0's output, but those of {another.name} are "
            f"{another.kind.words}: added experts are joined with added experts alone."
        )
    if first.config.router_top_k != pack.config.router_top_k:
        raise InputError(
            f"router_top_k is {first.config.router_top_k} in {first.name}, but {pack.config.router_top_k} in "
            f"{pack.name}: their routers were trained for different numbers of active experts."
        )
    own = [one for one in (first, pack) if one.config.classifier_layers and one.config.gate_languages is None]
    judging = {str(one.config.prefix_gate): one.name for one in own}
    if len(judging) > 1:
        (one, a), (other, b) = judging.items()
        raise InputError(f"prefix_gate is {one} in {a}, but {other} in {b}: their classifiers judge in different ways.")
    ours, theirs = first.config.to_dict(), pack.config.to_dict()
    for name in sorted((set(ours) | set(theirs)) - set(MAY_DIFFER)):
        if ours.get(name) != theirs.get(name):
            raise InputError(
                f"{name} is {ours.get(name)!r} in {first.name}, but {theirs.get(name)!r} in {pack.name}: they were not "
                "expanded from the same base."
            )


def _check_base(first: Pack, pack: Pack) -> None:
    """Refuses a pack whose base has other bytes."""
    ours, theirs = first.base, pack.base
    for dense in sorted(set(ours) | set(theirs)):
        if (
            dense not in ours
            or dense not in theirs
            or not same_bytes(first.stored, ours[dense], pack.stored, theirs[dense])
        ):
            raise InputError(
                f"{pack.name}: is no expansion of the base of {first.name}: tensor {dense!r} differs. Join packs of "
                "one base, of the same revision and type."
            )


def same_bytes(one: StoredModel, ours: str, other: StoredModel, theirs: str) -> bool:
    """Whether two models store the same bytes, in the same type and shape, under their own names."""
    readers = one.reader, other.reader
    names = one.home(ours), other.home(theirs)
    a, b = (reader.tensors[name] for reader, name in zip(readers, names, strict=True))
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if (a.file, a.start) == (b.file, b.start):
        return True
    pieces = (reader.chunks(name) for reader, name in zip(readers, names, strict=True))
    return all(x == y for x, y in zip(*pieces, strict=True))
