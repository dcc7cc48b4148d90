"""The page of what single commands made: checkpoints, and a folder with JSON files."""

import re

import pytest
from conftest import invoke, save_dense
from test_page import NEW, OLD, logs, page_of, scores, stage_of

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.report.page import make_page


@pytest.fixture
def made(tmp_path):
    """As after `plan`, `expand`, `train post-pretrain`, `train review` and `evaluate` in one folder."""
    save_dense(tmp_path / "tiny")
    plan = Plan("moe-lpr", [2, 2, 2], old=OLD, new=NEW)
    plan.save(tmp_path / "plan.json")
    expand_checkpoint(tmp_path / "tiny", tmp_path / "big", plan)
    stage_of(tmp_path, tmp_path / "big", "big-1", "post-pretrain", logs(loss=(3.0, 2.0), next_token_loss=(2.9, 1.9)))
    stage_of(tmp_path, tmp_path / "big-1", "big-2", "review", logs(loss=(2.5, 2.25)))
    models = Evaluation(OLD, NEW, scores(OLD + NEW, ["tiny", "big-1", "big-2"]))
    models.to_json(tmp_path / "evaluation.json")
    return tmp_path


def test_the_page_of_single_commands(made, monkeypatch):
    monkeypatch.chdir(made)
    said = invoke("report", ".", "big-1", "big-2")
    assert said == "wrote report.html\n"
    page = type(page_of(made))((made / "report.html").read_text("utf-8"))
    assert page.sections == ["languages", "plan", "training"]
    assert re.search(r"post-pretrain: big-1.*review: big-2", page.text, re.DOTALL)
    assert "3.000 to 2.000" in (made / "report.html").read_text("utf-8")
    assert "2.500 to 2.250" in (made / "report.html").read_text("utf-8")
    assert str(made) not in (made / "report.html").read_text("utf-8")


def test_checkpoints_alone(made, monkeypatch):
    monkeypatch.chdir(made)
    invoke("report", "big-2", "--out", "two.html")
    text = (made / "two.html").read_text("utf-8")
    assert "review: big-2" in text
    assert "big-1" not in text
    assert make_page(made / "big") != text  # before any stage
    hostile = (made / "big-2").rename(made / "<b onload=x>$x^2$ 文")
    page = type(page_of(made))(make_page(hostile))
    assert page.text.count(f"review: {hostile.name}") == 2  # the heading, and the figure
    assert "b" not in [tag for tag, _ in page.elements]


def test_what_it_refuses(made):
    with pytest.raises(InputError, match="tiny: a qwen2 checkpoint, not an expanded one"):
        make_page(made / "tiny")
    (made / "other").mkdir()
    with pytest.raises(InputError, match="other: a page tells of one run"):
        make_page(made, made / "other", made / "big-1")
    with pytest.raises(InputError, match="missing: no such folder"):
        invoke("report", made, made / "missing")
    with pytest.raises(InputError, match="other: not the folder of a run"):
        make_page(made / "other")
