"""Charts drawn onto matplotlib axes, for the run page and for picture files alike.

Old languages are dashed and in the text's colour, new ones solid and in the accent colour. Matplotlib is imported only
when something is drawn.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

# The colours of the report's light mode, by their names there.
COLOURS = {
    "ink": "#1d1f21", "quiet": "#61666b", "hair": "#dcdfe1", "accent": "#0f6e84", "paper": "#fdfdfc", "on": "#ffffff",
}  # fmt: skip
INK, QUIET, HAIR, ACCENT, PAPER, ON = COLOURS.values()
_STYLE = {
    "axes.axisbelow": True, "axes.edgecolor": HAIR, "axes.facecolor": "none", "axes.formatter.limits": (-4, 7),
    "axes.formatter.useoffset": False, "axes.labelcolor": QUIET, "axes.labelsize": 10.5, "axes.spines.bottom": False,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.xmargin": 0.03,
    "axes.titlecolor": QUIET, "axes.titlesize": 10.5, "axes.ymargin": 0.08, "figure.constrained_layout.h_pad": 4 / 72,
    "figure.constrained_layout.w_pad": 4 / 72, "font.size": 10.5, "grid.color": HAIR, "grid.linewidth": 1,
    "lines.linewidth": 1.8, "lines.markersize": 4, "lines.scale_dashes": False, "lines.dashed_pattern": [4, 3],
    "svg.fonttype": "none", "svg.hashsalt": "hf-moe-expand", "text.color": INK, "text.parse_math": False,
    "xtick.labelcolor": QUIET, "xtick.major.size": 0, "xtick.major.width": 0,
    "ytick.labelcolor": QUIET, "ytick.major.size": 0, "ytick.major.width": 0,
}  # fmt: skip
LINE = 13  # points: the height of a line of text
MOST_LABELS = 12
_MOST_POINTS = 200
_NUMBERED = (30, 18)  # points: a cell with a number
_LONGEST = 14  # letters of a label
TOOLTIP = "tooltip:"  # prefix of the gid of a line whose name the page shows on hovering


@dataclass(frozen=True)
class Line:
    """A line of a chart, without points that are not finite. A thin line has no label at its end."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    kind: str = "new"
    thin: bool = False

    @property
    def points(self) -> list[tuple[float, float]]:
        """At most 200 points; of more points, each is the mean of a few neighbours."""
        finite = [(x, y) for x, y in zip(self.x, self.y, strict=True) if math.isfinite(y)]
        size = -(-len(finite) // _MOST_POINTS)
        parts = [finite[i : i + size] for i in range(0, len(finite), size)] if finite else []
        return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


@dataclass(frozen=True)
class Change:
    """A language's scores, from the first model to the last; without scores, a heading."""

    label: str
    values: Sequence[float] = ()
    kind: str = "new"
    note: str = ""


@contextmanager
def drawing(width: float, height: float, layout: str | None = "constrained") -> Iterator["Figure"]:
    """An empty figure of this size in points; draw and save it inside the context, which sets the style."""
    from matplotlib import style  # heavy; Figure needs no display and no global state
    from matplotlib.figure import Figure

    with style.context(["default", _STYLE]):
        yield Figure(figsize=(width / 72, height / 72), layout=layout)  # type: ignore[arg-type]


def draw_lines(axes: "Axes", lines: Sequence[Line], x_label: str, y_range: tuple[float, float] | None = None) -> None:
    """Lines over integers; 2 to 12 lines are labelled at their ends. Without any finite point, draws a message."""
    drawn = [(line, points) for line in lines if (points := line.points)]
    if not drawn:
        axes.set_axis_off()
        axes.set_title(f"no finite number at any {x_label}", loc="left")
        return
    for line, points in drawn:
        marker = "o" if len(points) <= 20 and not line.thin else ""
        width, alpha = (0.8, 0.5) if line.thin else (1.8, 1)
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker=marker, linewidth=width, alpha=alpha, gid=TOOLTIP + line.label, **_look(line.kind))
    axes.set_xlabel(x_label)
    axes.locator_params(axis="x", nbins=4, integer=True, min_n_ticks=1)
    axes.locator_params(axis="y", nbins=5)
    axes.grid(axis="y")
    axes.set_ylim(y_range)
    labelled = [(line, points[-1][1]) for line, points in drawn if not line.thin]
    if 1 < len(labelled) <= MOST_LABELS:
        height = 72 * axes.get_figure(root=True).get_figheight() - 45  # type: ignore[union-attr]
        for (line, _), end in zip(labelled, _spread([y for _, y in labelled], axes.get_ylim(), height), strict=True):
            _beside(axes, end, short(line.label), _look(line.kind)["color"])


def lines_height(lines: Sequence[Line]) -> float:
    """Height in points that `draw_lines` needs for its labels."""
    if not any(line.points for line in lines):
        return 30
    return max(180, 60 + LINE * min(len(lines), MOST_LABELS))


def with_means(lines: Sequence[Line]) -> list[Line]:
    """The lines; if they are too many for labels, thin lines and the mean of each kind. All lines share their x."""
    if len(lines) <= MOST_LABELS:
        return list(lines)
    means = []
    for kind in ("old", "new"):
        if same := [line for line in lines if line.kind == kind]:
            y = [sum(values) / len(values) for values in zip(*(line.y for line in same), strict=True)]
            means.append(Line(f"{kind}, mean", same[0].x, y, kind))
    return [replace(line, thin=True) for line in lines] + means


def draw_allocation(
    axes: "Axes",
    experts: Sequence[int],
    measure: Sequence[float] | None = None,
    measure_label: str = "",
    classifiers: Sequence[int] = (),
    before: Sequence[int] = (),
    x_label: str = "layer",
) -> None:
    """Bars of experts per layer and a line over them, as in LayerMoE's figures.

    Args:
        measure: similarity of languages or deviation in each layer; its axis is on the right.
        classifiers: layers with a classifier, whose bars are filled.
        before: experts of each layer before this expansion, the dashed part of the bars.
    """
    layers = range(len(experts))
    axes.set_title("experts", loc="left")
    axes.grid(axis="y")
    earlier = before or [0] * len(experts)
    for layer, now, old in zip(layers, experts, earlier, strict=True):
        shade = (INK, 0.5 if layer in classifiers else 0.1)
        for bottom, top, dashes in ((0, old, "dashed"), (old, now, "solid")):
            if top > bottom:
                axes.bar(layer, top - bottom, 0.7, bottom, facecolor=shade, edgecolor=QUIET, linestyle=dashes)
    half = max(len(experts), 4) / 2 + 0.1  # limits the width of bars for few layers
    middle = (len(experts) - 1) / 2
    axes.set(xlim=(middle - half, middle + half), ylim=(0, max(experts) + 1), xlabel=x_label)
    axes.locator_params(axis="y", integer=True, nbins=5)
    _number_layers(axes, layers)
    if measure:
        over = axes.twinx()
        over.set_title(measure_label, loc="right", color=ACCENT)
        over.plot(layers, measure, color=ACCENT, marker="o", clip_on=False, gid=TOOLTIP + measure_label)
        over.tick_params(labelcolor=ACCENT)
        over.locator_params(axis="y", nbins=5)


def draw_deviation(axes: "Axes", deviation: Sequence[float], layers: Sequence[int]) -> None:
    """Bars of each layer's deviation; those of `layers` are filled."""
    axes.grid(axis="y")
    axes.plot(deviation, color=QUIET, linewidth=1)
    for fill, filled in ((PAPER, False), (ACCENT, True)):
        at = [layer for layer in range(len(deviation)) if (layer in layers) == filled]
        axes.plot(at, [deviation[layer] for layer in at], "o", color=fill, markeredgecolor=ACCENT, markersize=6)
    _number_layers(axes, range(len(deviation)))
    axes.set_xlabel("layer (filled: becomes a mixture)" if layers else "layer")
    axes.set_title("deviation, mean over languages", loc="left")
    axes.set_ylabel("L2 norm of the FFN's change")


def draw_changes(axes: "Axes", changes: Sequence[Change], x_label: str) -> None:
    """One row for each language: a ring for the first value, small dots, a full dot for the last, and a note."""
    rows = [row for row, change in enumerate(changes) if change.values]
    axes.set(xlabel=x_label, ylim=(len(changes) - 0.4, -0.6))
    axes.set_yticks(rows, [short(changes[row].label) for row in rows])
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_color(_look(changes[row].kind)["color"])
    axes.grid(axis="x")
    axes.locator_params(axis="x", nbins=5)
    for row, change in enumerate(changes):
        if not change.values:
            heading = axes.annotate(change.label, (0, row), xycoords=("figure fraction", "data"), va="center_baseline")
            heading.set(color=QUIET, weight="bold", in_layout=False)  # it may stand over the grid
            continue
        _beside(axes, row, change.note, QUIET)
        look = _look(change.kind)
        shown = [value for value in change.values if math.isfinite(value)]
        at = [row] * len(shown)
        axes.plot(shown, at, marker="o", gid=TOOLTIP + change.label, **look)
        axes.plot(shown[-1:], at[-1:], marker="o", markersize=8, **look)
        axes.plot(shown[:1], at[:1], marker="o", markersize=8, markerfacecolor=PAPER, **look)
    if not any(math.isfinite(value) for change in changes for value in change.values):
        axes.set(xticks=[], xlabel=f"no finite {x_label}")


def draw_cells(
    axes: "Axes",
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    title: str = "",
    percent: bool = False,
    most: float | None = None,
    rule_after: int = 0,
    blocks: Sequence[int] = (),
) -> "QuadMesh":
    """A heat map: larger values are darker; cells show their numbers if `cell_size` leaves room for them.

    Args:
        values: `[rows, columns]`; None leaves a cell empty.
        most: the value of the darkest cell; the largest value by default.
        rule_after: number of rows above a rule.
        blocks: sizes of framed squares on the diagonal.
    """
    from matplotlib.colors import LinearSegmentedColormap, to_rgba  # heavy
    from matplotlib.patches import Rectangle

    shown = [[math.nan if value is None else value for value in row] for row in values]
    numbered = cell_size(rows, columns) == _NUMBERED
    most = most or max((value for row in shown for value in row if math.isfinite(value)), default=0) or 1
    # One colour with decreasing transparency, so that the page's own accent and paper give the shades.
    shades = LinearSegmentedColormap.from_list("accent", [to_rgba(ACCENT, 0), to_rgba(ACCENT, 1)])
    cells = axes.pcolormesh(shown, cmap=shades, vmin=0, vmax=most, edgecolors=HAIR, linewidth=0.5, clip_on=False)
    for i, row in enumerate(shown):
        for j, value in enumerate(row):
            if numbered and math.isfinite(value):
                number = f"{100 * value:.0f}" if percent else f"{round(value, 2) + 0.0:.2f}".replace("-", "−")
                colour = ON if value / most > 0.55 else INK
                axes.text(j + 0.5, i + 0.5, number, ha="center", va="center_baseline", color=colour, size=9.5)
    upright: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
    wide = max(map(len, columns), default=0) > (4 if numbered else 2)
    names = [short(label) for label in columns]
    axes.set_xticks([j + 0.5 for j in range(len(columns))], names, **upright if wide else {})
    axes.set_yticks([i + 0.5 for i in range(len(rows))], [short(label) for label in rows])
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    axes.set_title(title, loc="left", weight="bold")
    if rule_after:
        axes.hlines(rule_after, 0, len(columns), color=INK, linewidth=1.5, clip_on=False)
    begin = 0
    for size in blocks:
        axes.add_patch(Rectangle((begin, begin), size, size, fill=False, edgecolor=INK, linewidth=1.8, clip_on=False))
        begin += size
    return cells


def cell_size(rows: Sequence[object], columns: Sequence[object]) -> tuple[int, int]:
    """Width and height of a cell in points; cells of a large map have no room for numbers."""
    return _NUMBERED if max(len(rows), len(columns)) <= 24 else (16, 16)


def short(label: str) -> str:
    """At most 14 letters of a label."""
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def _look(kind: str) -> dict[str, Any]:
    return {"color": INK, "linestyle": "dashed"} if kind == "old" else {"color": ACCENT, "linestyle": "solid"}


def _beside(axes: "Axes", y: float, text: str, colour: str) -> None:
    """Text on the right of the axes."""
    axes.annotate(text, (1, y), (6, 0), ("axes fraction", "data"), "offset points", va="center_baseline", color=colour)


def _number_layers(axes: "Axes", layers: Sequence[int]) -> None:
    axes.set_xticks(layers[:: max(1, math.ceil(len(layers) / 12))])


def _spread(places: Sequence[float], limits: tuple[float, float], height: float) -> list[float]:
    """Places of labels, moved apart where they would overlap; `height` points show the range `limits`."""
    import numpy as np

    low, high = limits
    order = np.argsort(places, stable=True)
    steps = (high - low) * LINE / height * np.arange(len(places))
    up = np.maximum.accumulate(np.maximum(np.asarray(places)[order], low) - steps) + steps
    down = np.minimum.accumulate((np.minimum(up, high) - steps)[::-1])[::-1] + steps
    return [float(place) for place in down[np.argsort(order)]]
