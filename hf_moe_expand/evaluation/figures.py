"""Figures of results."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..analysis.result import RoutingResult


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


def plot_deviation(
    path: str | Path,
    languages: Sequence[str],
    similarity: Sequence[Sequence[float]],
    deviation: Sequence[float],
    groups: Sequence[Sequence[str]] = (),
    layers: Sequence[int] = (),
) -> None:
    """Similarity of languages and deviation of layers side by side, as DMoE's figures have them.

    Args:
        groups: order and frame the languages.
        layers: the chosen ones are red.
    """
    from matplotlib.figure import Figure  # heavy; this class needs no display

    side = max(3.6, 0.24 * len(languages) + 0.9)
    width = max(4.0, 0.2 * len(deviation))
    figure = Figure(figsize=(side + 0.8 + width, side), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[side + 0.8, width])
    _draw_similarity(figure, left, languages, similarity, groups)
    _draw_deviation(right, deviation, layers)
    right.set_box_aspect(min(1.0, side / width))  # no taller than wide beside a hundred languages
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_similarity(
    figure: Any, axes: Any, languages: Sequence[str], similarity: Sequence[Sequence[float]], groups: Sequence
) -> None:
    from matplotlib.patches import Rectangle

    names = [language for group in groups for language in group] or list(languages)
    order = [list(languages).index(name) for name in names]
    rows = [[similarity[i][j] for j in order] for i in order]
    # The diagonal is 1 by definition: left grey, so that the colours tell the pairs apart.
    shown = [[float("nan") if i == j else value for j, value in enumerate(row)] for i, row in enumerate(rows)]
    axes.set_facecolor("#d0d0d0")
    image = axes.imshow(shown, cmap="Blues")
    figure.colorbar(image, ax=axes, label="cosine of FFN changes", shrink=0.8)
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    begin = 0
    for group in groups:
        corner = (begin - 0.5, begin - 0.5)
        axes.add_patch(
            Rectangle(corner, len(group), len(group), fill=False, edgecolor="#c1440e", linewidth=1.8, clip_on=False)
        )
        begin += len(group)
    axes.set_title("similarity of languages")


def _draw_deviation(axes: Any, deviation: Sequence[float], layers: Sequence[int]) -> None:
    indices = range(len(deviation))
    axes.plot(indices, deviation, color="#a9c9dd", linewidth=1, zorder=1)
    axes.scatter(indices, deviation, color=["#c1440e" if layer in layers else "#2a6f97" for layer in indices], zorder=2)
    axes.set_xticks(list(indices)[:: max(1, len(deviation) // 12)])
    axes.set_xlabel("layer (red: becomes a mixture)" if layers else "layer")
    axes.set_ylabel("L2 norm of the FFN's change")
    axes.set_title("deviation, mean over languages")


def plot_expert_shares(path: str | Path, result: "RoutingResult", columns: int = 6) -> None:
    """Share of each language's tokens by top-1 expert, a heat map a layer, as DMoE's figures have them.

    Args:
        columns: layers in a row of the picture.
    """
    from matplotlib.figure import Figure  # heavy; this class needs no display

    old, new = result.of_kind(old=True), result.of_kind(old=False)
    layers, shares = result.layers, result.top1_share
    most = max(len(experts) for experts in shares[(old + new)[0]])
    columns = min(columns, len(layers))
    rows = -(-len(layers) // columns)
    size = (columns * max(1.1, 0.26 * most + 0.35) + 1.4, rows * (0.26 * len(old + new) + 0.75) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[len(layers) :]:
        axes.set_axis_off()
    for index, (layer, axes) in enumerate(zip(layers, grid, strict=False)):
        image = axes.imshow([shares[code][index] for code in old + new], cmap="Blues", vmin=0, vmax=1)
        experts = len(shares[(old + new)[0]][index])
        axes.set_title(f"layer {layer}", fontsize=9, loc="left")
        axes.set_xlim(-0.5, most - 0.5)  # boxes of one size, or the layout leaves no room for the languages' names
        axes.spines[:].set_visible(False)
        axes.set_xticks(range(experts))
        axes.set_yticks(range(len(old + new)), old + new if index % columns == 0 else [])
        axes.tick_params(length=0, labelsize=8)
        if old and new:
            axes.hlines(len(old) - 0.5, -0.5, experts - 0.5, color="#c1440e", linewidth=1.5)
    figure.colorbar(image, ax=grid, label="share of tokens (top-1)", shrink=min(0.8, 4 / size[1]), aspect=30)
    figure.supxlabel("expert (above the line: old languages)" if old and new else "expert", fontsize=9)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plot_expert_0_scores(path: str | Path, result: "RoutingResult") -> None:
    """The router's score of expert 0 in each layer: a line a language, thick ones for the means of old and new."""
    from matplotlib.figure import Figure  # heavy; this class needs no display

    figure = Figure(figsize=(max(5.0, 0.28 * len(result.layers) + 1.2), 3.4), layout="constrained")
    axes = figure.subplots()
    for old, colour in ((True, "#2a6f97"), (False, "#c1440e")):
        scores = [result.expert_0_score[language] for language in result.of_kind(old)]
        for line in scores:
            axes.plot(result.layers, line, color=colour, linewidth=0.8, alpha=0.45)
        if scores:
            mean = [sum(values) / len(values) for values in zip(*scores, strict=True)]
            names = ", ".join(result.of_kind(old)) if len(scores) <= 12 else str(len(scores))
            label = f"{'old' if old else 'new'} languages: {names}"
            axes.plot(result.layers, mean, color=colour, linewidth=2.2, marker="o", markersize=4, label=label)
    axes.set_ylim(0, 1)
    axes.set_xticks(result.layers[:: max(1, len(result.layers) // 16)])
    axes.set_xlabel("layer")
    axes.set_ylabel("score of expert 0")
    figure.legend(loc="outside upper left", frameon=False, fontsize=9)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
