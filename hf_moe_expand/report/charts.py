"""Charts as SVG elements of an HTML page: text stays text, colours are the page's CSS variables, no element has an id.

Charts are as wide as a phone's screen, so that their text is readable there.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Concatenate, ParamSpec
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from markupsafe import Markup

from .drawing import (
    COLOURS,
    TOOLTIP,
    cell_size,
    draw_allocation,
    draw_cells,
    draw_changes,
    draw_lines,
    drawing,
    lines_height,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
WIDTH = 340
_VARIABLES = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
_REFERENCE = "{http://www.w3.org/1999/xlink}href"
_DECIMALS = re.compile(r"(\.\d\d)\d+")


def _chart(
    draw: Callable[Concatenate["Axes", P], object], size: Callable[..., tuple[float, float]], grown: bool = False
) -> Callable[Concatenate[str, P], Markup]:
    """Returns a function that makes a chart from a description and the arguments of `draw`.

    Args:
        size: computes the size in points from the arguments of `draw`.
        grown: whether the size is that of the axes alone, and fixed; else the chart is as wide as its column.
    """

    def chart(description: str, *args: P.args, **kwargs: P.kwargs) -> Markup:
        with drawing(*size(*args), layout=None if grown else "constrained") as figure:
            draw(figure.add_axes((0, 0, 1, 1)) if grown else figure.subplots(), *args, **kwargs)
            return _svg(figure, description, grown)

    return chart


def _map_size(rows: Sequence[str], columns: Sequence[str], *_: object) -> tuple[float, float]:
    width, height = cell_size(rows, columns)
    return width * len(columns), height * len(rows)


line_chart = _chart(draw_lines, lambda lines, *_: (WIDTH, lines_height(lines)))
allocation_chart = _chart(draw_allocation, lambda *_: (WIDTH, 210))
change_chart = _chart(draw_changes, lambda changes, *_: (WIDTH, 20 * len(changes) + 40))
heat_map = _chart(draw_cells, _map_size, grown=True)


def _svg(figure: "Figure", description: str, grown: bool) -> Markup:
    """The figure as one flat SVG element."""
    figure.patch.set_visible(False)
    stream = StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has these glyphs
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        box = "tight" if grown else None
        figure.savefig(stream, format="svg", metadata=metadata, bbox_inches=box, pad_inches=2 / 72)
    drawn = fromstring(stream.getvalue())
    root = Element("svg", {"class": "fixed" if grown else "chart", "viewBox": drawn.attrib["viewBox"]})
    if grown:
        root.attrib |= {side: drawn.attrib[side].removesuffix("pt") for side in ("width", "height")}
    root.attrib |= {"role": "img", "aria-label": description}
    root.extend(list(_shapes(drawn, {element.get("id", ""): element for element in drawn.iter()})))
    return Markup(tostring(root, encoding="unicode"))


def _shapes(group: Element, ids: Mapping[str, Element], tooltip: str = "") -> Iterator[Element]:
    """The visible shapes of a group: without ids, references and clipping, styled by attributes."""
    for element in group:
        name, key = element.tag.rpartition("}")[2], element.get("id", "")
        if name == "g":
            yield from _shapes(element, ids, key.removeprefix(TOOLTIP) if key.startswith(TOOLTIP) else tooltip)
        if name not in ("path", "text", "use"):
            continue
        attributes = {key: value for key, value in element.attrib.items() if key not in ("id", "clip-path")}
        style = dict(part.strip().split(": ", 1) for part in attributes.pop("style").split(";") if part)
        if name == "use":  # a dot: its shape is in <defs>
            source = ids[attributes[_REFERENCE].removeprefix("#")]
            attributes = {"d": source.attrib["d"], "transform": f"translate({attributes['x']} {attributes['y']})"}
        attributes |= {key: _VARIABLES.get(value, value) for key, value in style.items() if key != "font-family"}
        if name != "text" and attributes.get("fill", "none") == "none" and "stroke" not in attributes:
            continue
        for key in {"d", "x", "y", "transform", "fill-opacity"} & attributes.keys():
            attributes[key] = _DECIMALS.sub(r"\1", attributes[key])
        shape = Element("text" if name == "text" else "path", attributes)
        shape.text = element.text if name == "text" else None
        if tooltip:
            SubElement(shape, "title").text = tooltip
        yield shape
