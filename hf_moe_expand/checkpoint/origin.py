"""Checks that a checkpoint was expanded from a given dense one, whose tensors its expert 0 and shared parts are."""

import torch

from ..errors import InputError
from ..records import History
from .stored import StoredModel, places


def check_expanded_from(
    target: StoredModel, base: StoredModel, instruct: StoredModel, homes: dict[str, str | None]
) -> None:
    """Refuses a base from which `target` was not expanded. Reads the tensors piece by piece.

    Tensors of different types are equal if one of them is the other, rounded to its type. A model whose history has a
    step that changes every tensor is not checked.

    Args:
        instruct: the fine-tune of `base`; the message says so if the two look swapped.
        homes: the name in the dense model of each tensor of `target` (`dense_names`).

    Raises:
        InputError: a tensor differs; the message names the first one.
    """
    history = History.of(target.config)
    changed = any(stage.changes_everything for stage in history.stages)
    if changed or any(record.expert_init == "branches" for record in history.expansions):
        return
    where = places(target.network)
    copied = {key: home for key, home in homes.items() if home is not None and where[key].expert in (0, None)}
    wrong = next((key for key, home in copied.items() if not _same(target, key, base, home)), None)
    if wrong is None:
        return
    if all(_same(target, key, instruct, home) for key, home in copied.items()):
        raise InputError(
            f"base ({base.folder}) and instruct ({instruct.folder}) look swapped: {target.folder} has the weights of "
            f"instruct, and other ones in {copied[wrong]!r} than base. Give the model that was expanded as base."
        )
    raise InputError(
        f"{base.folder}: is not the model from which {target.folder} was expanded: tensor {copied[wrong]!r} differs "
        "from the model's own, which the expansion copied. Give the model that was expanded as base."
    )


def _same(target: StoredModel, key: str, dense: StoredModel, home: str) -> bool:
    """Whether a tensor has the same elements in both checkpoints, in the type of one of them."""
    ours, theirs = target.names[key], dense.home(home)
    if target.shapes[key] != dense.shapes[home]:
        return False
    up_to_target = up_to_dense = True
    for a, b in zip(target.reader.pieces(ours), dense.reader.pieces(theirs), strict=True):
        up_to_target = up_to_target and torch.equal(b.to(a.dtype), a)
        up_to_dense = up_to_dense and torch.equal(a.to(b.dtype), b)
        if not (up_to_target or up_to_dense):
            return False
    return True
