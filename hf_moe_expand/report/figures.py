"""Figures of results, for the page of a run and for picture files. Matplotlib is imported where something is drawn."""

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from ..core.layer_names import axis_label
from ..planning.results import DeviationResult, RoutingResult, SimilarityResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

_LIGHT, _DARK = "#cfd8dc", "#607d8b"
_STYLE = {
    "axes.axisbelow": True, "axes.formatter.useoffset": False, "axes.grid": True, "axes.spines.right": False,
    "axes.spines.top": False, "axes.titlelocation": "left", "axes.titlesize": 9, "figure.constrained_layout.use": True,
    "font.size": 9, "grid.color": _LIGHT, "legend.frameon": False, "svg.fonttype": "none", "text.parse_math": False,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line of a figure; that of an old language is dashed."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    old: bool = False


@contextmanager
def _style() -> Iterator[None]:
    """The style of all figures, in which they are drawn and saved."""
    from matplotlib import style

    with style.context(["default", _STYLE]):
        yield


@_style()
def save(figure: "Figure", path: str | Path) -> None:
    """Writes a picture; the path's suffix gives the format."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


@_style()
def svg(figure: "Figure", caption: str, about: str = "") -> tuple[str, Markup]:
    """The figure's caption, and the figure as an element of a page. A screen reader speaks the caption and what the
    figure is about; they make the element's ids its own."""
    import matplotlib

    stream, description = StringIO(), f"{about}: {caption}" if about else caption
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": description}):
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has these glyphs
        no_data = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=no_data)
    drawn = re.sub(r'<g id="[^"]*"', "<g", stream.getvalue().partition("<svg ")[2])  # ids such as axes_1 would repeat
    return caption, Markup(f'<svg role="img" aria-label="{escape(description)}" {drawn}')


@_style()
def curves(lines: Sequence[Line], x_label: str) -> "Figure":
    """Lines over steps or layers."""
    figure = _new(4.8, max(2.4, 0.18 * min(len(lines), 20)))
    axes = figure.subplots()
    for line in lines:
        step = len(line.x) // 500 + 1  # all points of a long log would make a large page
        dashes, dots = "--" if line.old else "-", "." if len(line.x) <= 20 else ""
        axes.plot(line.x[::step], line.y[::step], linestyle=dashes, marker=dots, label=line.label)
    axes.set_xlabel(x_label)
    axes.locator_params(axis="x", nbins=6, integer=True, min_n_ticks=1)
    if 1 < len(lines) <= 20:  # more names would leave the lines no room
        figure.legend(loc="outside right upper")
    return figure


@_style()
def allocation(
    experts: Sequence[int], measure: Sequence[float], label: str, judged: Sequence[int] = (), x_label: str = "layer"
) -> "Figure":
    """Bars of experts by layer, dark in the layers `judged`, and the measure that led to them, as in LayerMoE."""
    figure = _new(max(4.8, 0.22 * len(experts)), 2.8)
    axes = figure.subplots()
    colours = [_DARK if layer in judged else _LIGHT for layer in range(len(experts))]
    axes.bar(range(len(experts)), experts, color=colours)
    axes.set(xlabel=x_label, ylabel="experts")
    axes.locator_params(integer=True)
    over = axes.twinx()
    over.plot(measure, "o-", color="C1")
    over.set_ylabel(label, color="C1")
    over.grid(visible=False)
    return figure


def similarity(result: SimilarityResult) -> "Figure":
    """The similarity of each pair of languages by layer, as in LayerMoE's figure 1; pairs of old ones dashed."""
    layers = range(len(result.similarity))
    lines = [Line(name, layers, values, _is_old(name, result.old)) for name, values in result.pairs.items()]
    return curves(lines, axis_label(result.encoder_layers))


def _is_old(pair: str, old: Sequence[str]) -> bool:
    return any(pair == f"{a}-{b}" for a in old for b in old)


@_style()
def deviation(result: DeviationResult, groups: Sequence[Sequence[str]] = (), layers: Sequence[int] = ()) -> "Figure":
    """Similarity of languages, group by group, and deviation of layers, `layers` filled, as in DMoE's figures."""
    names = [language for group in groups for language in group] or result.languages
    order = [result.languages.index(name) for name in names]
    values = [[math.nan if i == j else result.similarity[i][j] for j in order] for i in order]  # 1 by definition
    side = max(2.8, 0.35 * len(names) + 1)
    figure = _new(side + 5, side)
    left, right = figure.subplots(1, 2, width_ratios=[side, 4])
    cells = _cells(left, names, names, values, "similarity of languages")
    cells.autoscale()
    figure.colorbar(cells, ax=left, label="cosine of FFN changes")
    right.plot(result.deviation, "o-", color="C0", markerfacecolor="white")
    right.plot(layers, [result.deviation[layer] for layer in layers], "o", color="C0")
    right.set(xlabel="layer (filled: becomes a mixture)" if layers else "layer", ylabel="L2 norm of the FFN's change")
    right.locator_params(axis="x", integer=True)
    return figure


@_style()
def deviation_steps(result: DeviationResult) -> "Figure":
    """How like the last step's change each earlier one is, and the languages' similarity at each step, as in DMoE's
    figures 8 and 9."""
    steps = [*map(int, result.similarity_at), result.steps]
    names, side = result.languages, max(2.2, 0.3 * len(result.languages) + 0.8)
    figure = _new(4 + side * len(steps), side + 0.4)
    left, *maps = figure.subplots(1, 1 + len(steps), width_ratios=[4, *[side] * len(steps)])
    for name, matrix in result.likeness_of_steps.items():
        left.plot(steps, matrix[-1], ".-", label=name)
    left.set(xlabel="step", ylabel=f"cosine with the change after step {result.steps}")
    if len(names) <= 20:
        left.legend(ncols=1 + len(names) // 8, fontsize=7)
    for step, matrix, axes in zip(steps, [*result.similarity_at.values(), result.similarity], maps, strict=True):
        values = [[math.nan if i == j else matrix[i][j] for j in range(len(names))] for i in range(len(names))]
        cells = _cells(axes, names, names, values, f"step {step}")
        cells.autoscale()
    return figure


@_style()
def expert_shares(result: RoutingResult) -> "Figure":
    """The share of each language's tokens by top-1 expert, a heat map for each layer, as in DMoE's figures."""
    old, new = result.of_kind(old=True), result.of_kind(old=False)
    most = max(map(len, result.top1_share[(old + new)[0]]))
    columns = min(6, len(result.layers))
    rows = -(-len(result.layers) // columns)
    figure = _new(columns * max(1, 0.35 * most) + 1.6, rows * (0.22 * len(old + new) + 0.6) + 0.5)
    grid = [figure.add_subplot(rows, columns, index + 1) for index in range(len(result.layers))]
    for index, (layer, axes) in enumerate(zip(result.names, grid, strict=True)):
        values = [result.top1_share[code][index] for code in old + new]
        cells = _cells(axes, old + new, [str(i) for i in range(len(values[0]))], values, f"layer {layer}")
        axes.axhline(len(old), color="black")
    figure.colorbar(cells, ax=grid, label="share of tokens")
    figure.supxlabel("expert, 0 the original (above the line: old languages)", fontsize=9)
    return figure


def expert_0_scores(result: RoutingResult) -> "Figure":
    """The router's score of expert 0 by layer, a line for each language."""
    lines = [Line(code, result.layers, result.expert_0_score[code], not kind) for code, kind in result.classes.items()]
    return curves(lines, axis_label(result.encoder_layers))


def _new(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches, which needs no display and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _cells(
    axes: "Axes", rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], title: str
) -> "QuadMesh":
    """A heat map of values up to 1, in so few shades that its scale is drawn as paths: a page shows no bitmaps."""
    from matplotlib import colormaps

    shades = colormaps["Blues"].resampled(32)
    cells = axes.pcolormesh(values, cmap=shades, vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
    axes.grid(visible=False)
    axes.set_xticks([i + 0.5 for i in range(len(columns))], list(columns))
    axes.tick_params(axis="x", rotation=90 if max(map(len, columns)) > 3 else 0)
    axes.set_yticks([i + 0.5 for i in range(len(rows))], list(rows))
    axes.set(ylim=(len(rows), 0), title=title)
    return cells
