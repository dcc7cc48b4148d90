"""Figures of results: what they show, and how they stand in a page."""

import math
import re

import pytest
from conftest import run_python
from test_page import Page, routing

from hf_moe_expand.report.figures import Line, allocation, curves, expert_0_scores, expert_shares, svg


def shown(figure):
    return Page(str(svg(figure, "said")[1])).text.split()


def test_bars_are_as_high_as_the_experts_and_dark_where_a_classifier_judges():
    figure = allocation([4, 2, 3], [0.1, 0.3, 0.2], "similarity", [1])
    axes, over = figure.axes
    assert [bar.get_height() for bar in axes.patches] == [4, 2, 3]
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert colours[0] == colours[2] != colours[1]
    assert list(over.lines[0].get_ydata()) == [0.1, 0.3, 0.2]
    assert {"experts", "similarity", "layer", "0", "1", "2"} <= set(shown(figure))


def test_old_lines_are_dashed_and_lines_are_named():
    figure = curves([Line("en", [0, 9], [1.0, 2.0], old=True), Line("中文", [0, 9], [2.0, 1.0])], "step")
    assert [line.get_linestyle() for line in figure.axes[0].lines] == ["--", "-"]
    assert {"en", "中文", "step"} <= set(shown(figure))
    assert "en" not in shown(curves([Line("en", [0, 9], [1.0, 2.0])], "step"))  # the caption names it
    many = [Line(f"l{i}", [0, 1], [1.0, 2.0]) for i in range(40)]
    assert not [word for word in shown(curves(many, "step")) if word.startswith("l")]


def test_a_long_log_is_thinned_and_gaps_stay_gaps():
    (line,) = curves([Line("x", range(10_000), range(10_000))], "step").axes[0].lines
    assert 400 < len(line.get_xdata()) <= 500
    assert list(line.get_xdata()) == list(line.get_ydata())
    assert "step" in shown(curves([Line("x", [1, 2, 3], [1.0, math.nan, math.inf])], "step"))


def test_each_layer_has_a_heat_map_of_its_shares():
    figure = expert_shares(routing())
    *maps, _ = figure.axes
    assert [axes.get_title(loc="left") for axes in maps] == ["layer 0", "layer 1", "layer 2"]
    cells = maps[0].collections[0]
    assert cells.get_array().tolist() == [[0.875, 0.125], [0.25, 0.75]] * 2
    assert cells.get_clim() == (0, 1)
    assert [label.get_text() for label in maps[0].get_yticklabels()] == ["en", "zh", "el", "hu"]
    lines = expert_0_scores(routing()).axes[0].lines
    assert [line.get_linestyle() for line in lines] == ["--", "--", "-", "-"]
    assert list(lines[0].get_ydata()) == [0.9, 0.5, 0.1]


@pytest.mark.parametrize("draw", [lambda name: curves([Line(name, [0, 1], [1.0, 2.0])] * 2, name),
                                  lambda name: allocation([2, 3], [0.1, 0.2], name)])  # fmt: skip
def test_a_figure_is_an_element_whose_words_stay_words(draw):
    hostile = '<b title="$x^2$" onload=x>'
    caption, element = svg(draw(hostile), hostile, "stage")
    assert (caption, element) == svg(draw(hostile), hostile, "stage")
    page = Page(str(element))
    assert caption == hostile
    assert hostile in page.text
    assert not {"b", "image", "script"} & {tag for tag, _ in page.elements}
    (root,) = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert (root["role"], root["aria-label"]) == ("img", f"stage: {hostile}")


def test_ids_differ_between_figures_and_each_reference_has_its_id():
    lines = [Line("x", [0, 1], [1.0, 2.0])]
    one, other = (str(svg(curves(lines, "step"), "loss", stage)[1]) for stage in ("review", "joint"))
    ids = [set(re.findall(r' id="([^"]*)"', text)) for text in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert set(re.findall(r'(?:url\(|href=")#([^")]*)', one)) <= ids[0]


def test_matplotlib_waits_for_a_figure():
    code = "from hf_moe_expand.report import figures, page; print('matplotlib' in sys.modules)"
    assert run_python(code) == "False\n"
