"""Writes pictures of results to files; the path's suffix gives the format."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..layer_names import axis_label
from .drawing import Line, cell_size, draw_allocation, draw_cells, draw_deviation, draw_lines, drawing, with_means

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..results import RoutingResult, SeparabilityResult


def plot_allocation(
    path: str | Path,
    experts_per_layer: Sequence[int],
    similarity: Sequence[float],
    classifier_layers: Sequence[int] = (),
    title: str = "",
) -> None:
    """Draws similarity and experts per layer in one picture, as in LayerMoE's figures."""
    label = "experts (filled: with a classifier)" if classifier_layers else "experts"
    with _picture(path, 20 * len(experts_per_layer), label) as axes:
        draw_allocation(axes, experts_per_layer, similarity, "similarity of languages", classifier_layers)
        axes.figure.suptitle(title)


def plot_separability(path: str | Path, result: "SeparabilityResult") -> None:
    """Draws how well each layer tells old text from new, by one token (dashed) and by 32 together (solid)."""
    with _picture(path, 20 * len(result.token) + 86, "old text told from new: balanced accuracy") as axes:
        draw_lines(axes, separability_lines(result), "layer", separability_range(result))


def separability_lines(result: "SeparabilityResult", least: float | None = None) -> list[Line]:
    """Balanced accuracy by layer on one token and on the longest stretch; a thin line at `least`."""
    layers = range(len(result.token))
    lines = [Line("1 token", layers, result.token, "old"), Line(f"{result.length} tokens", layers, result.separability)]
    return lines if least is None else [*lines, Line("least", layers, [least] * len(layers), "old", thin=True)]


def separability_range(result: "SeparabilityResult") -> tuple[float, float]:
    """The range of the figure's accuracies: from chance, or the lowest one, to 1, and a margin."""
    return min(0.5, *result.token, *result.separability) - 0.02, 1.02


def plot_deviation(
    path: str | Path,
    languages: Sequence[str],
    similarity: Sequence[Sequence[float]],
    deviation: Sequence[float],
    groups: Sequence[Sequence[str]] = (),
    layers: Sequence[int] = (),
) -> None:
    """Draws the similarity of languages and the deviation of layers side by side, as in DMoE's figures.

    Args:
        groups: language groups, which order the languages and are framed.
        layers: the chosen layers, which are filled.
    """
    side = max(260, cell_size(languages, languages)[0] * len(languages) + 65)
    width = max(288, 14 * len(deviation))
    with drawing(side + 60 + width, side) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[side + 60, width])
        names, values = grouped(languages, similarity, groups)
        cells = draw_cells(
            left, names, names, values, "similarity of languages", blocks=[len(group) for group in groups]
        )
        figure.colorbar(cells, ax=left, label="cosine of FFN changes", shrink=0.8)
        draw_deviation(right, deviation, layers)
        right.set_box_aspect(min(1.0, side / width))  # no taller than wide beside a hundred languages
        _save(figure, path)


def grouped(
    languages: Sequence[str], similarity: Sequence[Sequence[float]], groups: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[float | None]]]:
    """Languages and their similarities, group by group; the diagonal, 1 by definition, is empty."""
    names = [language for group in groups for language in group] or list(languages)
    order = [list(languages).index(name) for name in names]
    return names, [[None if i == j else similarity[i][j] for j in order] for i in order]


def plot_expert_shares(path: str | Path, result: "RoutingResult") -> None:
    """Draws the share of each language's tokens by top-1 expert, one heat map for each layer, as in DMoE's figures."""
    old, new = result.of_kind(old=True), result.of_kind(old=False)
    layers, names = result.names, old + new
    most = max(map(len, result.top1_share[names[0]]))
    columns = min(6, len(layers))
    rows = -(-len(layers) // columns)
    wide, high = cell_size(names, range(most))
    size = (max(columns * max(80, wide * most + 25), 240) + 100, max(rows * (high * len(names) + 54) + 22, 180))
    with drawing(*size) as figure:
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes in grid[len(layers) :]:
            axes.set_axis_off()
        for index, (layer, axes) in enumerate(zip(layers, grid, strict=False)):
            values = [result.top1_share[code][index] for code in names]
            experts = [str(expert) for expert in range(len(values[0]))]
            rule = len(old) if old and new else 0
            cells = draw_cells(axes, names, experts, values, f"layer {layer}", percent=True, most=1.0, rule_after=rule)
            axes.set_xlim(0, most)  # boxes of equal size, so that the layout leaves room for the languages' names
            if index % columns:
                axes.set_yticks([])
        label = "share of tokens (top-1; cells: in %)"
        figure.colorbar(cells, ax=grid, label=label, shrink=min(0.8, 290 / size[1]), aspect=30)
        figure.supxlabel("expert (above the line: old languages)" if old and new else "expert", fontsize=10.5)
        _save(figure, path)


def plot_expert_0_scores(path: str | Path, result: "RoutingResult") -> None:
    """Draws the router's score of expert 0 by layer, one line for each language; many languages get thick means."""
    with _picture(path, 20 * len(result.layers) + 86, "router's score of expert 0 (dashed: old languages)") as axes:
        draw_lines(axes, with_means(expert_0_lines(result)), axis_label(result.encoder_layers), (0, 1))


def expert_0_lines(result: "RoutingResult") -> list[Line]:
    """The router's score of expert 0 by layer, old languages first."""
    return [
        Line(code, result.layers, result.expert_0_score[code], "old" if old else "new")
        for old in (True, False)
        for code in result.of_kind(old)
    ]


@contextmanager
def _picture(path: str | Path, width: float, title: str) -> Iterator["Axes"]:
    """The axes of a picture with one chart, which is written at the end."""
    with drawing(max(360, width), 245) as figure:
        axes = figure.subplots()
        yield axes
        axes.set_title(title, loc="left")
        _save(figure, path)


def _save(figure: "Figure", path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.08)
