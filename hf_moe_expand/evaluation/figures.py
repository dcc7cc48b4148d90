"""Figures of results."""

from collections.abc import Sequence
from pathlib import Path


def plot_allocation(
    path: str | Path,
    experts_per_layer: Sequence[int],
    similarity: Sequence[float],
    classifier_layers: Sequence[int] = (),
    title: str = "",
) -> None:
    """Similarity and experts per layer in one picture, as LayerMoE's figures have them; the suffix gives the format."""
    from matplotlib.figure import Figure  # heavy; this class needs no display
    from matplotlib.ticker import MaxNLocator

    layers = range(len(experts_per_layer))
    figure = Figure(figsize=(max(5.0, 0.28 * len(layers)), 3.4), layout="constrained")
    bars = figure.subplots()
    colours = ["#2a6f97" if layer in classifier_layers else "#a9c9dd" for layer in layers]
    bars.bar(layers, experts_per_layer, color=colours, width=0.7)
    bars.set_xlabel("layer")
    bars.set_ylabel("experts (dark: with a classifier)")
    bars.set_xticks(list(layers)[:: max(1, len(layers) // 16)])
    bars.set_ylim(0, max(experts_per_layer) + 1)
    bars.yaxis.set_major_locator(MaxNLocator(integer=True))
    line = bars.twinx()
    line.plot(layers, similarity, color="#c1440e", marker="o", markersize=4)
    line.set_ylabel("similarity of languages", color="#c1440e")
    line.set_ylim(0, max(similarity) * 1.15)
    if title:
        bars.set_title(title)
    figure.savefig(path, dpi=150)
