"""Selects the layers that become mixtures of experts (DMoE) or get a routing classifier (LayerMoE)."""

import random
import re
from collections.abc import Sequence
from math import floor, isfinite
from typing import Literal

from ..core.errors import InputError
from ..core.schema import checked

ClassifierChoice = Literal["similarity", "random", "last", "all", "none"]
CLASSIFIER_CHOICES = "similarity (where old and new languages are most alike), last (least alike), random, all or none"
_RANGE = r"\s*(?:(encoder|decoder)\.)?(\d{1,6})(?:-(\d{1,6})(?:/(\d{1,6}))?)?\s*"
_RANGES = re.compile(f"{_RANGE}(,{_RANGE})*")


@checked
def select_layers(deviation: Sequence[float], ratio: float | None = None, threshold: float | None = None) -> list[int]:
    """Layers that become mixtures, in order: those that fine-tuning moves most (DMoE section 3.2).

    Args:
        ratio: alpha; selects the `floor(alpha * layers)` layers that deviate most, the first ones on a tie.
        threshold: used instead in the authors' scripts: selects the layers whose deviation, scaled so that the smallest
            is 0 and the largest 1, is at least this.
    """
    if not deviation or not all(isfinite(value) for value in deviation):
        raise InputError("The deviations must be finite numbers, one for each layer.")
    if (ratio is None) == (threshold is None):
        raise InputError("Layers are selected by a ratio or by a threshold: give exactly one of the two.")
    if ratio is not None:
        if not 0 < ratio <= 1:
            raise InputError(f"The ratio of layers is {ratio:g}: must be above 0 and at most 1.")
        count = floor(round(ratio * len(deviation), 9))  # 0.29 * 100 is 28.999999999999996
        chosen = sorted(sorted(range(len(deviation)), key=lambda layer: (-deviation[layer], layer))[:count])
    elif threshold is not None:
        lowest, highest = min(deviation), max(deviation)
        if lowest == highest:
            raise InputError("All layers deviate equally, so no threshold distinguishes them: give a ratio instead.")
        chosen = [layer for layer, value in enumerate(deviation) if (value - lowest) / (highest - lowest) >= threshold]
    if not chosen:
        given = f"ratio of {ratio:g}" if threshold is None else f"threshold of {threshold:g}"
        raise InputError(f"A {given} selects no layer of {len(deviation)}: give a larger ratio or a smaller threshold.")
    return chosen


def check_layer_ranges(text: str) -> str:
    """Returns the text; refuses one that has not the form that `layers_in` reads."""
    if not _RANGES.fullmatch(text):
        raise InputError(
            f"{text!r}: give layers and ranges of layers from 0, such as 4-11, 0,6-8 or 1-11/2 (every second "
            "one); in an encoder-decoder encoder.1,decoder.0-5."
        )
    return text


def layers_in(text: str, num_layers: int, key: str = "only_layers", encoder_layers: int = 0) -> list[int]:
    """The layers of `4-11`, `0,6-8` or `1-11/2`, ends included, in order; in an encoder-decoder, which has as many
    `encoder_layers`, those of `encoder.1,decoder.0-5`."""
    layers: set[int] = set()
    for part in check_layer_ranges(text).split(","):
        stack, first_in, last_in, every = re.fullmatch(_RANGE, part).groups()  # type: ignore[union-attr]  # checked
        start, stop, step = int(first_in), int(last_in or first_in), int(every or 1)
        if start > stop or not step:
            raise InputError(f"{key}: {part.strip()} has no layer: give the lower one first, and a step of 1 or more.")
        if bool(stack) != bool(encoder_layers):
            wanted = "an encoder-decoder: encoder.0 or decoder.0" if encoder_layers else "a decoder: numbers alone"
            raise InputError(f"{key}: {part.strip()}: the model is {wanted} name its layers.")
        first = encoder_layers if stack == "decoder" else 0
        end = encoder_layers if stack == "encoder" else num_layers
        if stop >= end - first:
            before = f"{stack}." if stack else ""
            raise InputError(
                f"{key}: the model has no layer {before}{stop}; its layers are {before}0-{end - first - 1}."
            )
        layers.update(range(first + start, first + stop + 1, step))
    return sorted(layers)


def classifier_layers(
    choice: str, count: int, expanded: Sequence[int], new_old: Sequence[float] | None = None, seed: int = 0
) -> list[int]:
    """Layers with a classifier, in order (LayerMoE section 3.3; the other choices are its ablations).

    Args:
        choice: `similarity` (the `count` layers with the highest new-old similarity, where a router is most easily
            confused), `last` (those with the lowest), `random`, `all` or `none`.
        expanded: the layers that have a router.
        new_old: S_new&old of each layer, for `similarity` and `last`.
    """
    if choice == "all":
        return sorted(expanded)
    if choice == "none" or count == 0:
        return []
    if not 0 <= count <= len(expanded):
        raise InputError(f"{count} classifier layers were asked for, but {len(expanded)} layers are expanded.")
    if choice == "random":
        return sorted(random.Random(seed).sample(list(expanded), count))
    if new_old is None:
        raise InputError("Classifier layers by similarity need an analysis: give --analysis, or another choice.")
    sign = 1 if choice == "last" else -1
    return sorted(sorted(expanded, key=lambda layer: (sign * new_old[layer], layer))[:count])
