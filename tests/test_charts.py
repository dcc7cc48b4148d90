"""The charts of a run's page: their shapes, words and colours."""

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import run_python
from test_page import SIMILARITY

from hf_moe_expand.report import page as page_module
from hf_moe_expand.report.charts import allocation_chart, change_chart, heat_map, line_chart
from hf_moe_expand.report.drawing import COLOURS, Change, Line, with_means
from hf_moe_expand.report.page import _training_figures

INK, ACCENT, QUIET, HAIR, PAPER = (f"var(--{name})" for name in ("ink", "accent", "quiet", "hair", "paper"))


def shapes(svg, name, **attributes):
    wanted = {key.replace("_", "-"): value for key, value in attributes.items()}
    return [e for e in ET.fromstring(svg).iter(name) if wanted.items() <= e.attrib.items()]


def texts(svg, **attributes):
    return [e.text for e in shapes(svg, "text", **attributes)]


def corners(shape):
    """Places on a path; y goes down."""
    numbers = [float(number) for number in re.findall(r"-?[0-9.]+", shape.get("d"))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def lines(svg, colour):
    return [e for e in shapes(svg, "path", stroke=colour, fill="none") if e.find("title") is not None]


def dots(svg, colour):
    """Places of dots."""
    found = [e.get("transform") for e in shapes(svg, "path", fill=colour) if e.get("transform")]
    return [tuple(float(number) for number in re.findall(r"-?[0-9.]+", place)) for place in found]


def test_bars_are_as_high_as_the_experts_and_split_where_the_model_grew():
    svg = allocation_chart("said", [4, 2, 3], SIMILARITY, "alike", classifiers=[1], before=[2, 2, 2])
    bars = shapes(svg, "path", fill=INK, stroke=QUIET)
    heights = [max(y for _, y in corners(bar)) - min(y for _, y in corners(bar)) for bar in bars]
    assert [height / heights[0] for height in heights] == pytest.approx([1, 1, 1, 1, 0.5], abs=0.01)
    assert [bar.get("stroke-dasharray") for bar in bars] == ["4,3", None, "4,3", "4,3", None]
    assert [bar.get("fill-opacity") for bar in bars] == ["0.1", "0.1", "0.5", "0.1", "0.1"]
    (line,) = lines(svg, ACCENT)
    places = [y for _, y in corners(line)]
    assert sorted(range(3), key=lambda layer: -places[layer]) == [0, 2, 1]  # down is small
    assert dots(svg, ACCENT) == corners(line)
    assert {"experts", "alike", "layer", "0", "1", "2"} <= set(texts(svg))


def test_not_every_layer_of_many_has_a_number():
    svg = allocation_chart("said", [2] * 80)
    assert len(shapes(svg, "path", fill=INK)) == 80
    assert texts(svg, text_anchor="middle") == [*(str(layer) for layer in range(0, 80, 7)), "layer"]


def test_a_long_log_is_thinned_to_means_and_what_is_not_finite_is_left_out():
    line = Line("x", range(1001), [float(i) for i in range(1000)] + [float("nan")])
    parts = [list(range(i, i + 5)) for i in range(0, 1000, 5)]
    assert line.points == [(part[-1], sum(part) / 5) for part in parts]
    assert Line("x", [1, 2], [3.0, float("inf")]).points == [(1, 3.0)]


def test_a_training_that_diverged_at_once_has_a_page_too():
    logs = [{"step": step, "loss": 3.0, "balance_loss": float("nan")} for step in (1, 2)]
    whole, parts = _training_figures(logs, {}, "post-pretraining")
    assert len(lines(whole["svg"], INK)) == 1
    assert texts(parts["svg"]) == ["no finite number at any step"]


def test_old_lines_are_dashed_and_in_the_colour_of_text_and_a_single_point_is_a_dot():
    svg = line_chart("said", [Line("en", [0, 9], [1.0, 2.0], "old"), Line("<el>", [0, 9], [2.0, 1.0])], "step")
    (old,), (new,) = lines(svg, INK), lines(svg, ACCENT)
    assert (old.get("stroke-dasharray"), new.get("stroke-dasharray")) == ("4,3", None)
    assert [line.find("title").text for line in (old, new)] == ["en", "<el>"]
    assert (texts(svg, fill=INK), texts(svg, fill=ACCENT)) == (["en"], ["<el>"])
    point = line_chart("said", [Line("x", [7], [2.0])], "step")
    assert len(dots(point, ACCENT)) == 1
    assert texts(point, text_anchor="middle") == ["7", "step"]


def test_labels_at_line_ends_do_not_overlap():
    found = [Line(f"l{i}", [0, 1], [1.0, 2.0 + 0.001 * i]) for i in range(12)]
    svg = line_chart("said", found, "step")
    ends = {e.text: float(e.get("y")) for e in shapes(svg, "text", fill=ACCENT)}
    assert sorted(ends, key=ends.get, reverse=True) == [line.label for line in found]
    places = sorted(ends.values())
    assert min(b - a for a, b in pairwise(places)) >= 12.5
    assert places[0] >= 10
    assert places[-1] <= float(ET.fromstring(svg).get("viewBox").split()[3])


def test_of_many_languages_the_means_are_labelled():
    many = [Line(f"l{i}", [0, 1], [float(i), float("nan") if i == 3 else 2.0 * i], "old" if i < 4 else "new")
            for i in range(13)]  # fmt: skip
    assert with_means(many[:12]) == many[:12]
    *thin, old, new = with_means(many)
    assert [line.thin for line in thin] == [True] * 13
    assert (old.y[0], math.isnan(old.y[1]), new.y) == (1.5, True, [8.0, 16.0])
    svg = line_chart("said", with_means(many), "layer")
    assert [line.get("stroke-width") for line in lines(svg, INK)] == ["0.8"] * 4 + ["1.8"]
    assert [line.get("stroke-width") for line in lines(svg, ACCENT)] == ["0.8"] * 9 + ["1.8"]
    assert (texts(svg, fill=INK), texts(svg, fill=ACCENT)) == (["old, mean"], ["new, mean"])


def test_heat_map_cells_are_as_dark_as_their_values():
    svg = heat_map("said", ["a", "b"], ["0", "1"], [[0.25, 0.5], [None, 1.0]], "layer 7", True, 1.0, 1, [1, 1])
    quarter, half, empty, whole = shapes(svg, "path", stroke=HAIR)
    assert [float(e.get("fill-opacity", 1)) for e in (quarter, half, whole)] == pytest.approx([0.25, 0.5, 1], abs=0.01)
    assert [e.get("fill") for e in (quarter, half, empty, whole)] == [ACCENT, ACCENT, "none", ACCENT]
    numbers = {number: e.get("fill") for e in shapes(svg, "text") if (number := e.text) in ("25", "50", "100")}
    assert numbers == {"25": INK, "50": INK, "100": "var(--on)"}
    frames = shapes(svg, "path", stroke=INK, stroke_width="1.8")
    assert len(frames) == 2
    assert len(shapes(svg, "path", stroke=INK, stroke_width="1.5")) == 1
    assert {"layer 7", "a", "b", "0", "1"} <= set(texts(svg))
    names = [f"l{i}" for i in range(30)]
    many = heat_map("said", names, ["0"], [[0.5]] * 30)
    assert texts(many) == ["0", *names]
    assert texts(heat_map("said", ["a"], ["x"], [[float("nan")]])) == ["x", "a"]


def test_names_of_columns_that_are_wider_than_a_cell_are_turned():
    svg = heat_map("said", ["en"], ["en", "quy_Latn"], [[0.1, 0.2]])
    assert [e.get("transform").startswith("rotate(-90") for e in shapes(svg, "text")[:3]] == [True, True, False]
    svg = heat_map("said", ["quy_Latn_of_a_place"], ["en"], [[0.1]])
    assert texts(svg) == ["en", "quy_Latn_of_a…", "0.10"]


def test_a_change_runs_from_its_ring_to_its_dot():
    change = Change("en", [2.0, 3.0, 2.5, float("nan")], "old", "+25%")
    svg = change_chart("said", [Change("old languages"), change, Change("el", [float("nan")])], "bits per byte")
    ((begin, row),) = dots(svg, PAPER)
    *places, (end, _) = dots(svg, INK)
    middle = places[1][0]
    assert begin < end < middle
    assert (end - begin) / (middle - begin) == pytest.approx(0.5, abs=0.01)
    assert lines(svg, INK)[0].get("stroke-dasharray") == "4,3"
    assert {"old languages", "en", "+25%", "el", "bits per byte"} <= set(texts(svg))
    height = {e.text: float(e.get("y")) for e in shapes(svg, "text")}
    assert abs(height["en"] - row) < 6
    nothing = change_chart("said", [Change("all languages"), Change("el", [float("nan")])], "bits per byte")
    assert "no finite bits per byte" in texts(nothing)


def test_a_chart_is_described_and_has_neither_ids_nor_references_nor_colours_of_its_own():
    hostile = '<b title="$x^2$">'
    svg = line_chart(hostile, [Line(hostile, [0, 1], [1.0, 2.0]), Line("中文", [0, 1], [2.0, 1.0], "old")], "step")
    assert svg == line_chart(
        hostile, [Line(hostile, [0, 1], [1.0, 2.0]), Line("中文", [0, 1], [2.0, 1.0], "old")], "step"
    )
    root = ET.fromstring(svg)
    assert root.attrib == {"class": "chart", "viewBox": "0 0 340 180", "role": "img", "aria-label": hostile}
    assert {e.tag for e in root.iter()} == {"svg", "path", "text", "title"}
    for element in root.iter():
        assert not {"id", "href", "style", "clip-path", "font-family"} & element.attrib.keys()
    assert "#" not in svg
    assert {"中文", '<b title="$x^…'} <= set(texts(svg))


def test_pictures_have_the_colours_that_the_page_gives_its_variables():
    style = Path(page_module.__file__).parents[1].joinpath("pages", "report.html").read_text("utf-8")
    light = dict(re.findall(r"--(\w+): (#\w+);", style.split(":root {")[1].split("}")[0]))
    light["on"] = light["on"].replace("#fff", "#ffffff")
    assert {name: light[name] for name in COLOURS} == COLOURS


def test_matplotlib_waits_for_a_chart():
    code = "from hf_moe_expand.report import figures, page; print('matplotlib' in sys.modules)"
    assert run_python(code) == "False\n"
