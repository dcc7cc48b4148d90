"""Small charts as SVG elements for an HTML page: text stays text; colours and fonts are the page's, by class.

Every chart is as wide as a phone, so that its text is readable there. What belongs to old languages has the class `old`
(dashed, the text's colour), what belongs to new ones `new` (the accent colour).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

WIDTH = 340
_LINE = 13  # height of a line of text
_LETTER = 6.4  # width of a letter, on average
_LONGEST = 14  # letters of a label
_MOST_LABELS = 12
_MOST_POINTS = 200


@dataclass(frozen=True)
class Line:
    """A line of a chart; points that are no finite number are left out."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    kind: str = "new"

    @property
    def points(self) -> list[tuple[float, float]]:
        """At most 200 points: each the mean of a few neighbours where there are more."""
        found = [(x, y) for x, y in zip(self.x, self.y, strict=True) if math.isfinite(y)]
        size = -(-len(found) // _MOST_POINTS)
        parts = [found[i : i + size] for i in range(0, len(found), size)] if found else []
        return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


class _Canvas:
    """An SVG element, and the shapes that go on it."""

    def __init__(self, width: float, height: float, description: str, fixed: bool = False) -> None:
        size = {"width": _number(width), "height": _number(height)} if fixed else {}
        view = f"0 0 {_number(width)} {_number(height)}"
        self.root = Element("svg", {"viewBox": view, **size, "role": "img", "aria-label": description})
        self.root.set("class", "fixed" if fixed else "chart")

    def shape(self, name: str, kind: str, **attributes: float | str) -> Element:
        written = {
            key.replace("_", "-"): value if isinstance(value, str) else _number(value)
            for key, value in attributes.items()
        }
        return SubElement(self.root, name, {"class": kind, **written})

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.shape("text", f"{kind} {anchor}".strip(), x=x, y=y).text = text

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.shape("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)

    def svg(self) -> str:
        return tostring(self.root, encoding="unicode")


@dataclass(frozen=True)
class _Scale:
    """From data to places on the canvas."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self, most: int = 4, whole: bool = False) -> list[float]:
        from matplotlib.ticker import MaxNLocator  # heavy

        found = MaxNLocator(most, integer=whole, steps=[1, 2, 2.5, 5, 10]).tick_values(self.low, self.high)
        edge = 1e-9 * (self.high - self.low)
        return [float(tick) for tick in found if self.low - edge <= tick <= self.high + edge]


def line_chart(
    lines: Sequence[Line],
    description: str,
    x_label: str,
    y_range: tuple[float, float] | None = None,
    whole: bool = True,
) -> str:
    """Lines over steps or layers, labelled at their ends; words in their place where no point is a finite number.

    Args:
        y_range: by default what the lines need.
        whole: the values of x are whole numbers.
    """
    drawn = [(line, line.points) for line in lines if line.points]
    if not drawn:
        canvas = _Canvas(WIDTH, 2 * _LINE, description)
        canvas.text(0, _LINE, f"no finite number at any {x_label}")
        return canvas.svg()
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    labelled = 1 < len(drawn) <= _MOST_LABELS
    margin = max(len(_short(line.label)) for line, _ in drawn) * _LETTER + 8 if labelled else 8
    height = max(180.0, 50.0 + _LINE * len(drawn) * labelled)
    canvas = _Canvas(WIDTH, height, description)
    y = _Scale(*(y_range or _widened(min(ys), max(ys))), height - 34, 8)
    left = 8 + max(len(_tick(tick)) for tick in y.ticks()) * _LETTER
    x = _Scale(*_apart(min(xs), max(xs)), left + 6, WIDTH - margin)
    _grid(canvas, x, y, left, x_label, whole)
    for line, points in drawn:
        path = " ".join(f"{_number(x(a))},{_number(y(b))}" for a, b in points)
        SubElement(canvas.shape("polyline", f"line {line.kind}", points=path), "title").text = line.label
        if len(points) <= 20:
            for a, b in points:
                canvas.shape("circle", f"dot {line.kind}", cx=x(a), cy=y(b), r=2)
    if labelled:
        ends = _spread([y(points[-1][1]) for _, points in drawn], 8, height - 34)
        for (line, _), end in zip(drawn, ends, strict=True):
            canvas.text(WIDTH - margin + 5, end + 4, _short(line.label), line.kind)
    return canvas.svg()


def allocation_chart(
    experts: Sequence[int],
    description: str,
    measure: Sequence[float] | None = None,
    measure_label: str = "",
    classifiers: Sequence[int] = (),
    before: Sequence[int] = (),
) -> str:
    """Bars of experts per layer and a line over them, as LayerMoE's figures have them.

    Args:
        measure: of each layer: the similarity of languages, or the deviation; its axis is on the right.
        classifiers: layers whose bars are filled.
        before: experts of each layer before this expansion: their part of the bar is dashed.
    """
    height, top = 210, 24
    canvas = _Canvas(WIDTH, height, description)
    count = _Scale(0, max(experts) + 1, height - 34, top)
    over = None if not measure else _Scale(*_widened(min(measure), max(measure)), height - 34, top)
    labels = [_tick(tick) for tick in over.ticks()] if over else []
    right = WIDTH - 8 - max(map(len, labels), default=0) * _LETTER
    x = _Scale(-0.6, len(experts) - 0.4, 22, right - 6)
    for tick in count.ticks(whole=True):
        canvas.line(22, count(tick), right - 6, count(tick), "grid")
        canvas.text(18, count(tick) + 4, _tick(tick), "small", "end")
    canvas.text(0, 12, "experts", "small")
    width = 0.7 * (x(1) - x(0))
    earlier = before or [0] * len(experts)
    for layer, (now, old) in enumerate(zip(experts, earlier, strict=True)):
        kind = "bar classified" if layer in classifiers else "bar"
        for low, high, shade in ((0, old, f"{kind} before"), (old, now, kind)):
            if high > low:
                canvas.shape(
                    "rect", shade, x=x(layer) - width / 2, y=count(high), width=width, height=count(low) - count(high)
                )
    _layer_numbers(canvas, x, len(experts), height)
    if over and measure:
        for tick, label in zip(over.ticks(), labels, strict=True):
            canvas.text(right, over(tick) + 4, label, "small new")
        canvas.text(WIDTH, 12, measure_label, "small new", "end")
        path = " ".join(f"{_number(x(layer))},{_number(over(value))}" for layer, value in enumerate(measure))
        canvas.shape("polyline", "line new", points=path)
        for layer, value in enumerate(measure):
            canvas.shape("circle", "dot new", cx=x(layer), cy=over(value), r=2.4)
    return canvas.svg()


@dataclass(frozen=True)
class Change:
    """A language's scores, from the first model to the last; without values, a heading."""

    label: str
    values: Sequence[float] = ()
    kind: str = "new"
    note: str = ""


def change_chart(changes: Sequence[Change], description: str, x_label: str) -> str:
    """A row a language: a ring for the first value, small dots between, a full dot for the last, and a note."""
    row = 20
    height = row * len(changes) + 40
    canvas = _Canvas(WIDTH, height, description)
    values = [value for change in changes for value in change.values if math.isfinite(value)]
    left = 10 + max(len(_short(change.label)) for change in changes if change.values) * _LETTER
    right = WIDTH - 8 - max(len(change.note) for change in changes) * _LETTER
    x = _Scale(*_widened(min(values), max(values)), left + 6, right - 6)
    for tick in x.ticks(5):
        canvas.line(x(tick), 4, x(tick), height - 32, "grid")
        canvas.text(x(tick), height - 18, _tick(tick), "small", "middle")
    canvas.text((left + right) / 2, height - 3, x_label, "small", "middle")
    for number, change in enumerate(changes):
        y = row * number + row / 2 + 4
        if not change.values:
            canvas.text(0, y + 4, change.label, "small strong")
            continue
        canvas.text(left, y + 4, _short(change.label), change.kind, "end")
        shown = [x(value) for value in change.values if math.isfinite(value)]
        if shown:
            canvas.line(shown[0], y, shown[-1], y, f"line {change.kind}")
            for place in shown[1:-1]:
                canvas.shape("circle", f"dot {change.kind}", cx=place, cy=y, r=1.8)
            canvas.shape("circle", f"ring {change.kind}", cx=shown[0], cy=y, r=4)
            if len(shown) > 1:
                canvas.shape("circle", f"dot {change.kind}", cx=shown[-1], cy=y, r=4)
        canvas.text(WIDTH, y + 4, change.note, "small", "end")
    return canvas.svg()


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    description: str,
    title: str = "",
    percent: bool = False,
    most: float | None = None,
    rule_after: int = 0,
    blocks: Sequence[int] = (),
) -> str:
    """Cells the darker, the larger the value; with the numbers in them where there are not too many.

    Args:
        values: `[rows, columns]`; None leaves a cell empty.
        most: the value of the darkest; the largest by default.
        rule_after: a rule below so many rows.
        blocks: sizes of squares on the diagonal, framed.
    """
    numbered = max(len(rows), len(columns)) <= 24
    wide, high = (30, 18) if numbered else (9, 9)
    left = 6 + max(len(_short(row)) for row in rows) * _LETTER * (1 if numbered else 0.7)
    top = _LINE + 4 if title else 2
    width = max(left + wide * len(columns) + 2, len(title) * _LETTER)
    canvas = _Canvas(width, top + high * len(rows) + _LINE + 4, description, fixed=True)
    size = "small" if numbered else "tiny"
    if title:
        canvas.text(left, _LINE - 3, title, "small strong")
    shown = [value for row in values for value in row if value is not None]
    most = most or max(shown, default=0) or 1
    for i, (label, row) in enumerate(zip(rows, values, strict=True)):
        y = top + high * i
        canvas.text(left - 4, y + high / 2 + (4 if numbered else 2), _short(label), size, "end")
        for j, value in enumerate(row):
            if value is None:
                continue
            share = min(max(value / most, 0), 1)
            x = left + wide * j
            canvas.shape("rect", "cell", x=x, y=y, width=wide - 1, height=high - 1, fill_opacity=f"{share:.2f}")
            if numbered:
                number = f"{100 * value:.0f}" if percent else f"{round(value, 2) + 0.0:.2f}".replace("-", "−")
                canvas.text(x + (wide - 1) / 2, y + high / 2 + 3.5, number, "on" if share > 0.55 else "off", "middle")
    for j, label in enumerate(columns):
        canvas.text(left + wide * (j + 0.5), top + high * len(rows) + _LINE - 1, _short(label), size, "middle")
    if rule_after:
        edge = top + high * rule_after - 0.5
        canvas.line(left, edge, left + wide * len(columns), edge, "rule")
    begin = 0.0
    for block in blocks:
        frame = {"x": left + wide * begin - 0.5, "y": top + high * begin - 0.5}
        canvas.shape("rect", "frame", **frame, width=float(wide * block), height=float(high * block))
        begin += block
    return canvas.svg()


def _grid(canvas: _Canvas, x: _Scale, y: _Scale, left: float, x_label: str, whole: bool) -> None:
    for tick in y.ticks():
        canvas.line(left, y(tick), x.end, y(tick), "grid")
        canvas.text(left - 4, y(tick) + 4, _tick(tick), "small", "end")
    for tick in x.ticks(whole=whole):
        canvas.text(x(tick), y.begin + 15, _tick(tick), "small", "middle")
    canvas.text((x.begin + x.end) / 2, y.begin + 30, x_label, "small", "middle")


def _layer_numbers(canvas: _Canvas, x: _Scale, layers: int, height: float) -> None:
    for layer in range(0, layers, max(1, math.ceil(layers / 12))):
        canvas.text(x(layer), height - 19, str(layer), "small", "middle")
    canvas.text((x.begin + x.end) / 2, height - 4, "layer", "small", "middle")


def _spread(places: Sequence[float], low: float, high: float) -> list[float]:
    """Places of labels, moved apart where they would overlap."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = [0.0] * len(places)
    least = low
    for index in order:
        moved[index] = least = max(places[index], least)
        least += _LINE
    most = high
    for index in reversed(order):
        moved[index] = most = min(moved[index], most)
        most -= _LINE
    return moved


def _apart(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 1, high + 1)


def _widened(low: float, high: float) -> tuple[float, float]:
    room = 0.08 * (high - low) or abs(high) * 0.05 or 0.5
    return low - room, high + room


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def _tick(value: float) -> str:
    return f"{value + 0.0:.6g}".replace("-", "−")


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
