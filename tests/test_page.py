"""The page of a run: what is there is shown, what is shown is what the files say, and nothing is fetched."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import invoke, refused, save_dense, tensors

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.core.jsonfile import read_json, write_json
from hf_moe_expand.evaluation.chat import Sample
from hf_moe_expand.evaluation.harness import Metric, TaskScore
from hf_moe_expand.evaluation.perplexity import LanguageScore
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.evaluation.validation import ValidationCurves
from hf_moe_expand.planning.results import RoutingResult
from hf_moe_expand.report.page import make_page

VOID = {"meta", "link", "br", "hr", "img", "input"}
OLD, NEW = ["en", "zh"], ["el", "hu"]
SECTIONS = ["languages", "samples", "tasks", "plan", "training", "routing", "steps", "recipe"]
RECIPE = "base: org/tiny\noutput: $OUT/run\nold: {en: $DATA/en.jsonl}\n"


class Page(HTMLParser):
    """A page taken apart. Refuses tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text, self.rows = [], [], "", []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"{tag}: an attribute is given twice"
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if "style" not in self.open else ""
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data

    @property
    def sections(self):
        return [attributes["id"] for tag, attributes in self.elements if tag == "h2"]


def page_of(run):
    return Page(make_page(run))


def scores(languages, models):
    """Different for each language and model."""
    score = lambda i, m: LanguageScore(10.0 + i + m, 2 + 0.1 * i + 0.037 * m * (-1) ** i, 100, 200)  # noqa: E731
    return {model: {code: score(i, m) for i, code in enumerate(languages)} for m, model in enumerate(models)}


def stage_of(run, checkpoint, name, stage, logs=(), tokens=None):
    """A stage's folder as training leaves it, without weights."""
    folder = run / name
    folder.mkdir(parents=True)
    config = read_json(checkpoint / "config.json", "")
    entry = {"stage": stage, "steps": 20, "documents": tokens or {"el": 7}, "tokens": tokens or {"el": 1234}, "seed": 0}
    config["expansions"][-1]["stages"].append(entry)
    write_json(folder / "config.json", config)
    write_json(folder / "trainer_state.json", {"log_history": [*logs, {"step": 20, "train_loss": 3.0}]})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run folder that has everything that a page can show."""
    root = tmp_path_factory.mktemp("runs")
    save_dense(root / "tiny")
    plan = Plan("layer-moe", [3, 2, 2], [1], old=OLD, new=NEW, settings={"similarity": [0.1, 0.3, 0.2]})
    run = root / "layer-moe"
    plan.save(run / "plan.json")
    expand_checkpoint(root / "tiny", run / "expanded", plan)
    logs = [{"step": 10 * i, "loss": 4.5 - i / 2, "next_token_loss": 4.4 - i / 2} for i in (1, 2)]
    stage_of(run, run / "expanded", "post_pretrain", "post-pretrain", logs)
    curves = ValidationCurves(NEW, 20, [0, 20], {}, {}, {"el": [3.0, 2.0], "en": [1.0, 1.5]})
    curves.save(run / "post_pretrain" / "validation.json")
    stage_of(run, run / "post_pretrain", "review", "review", logs, tokens={"en": 99, "el": 1234})
    names = ["base", "post-pretrained", "reviewed"]
    tasks = {name: {"arc_hu": TaskScore({"acc": Metric(0.25 + i / 8, 0.01)}, 25, 50, 100, "1", "0.4")}
             for i, name in enumerate(names)}  # fmt: skip
    samples = [Sample("en", "It is", {name: f"raining, {name}" for name in names}), Sample("el", "Ο", {"base": "x"})]
    Evaluation(OLD, NEW, scores(OLD + NEW, names), tasks=tasks, samples=samples).to_json(run / "evaluation.json")
    codes = OLD + NEW
    share = {code: [[0.25, 0.75] if i % 2 else [0.875, 0.125] for _ in range(3)] for i, code in enumerate(codes)}
    RoutingResult(
        {"en": 0, "zh": 0, "el": 1, "hu": 1}, 100, [0, 1, 2], share, share, {c: [0.9, 0.5, 0.1] for c in codes},
        {c: [1, 1, 1] for c in codes}, {c: [0.9, None, None] for c in codes}, [[[1.0] * 4] * 4] * 3, [0.5, None],
        dict.fromkeys(codes, 12.5), dict.fromkeys(codes, 99.25), [0],
    ).to_json(run / "routing.json")  # fmt: skip
    (run / "recipe.yaml").write_text(RECIPE)
    steps = ("analyze", "plan", "expand", "post_pretrain", "review", "evaluate")
    write_json(run / "steps.json", {name: {"seconds": 75.0, "summary": f"{name} said so"} for name in steps})
    return root


@pytest.fixture
def run(made, tmp_path):
    return Path(shutil.copytree(made / "layer-moe", tmp_path / "runs" / "qwen-el"))


def test_a_section_is_left_out_where_its_files_are_not_there(run, tmp_path):
    left = SECTIONS
    for files, gone in (
        ([], []),
        (["recipe.yaml"], ["recipe"]),
        (["routing.json"], ["routing"]),
        (["post_pretrain", "review"], ["training"]),
        (["steps.json", "expanded"], ["steps"]),
        (["evaluation.json"], ["languages", "samples", "tasks"]),
    ):
        for name in files:
            (run / name).rename(tmp_path / name)
        left = [name for name in left if name not in gone]
        assert page_of(run).sections == left
    (tmp_path / "evaluation.json").rename(run / "evaluation.json")
    (run / "plan.json").unlink()
    assert page_of(run).sections == ["languages", "samples", "tasks"]


def test_languages_samples_and_tasks_are_those_of_evaluation_json(run):
    found = Evaluation.from_json(run / "evaluation.json")
    header, languages = found.rows()
    rows = page_of(run).rows
    assert rows[: 1 + len(languages)] == [header, *languages]
    assert languages[0] == ["en (old)", "2.000", "2.037", "2.074", "+3.7 %"]
    assert ["en", "It is", "raining, base", "raining, reviewed"] in rows
    assert ["el", "Ο", "x", "-"] in rows
    task = ["arc_hu (25-shot, 50 of 100)", "acc", "0.2500 ± 0.0100", "0.3750 ± 0.0100", "0.5000 ± 0.0100", "+0.2500"]
    assert task in rows
    Evaluation(OLD, NEW, tasks=found.tasks).to_json(run / "evaluation.json")
    assert page_of(run).sections[:2] == ["tasks", "plan"]


def test_a_stage_s_table_has_text_at_hand_text_seen_and_held_out_text(run):
    assert ["language", "documents at hand", "tokens at hand", "held-out bits per byte"] in page_of(run).rows
    assert ["el", "7", "1,234", "3.000 to 2.000"] in page_of(run).rows
    assert ["en", "–", "–", "1.000 to 1.500"] in page_of(run).rows
    config = read_json(run / "review" / "config.json", "")
    stage = config["expansions"][-1]["stages"][-1]
    stage |= {"blocks_seen": 5, "tokens_seen": 4321, "tokens_seen_by_language": {"en": 4000, "el": 321}}
    write_json(run / "review" / "config.json", config)
    assert "4,321 tokens seen, in 5 blocks." in page_of(run).text
    assert ["en", "99", "99", "4,000"] in page_of(run).rows


def test_what_was_frozen_is_what_the_stages_may_not_touch(run):
    count = {name: value.numel() for name, value in tensors(run / "expanded").items()}
    routers, classifiers = (
        sum(size for name, size in count.items() if kind in name) for kind in ("router", "classifier")
    )
    page, total, trained = page_of(run), sum(count.values()), routers + classifiers
    assert f"Frozen: {total - trained:,} of {total:,} parameters." in page.text
    assert f"Trained: routers {routers:,}, classifiers {classifiers:,}." in page.text
    assert ["review", "1.2 min", "review said so"] in page.rows


def test_it_is_well_formed_fetches_nothing_and_its_figure_has_words(made):
    text = make_page(made / "layer-moe")
    page = Page(text)
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "image", "object"}
    for tag, attributes in page.elements:
        assert not {"src", "srcset"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert attributes.get("href", attributes.get("xlink:href", "#")).startswith("#")
    (figure,) = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert (figure["role"], figure["aria-label"]) == ("img", "Loss by step of each stage")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for outside in ("url(", "@import", "<dc:date>", "matplotlib.org"):
        assert outside not in text.replace("url(#", "")


def test_hostile_names_and_recipes_stay_text(run):
    hostile = '<script>alert("1")</script>'
    found = Evaluation(["en", hostile], NEW, scores(["en", hostile, *NEW], ["base", "<b onload=x>"]))
    found.to_json(run / "evaluation.json")
    (run / "recipe.yaml").write_text("# <pre><img src=https://example.org/x.png>\nbase: '<i>&amp;'\n")
    steps = read_json(run / "steps.json", "")
    steps["plan"]["summary"] = "</table><iframe>"
    write_json(run / "steps.json", steps)
    plan = read_json(run / "plan.json", "")
    write_json(run / "plan.json", plan | {"method": hostile})
    page = page_of(run)
    assert not {"script", "img", "b", "i", "iframe"} & {tag for tag, _ in page.elements}
    assert hostile in page.text
    assert "<pre><img src=https://example.org/x.png>" in page.text
    assert "'<i>&amp;'" in page.text
    assert "</table><iframe>" in page.text


@pytest.fixture
def apart(made, tmp_path, monkeypatch):
    """As `plan`, `expand`, `train post-pretrain`, `train review` and `evaluate` leave one folder."""
    folder = tmp_path / "apart"
    folder.mkdir()
    for name in ("plan.json", "evaluation.json"):
        shutil.copy(made / "layer-moe" / name, folder)
    for name, here in (("post_pretrain", "big-1"), ("review", "big-2")):
        shutil.copytree(made / "layer-moe" / name, folder / here)
    monkeypatch.chdir(folder)
    return folder


def test_the_page_of_single_commands(apart):
    assert invoke("report", ".", "big-1", "big-2") == "wrote report.html\n"
    refused(invoke, "report", ".", "big-1", "big-2", says="exists already")
    text = (apart / "report.html").read_text("utf-8")
    assert Page(text).sections == ["languages", "samples", "tasks", "plan", "training"]
    assert re.search(r"post-pretrain: big-1.*review: big-2", Page(text).text, re.DOTALL)
    assert str(apart) not in text
    hostile = (apart / "big-2").rename(apart / "<b onload=x>$x^2$ 文")
    page = Page(make_page(hostile))  # a checkpoint alone
    assert page.text.count(f"review: {hostile.name}") == 2  # the heading, and the figure
    assert "big-1" not in page.text
    assert "b" not in [tag for tag, _ in page.elements]


def test_what_has_no_page(made, run, tmp_path):
    (tmp_path / "other").mkdir()
    for folders, says in (
        (["nowhere"], "no such folder; give the `output` of a recipe"),
        (["other"], "other: not the folder of a run"),
        ([run, "missing"], "missing: no such folder"),
        ([run, "other", run / "review"], "other: a page tells of one run"),
        ([made / "tiny"], "tiny: a qwen2 checkpoint, not an expanded one"),
    ):
        refused(make_page, *(tmp_path / folder for folder in folders), says=says)
    (run / "recipe.yaml").write_text(f"base: org/tiny  # hf_{'a' * 30}\n")
    refused(make_page, run, says="holds an access token")
    for wrong in ([0.1, [None], 0.2], [0.1], 3):
        Plan("layer-moe", [3, 2, 2], [1], old=OLD, new=NEW, settings={"similarity": wrong}).save(run / "plan.json")
        refused(make_page, run, says=r"plan\.json: settings: ")


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(run, tmp_path):
    shutil.copyfile(run / "routing.json", run / "review" / "routing.json")
    first = make_page(run)
    assert "<h3>review</h3>" in first  # where the second routing analysis lies
    other = shutil.copytree(run, tmp_path / "elsewhere" / run.name)
    assert make_page(other) == first
    assert str(tmp_path) not in first
