"""Which layers get a routing classifier."""

import random
from collections.abc import Sequence

from ..errors import InputError

CHOICES = ("similarity", "random", "last", "all", "none")


def classifier_layers(
    choice: str, count: int, expanded: Sequence[int], new_old: Sequence[float] | None = None, seed: int = 0
) -> list[int]:
    """Layers with a classifier, in order (LayerMoE section 3.3; the other choices are its ablations).

    Args:
        choice: `similarity` (the `count` layers with the highest new-old similarity, where a router is most easily
            confused), `random`, `last`, `all` or `none`.
        count: how many layers, for the first three.
        expanded: the layers that have a router.
        new_old: S_new&old of every layer, for `similarity`.

    Raises:
        InputError: the choice is unknown, or asks for more layers than are expanded.
    """
    if choice == "none":
        return []
    if choice == "all":
        return sorted(expanded)
    if choice not in CHOICES:
        raise InputError(f"Unknown choice of classifier layers {choice!r}; known: {', '.join(CHOICES)}.")
    if not 0 <= count <= len(expanded):
        raise InputError(f"{count} classifier layers were asked for, but {len(expanded)} layers are expanded.")
    if choice == "random":
        return sorted(random.Random(seed).sample(list(expanded), count))
    if choice == "last":
        return sorted(expanded)[len(expanded) - count :]
    if new_old is None:
        raise InputError("Classifier layers by similarity need an analysis: give --analysis, or another choice.")
    return sorted(sorted(expanded, key=lambda layer: (-new_old[layer], layer))[:count])
