"""How many experts each layer gets. Numbers in, numbers out; expert 0 is always counted."""

import random
from collections.abc import Sequence

from ..errors import InputError

# MoLA's shapes: experts in each quarter of the depth, first layers first.
MOLA_SHAPES = {
    "inverted-triangle": (2, 4, 6, 8),
    "triangle": (8, 6, 4, 2),
    "hourglass": (8, 2, 2, 8),
    "rectangle": (5, 5, 5, 5),
}


def allocate_experts(
    similarity: Sequence[float], total: int, minimum: int = 2, floor: float | None = None
) -> list[int]:
    """Experts per layer, fewer where languages are more alike (LayerMoE Eq. 10).

    `N_l = ceil(share_l * delta)` with `share_l = (1 / S_l) / sum_j (1 / S_j)` and counts that sum to `total`. A ceiling
    whose total is fixed is Adams' apportionment: every layer starts at `minimum`, and the next expert goes to
    the layer with the largest `share_l / n_l`, the first such layer on a tie.

    Args:
        similarity: S_l of each layer, positive.
        total: experts in all layers together, expert 0 of each layer counted.
        minimum: least experts of a layer (2: expert 0 and a new one).
        floor: similarities below it count as it.

    Raises:
        InputError: `total` is below `minimum` a layer, or a similarity is not positive.
    """
    if floor is not None:
        if floor <= 0:
            raise InputError(f"The similarity floor is {floor}; it must be positive.")
        similarity = [max(value, floor) for value in similarity]
    for layer, value in enumerate(similarity):
        if not value > 0:
            raise InputError(
                f"The similarity of layer {layer} is {value:g}: experts are shared out by 1/similarity, which needs "
                "positive values. Set a floor (--similarity-floor 0.01) to count smaller values as the floor."
            )
    check_total(total, len(similarity), minimum)
    counts = [minimum] * len(similarity)
    for _ in range(total - sum(counts)):
        # share_l / n_l is proportional to 1 / (S_l n_l).
        layer = min(range(len(counts)), key=lambda i: similarity[i] * counts[i])
        counts[layer] += 1
    return counts


def uniform_experts(num_layers: int, experts: int, minimum: int = 2) -> list[int]:
    """The same count in every layer (MoE-LPR)."""
    if experts < minimum:
        needed = "2, the original FFN and a new expert" if minimum == 2 else str(minimum)
        raise InputError(f"{experts} experts a layer: a mixture needs at least {needed}.")
    return [experts] * num_layers


def mola_experts(num_layers: int, shape: str = "inverted-triangle") -> list[int]:
    """MoLA's counts by quarters of the depth; the inverted triangle (2, 4, 6, 8) gives upper layers most."""
    if shape not in MOLA_SHAPES:
        raise InputError(f"Unknown MoLA shape {shape!r}; known: {', '.join(MOLA_SHAPES)}.")
    return [MOLA_SHAPES[shape][4 * layer // num_layers] for layer in range(num_layers)]


def random_experts(num_layers: int, total: int, minimum: int = 2, seed: int = 0) -> list[int]:
    """Counts that sum to `total`, what exceeds `minimum` thrown onto random layers (ablation)."""
    check_total(total, num_layers, minimum)
    counts = [minimum] * num_layers
    draw = random.Random(seed)
    for _ in range(total - sum(counts)):
        counts[draw.randrange(num_layers)] += 1
    return counts


def check_total(total: int, num_layers: int, minimum: int) -> None:
    """Refuses a total that cannot give every layer its minimum."""
    if total < num_layers * minimum:
        raise InputError(
            f"{total} experts in total are too few: {num_layers} layers with at least {minimum} each (the original FFN "
            f"counts as one) need {num_layers * minimum} or more."
        )
