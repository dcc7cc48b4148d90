"""The page of a run: what is there is shown, what is shown is what the files say, and nothing is fetched."""

import math
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import invoke, save_dense
from markupsafe import Markup
from safetensors import safe_open

from hf_moe_expand import Plan, expand_checkpoint, grow_checkpoint
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.jsonfile import read_json, write_json
from hf_moe_expand.core.recipe_paths import without_paths
from hf_moe_expand.evaluation.harness import Metric, TaskScore
from hf_moe_expand.evaluation.perplexity import LanguageScore
from hf_moe_expand.evaluation.report import Evaluation
from hf_moe_expand.evaluation.samples import Sample
from hf_moe_expand.evaluation.validation import ValidationCurves
from hf_moe_expand.planning.results import NO_CHOICE, DeviationResult, RoutingResult, SimilarityResult
from hf_moe_expand.report import figures
from hf_moe_expand.report.page import make_page

VOID = {"meta", "link", "br", "hr", "img", "input"}
OLD, NEW = ["en", "zh"], ["el", "hu"]
SIMILARITY = [0.1, 0.3, 0.2]
SECTIONS = ["languages", "samples", "tasks", "plan", "training", "routing", "steps", "recipe", "versions"]
RECIPE = "base: org/tiny\noutput: $OUT/run\nold: {en: $DATA/en.jsonl}\n"


class Page(HTMLParser):
    """A page taken apart. Refuses tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text, self.rows, self.row = [], [], "", [], None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        assert len(attributes) == len(attrs), f"{tag}: an attribute is given twice"
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.row = []
            self.rows.append(self.row)
        if tag in ("td", "th"):
            self.row.append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.row[-1] += data

    @property
    def sections(self):
        return [attributes["id"] for tag, attributes in self.elements if tag == "section"]

    @property
    def figures(self):
        """What the figures are called."""
        return [attributes["aria-label"] for tag, attributes in self.elements if tag == "svg"]


@pytest.fixture
def drawn():
    """For tests that look at figures: see `named`."""


@pytest.fixture(autouse=True)
def named(request, monkeypatch):
    """Figures have their names, and are not drawn, which takes long, unless a test asks for `drawn`."""

    def svg(figure, caption, about=""):
        return caption, Markup('<svg role="img" aria-label="{}"></svg>').format(
            f"{about}: {caption}".removeprefix(": ")
        )

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(figures, "svg", svg)


def page_of(run):
    return Page(make_page(run))


def scores(languages, models, first=2.0):
    """Different for each language and model."""
    made = {}
    for m, model in enumerate(models):
        made[model] = {
            code: LanguageScore(10.0 + i + m, first + 0.1 * i + 0.037 * m * (-1) ** i, 100, 200)
            for i, code in enumerate(languages)
        }
    return made


def stage_of(run, checkpoint, name, stage, logs=(), tokens=None, settings=None, **seen):
    """A stage's folder as training leaves it, without weights."""
    folder = run / name
    folder.mkdir(parents=True)
    config = read_json(checkpoint / "config.json", "")
    entry = {"stage": stage, "steps": 20, "documents": tokens or {"el": 7}, "tokens": tokens or {"el": 1234}, "seed": 0}
    config["expansions"][-1]["stages"].append(entry | seen | {"settings": settings or {}})
    write_json(folder / "config.json", config)
    write_json(folder / "trainer_state.json", {"log_history": [*logs, {"step": 20, "train_loss": 3.0}]})


def logs(**values):
    return [{"step": 10 * (i + 1), **{key: pair[i] for key, pair in values.items()}} for i in range(2)]


def record(run, *names):
    done = {name: {"seconds": 75.0, "summary": f"{name} said so"} for name in names}
    for name in done:
        if name.endswith("review"):
            done[name]["summary"] = "20 steps; 17 frozen tensors are byte-identical"
            done[name]["facts"] = {"frozen": 17}
    write_json(run / "steps.json", done)


def routing():
    codes = OLD + NEW
    share = {code: [[0.25, 0.75] if i % 2 else [0.875, 0.125] for _ in range(3)] for i, code in enumerate(codes)}
    return RoutingResult(
        {"en": 0, "zh": 0, "el": 1, "hu": 1}, 100, [0, 1, 2], share, share, {c: [0.9, 0.5, 0.1] for c in codes},
        {c: [1, 1, 1] for c in codes}, {c: [0.9, None, None] for c in codes}, [[[1.0] * 4] * 4] * 3, [0.5, None],
        dict.fromkeys(codes, 12.5), dict.fromkeys(codes, 99.25), [0],
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run folder of each kind; `layer-moe` has everything that a page can show."""
    root = tmp_path_factory.mktemp("runs")
    save_dense(root / "tiny")
    plan = Plan("layer-moe", [3, 2, 2], [1], old=OLD, new=NEW, settings={"similarity": SIMILARITY})
    run = root / "layer-moe"
    plan.save(run / "plan.json")
    SimilarityResult(OLD, NEW, 100, {}, SIMILARITY, SIMILARITY, SIMILARITY).to_json(run / "analysis.json")
    expand_checkpoint(root / "tiny", run / "expanded", plan)
    losses = {"loss": (4.0, 3.5), "next_token_loss": (3.9, 3.4), "balance_loss": (1.2, 1.1)}
    shares = {"expert_0_share": (0.6, 0.5), "expert_1_share": (0.4, 0.5)}
    stage_of(
        run, run / "expanded", "post_pretrain", "post-pretrain", logs(**losses, **shares), settings={"balance": 0.01}
    )
    curves = ValidationCurves(NEW, 20, [0, 20], {}, {}, {"el": [3.0, 2.0], "en": [1.0, 1.5]})
    curves.save(run / "post_pretrain" / "validation.json")
    review = {"language_prior_loss": (0.8, 0.3), "classifier_loss": (0.6, 0.2), "classifier_accuracy": (0.7, 0.9)}
    settings = {
        "language_prior": 0.1,
        "classifier": 0.1,
        "balance": 0.0,
        "training": {"deepspeed": "/home/me/zero.json"},
    }
    stage_of(run, run / "post_pretrain", "review", "review", logs(**losses, **review), settings=settings)
    names = ["base", "post-pretrained", "reviewed"]
    tasks = {name: {"arc_hu": TaskScore({"acc": Metric(0.25 + i / 8, 0.01)}, 25, 50, 100, "1", "0.4")}
             for i, name in enumerate(names)}  # fmt: skip
    samples = [Sample("en", "It is", {name: f"raining, {name}" for name in names}), Sample("el", "Ο", {"base": "x"})]
    Evaluation(OLD, NEW, scores(OLD + NEW, names), tasks=tasks, samples=samples).to_json(run / "evaluation.json")
    routing().to_json(run / "routing.json")
    (run / "recipe.yaml").write_text(RECIPE)
    record(run, "analyze", "plan", "expand", "post_pretrain", "review", "evaluate")

    run = root / "lifelong"
    first = Plan("moe-lpr", [2, 2, 2], old=["en"], new=["el"])
    first.save(run / "1" / "plan.json")
    expand_checkpoint(root / "tiny", run / "1" / "expanded", first)
    stage_of(run / "1", run / "1" / "expanded", "review", "review", logs(**losses))
    shutil.copyfile(run / "1" / "expanded" / "model.safetensors", run / "1" / "review" / "model.safetensors")
    second = Plan("moe-lpr", [3, 3, 3], old=["en", "el"], new=["tr"], grows_from=[2, 2, 2])
    second.save(run / "2" / "plan.json")
    grow_checkpoint(run / "1" / "review", run / "2" / "expanded", second)
    stage_of(run / "2", run / "2" / "expanded", "review", "review", logs(**losses))
    names = ["base", "after expansion 1", "after expansion 2"]
    found = Evaluation(["en"], ["el", "tr"], scores(["en", "el", "tr"], names), expansions=[["el"], ["tr"]])
    found.to_json(run / "evaluation.json")
    record(
        run, *(f"expansion {number}: {step}" for number in (1, 2) for step in ("plan", "expand", "review")), "evaluate"
    )

    run = root / "dmoe"
    plan = Plan("dmoe", [1, 2, 2], new=NEW, groups=[["el"], ["hu"]])
    plan.save(run / "plan.json")
    alike = [[1.0, 0.25], [0.25, 1.0]]
    DeviationResult(NEW, [0.1, 0.2, 0.3], {}, alike, [2], 1, 1e-3, 1, 1, 0).to_json(run / "analysis.json")
    expand_checkpoint(root / "tiny", run / "expanded", plan)
    group = {"group_loss": (0.7, 0.1), "language_prior_loss": (0.2, 0.1), "group_accuracy": (0.5, 1.0)}
    stage_of(run, run / "expanded", "group", "group", logs(**losses, **group), settings={"group": 1.28, "balance": 0.0})
    stage_of(run, run / "group", "joint", "joint", logs(**losses), settings={"balance": 0.02})
    record(run, "analyze", "plan", "expand", "group", "joint")
    return root


@pytest.fixture
def run(made, tmp_path):
    return Path(shutil.copytree(made / "layer-moe", tmp_path / "runs" / "qwen-el"))


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("layer-moe", []),
        ("lifelong", ["samples", "tasks", "recipe", "routing"]),
        ("dmoe", ["languages", "samples", "tasks", "recipe", "routing"]),
    ],
)
def test_each_kind_of_run_has_its_sections_and_links_to_them(made, kind, missing):
    page = page_of(made / kind)
    assert page.sections == [name for name in SECTIONS if name not in missing]
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links == [f"#{name}" for name in page.sections]


@pytest.mark.parametrize(
    ("files", "gone"),
    [
        (["evaluation.json"], {"languages", "samples", "tasks"}),
        (["recipe.yaml"], {"recipe"}),
        (["plan.json"], {"plan"}),
        (["routing.json"], {"routing"}),
        (["steps.json"], {"steps"}),
        (["post_pretrain", "review"], {"training"}),
        (["post_pretrain", "review", "expanded", "steps.json"], {"training", "steps", "versions"}),
    ],
)
def test_a_section_is_left_out_where_its_files_are_not_there(run, files, gone):
    for name in files:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    assert page_of(run).sections == [name for name in SECTIONS if name not in gone]


def test_the_table_of_languages_is_that_of_evaluation_json_old_languages_first(run, made):
    header, expected = Evaluation.from_json(run / "evaluation.json").rows()
    assert header == ["language", "base", "post-pretrained", "reviewed", "reviewed vs base"]
    rows = page_of(run).rows
    assert rows[: 1 + len(expected)] == [header, *expected]
    assert expected[0] == ["en (old)", "2.000", "2.037", "2.074", "+3.7 %"]
    lifelong = [row[0] for row in page_of(made / "lifelong").rows]
    assert lifelong[1:4] == ["en (old)", "el (expansion 1)", "tr (expansion 2)"]


def test_samples_of_text_are_those_that_the_run_has(run):
    rows = page_of(run).rows
    assert ["language", "held-out text begins", "base", "reviewed"] in rows
    assert ["en", "It is", "raining, base", "raining, reviewed"] in rows
    assert ["el", "Ο", "x", "-"] in rows


def test_tasks_and_their_change(run):
    rows = [row for row in page_of(run).rows if row[0].startswith("arc_hu")]
    assert rows == [["arc_hu (25-shot, 50 of 100)", "acc", "0.2500 ± 0.0100", "0.3750 ± 0.0100", "0.5000 ± 0.0100",
                     "+0.2500"]]  # fmt: skip
    found = Evaluation.from_json(run / "evaluation.json")
    Evaluation(OLD, NEW, tasks=found.tasks).to_json(run / "evaluation.json")
    assert page_of(run).sections[:2] == ["tasks", "plan"]


def test_what_training_saw_is_told_apart_from_what_was_at_hand(run, made, tmp_path):
    before = make_page(run)
    assert "tokens seen, in" not in before
    config = read_json(run / "review" / "config.json", "")
    stage = config["expansions"][-1]["stages"][-1]
    stage |= {"blocks_seen": 5, "tokens_seen": 4321, "tokens_seen_by_language": dict.fromkeys(stage["tokens"], 77)}
    write_json(run / "review" / "config.json", config)
    text = page_of(run).text
    assert "4,321 tokens seen, in 5 blocks." in text
    (code, at_hand), *_ = stage["tokens"].items()
    row = [code, f"{stage['documents'][code]:,}", f"{at_hand:,}", "77"]
    assert row in page_of(run).rows


def test_where_no_router_can_choose_no_figure_is_flat(run):
    """A token takes all of 2 experts: their shares, the balance loss and random routing cannot differ."""
    flat = ("Balance loss", "Choices of each expert", "Share of tokens by top-1 expert")
    page = page_of(run)
    assert all(any(name in figure for figure in page.figures) for name in flat)
    assert NO_CHOICE not in page.text
    assert "random experts" in page.text
    assert "No router can leave an expert out" not in page.text
    result = read_json(run / "routing.json", "")
    write_json(run / "routing.json", result | {"has_choice": False})
    plan = read_json(run / "plan.json", "")
    write_json(run / "plan.json", plan | {"experts_per_layer": [2, 2, 2], "classifier_layers": []})
    config = read_json(run / "post_pretrain" / "config.json", "")
    changes = {"num_experts_per_layer": [2, 2, 2], "classifier_layers": []}
    write_json(run / "post_pretrain" / "config.json", config | changes)
    page = page_of(run)
    assert not [figure for figure in page.figures if any(name in figure for name in flat)]
    assert any("Router's score of expert 0" in figure for figure in page.figures)
    assert NO_CHOICE in page.text
    assert ["perplexity", "router’s experts", "random experts"] not in page.rows
    assert "No router can leave an expert out, since no layer has more experts" in page.text
    del result["has_choice"]  # as older versions wrote it
    write_json(run / "routing.json", result)
    assert NO_CHOICE not in page_of(run).text


def test_a_number_that_did_not_change_has_no_figure(run):
    state = {"log_history": [{"step": step, "loss": 3.0, "next_token_loss": float(step)} for step in (1, 2)]}
    write_json(run / "review" / "trainer_state.json", state)
    shown = [name for name in page_of(run).figures if name.startswith("Review")]
    assert shown == ["Review: Loss: all 3.000 to 3.000; text 1.000 to 2.000"]
    write_json(run / "review" / "trainer_state.json", {"log_history": [{"step": 1, "loss": 3.0}]})
    assert not [name for name in page_of(run).figures if name.startswith("Review")]


def test_a_long_recipe_is_folded(run):
    assert [attributes for tag, attributes in page_of(run).elements if tag == "details" and "open" in attributes]
    (run / "recipe.yaml").write_text(RECIPE + "# more\n" * 50)
    page = page_of(run)
    assert not [attributes for tag, attributes in page.elements if tag == "details" and "open" in attributes]
    assert page.text.count("# more") == 50


def test_what_was_frozen_is_what_the_stages_may_not_touch(run):
    with safe_open(run / "expanded" / "model.safetensors", "pt") as weights:
        sizes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    count = {name: math.prod(shape) for name, shape in sizes.items()}
    routers = sum(size for name, size in count.items() if "router" in name)
    classifiers = sum(size for name, size in count.items() if "classifier" in name)
    page = page_of(run)
    total, trained = sum(count.values()), routers + classifiers
    assert f"Frozen: {total - trained:,} of {total:,} parameters." in page.text
    assert f"Trained: routers {routers:,}, classifiers {classifiers:,}." in page.text
    assert ["review", "1.2 min", "20 steps; 17 frozen tensors are byte-identical"] in page.rows


def test_losses_are_shown_that_the_stage_weighs(made):
    page = page_of(made / "layer-moe")
    assert "Balance loss, weight 0.01: loss 1.200 to 1.100" in page.text
    assert "Language prior loss, weight 0.1" in page.text
    assert page.text.count("Balance loss") == 1  # of the review stage it is no part
    dmoe = page_of(made / "dmoe").text
    assert "Group loss, weight 1.28" in dmoe
    assert "Language prior loss" not in dmoe


def test_it_is_well_formed_fetches_nothing_and_its_figures_have_words(made, drawn):
    for kind in ("layer-moe", "lifelong", "dmoe"):
        text = make_page(made / kind)
        page = Page(text)
        tags = {tag for tag, _ in page.elements}
        assert not tags & {"script", "link", "img", "iframe", "image", "object"}
        for tag, attributes in page.elements:
            assert not {"src", "srcset"} & set(attributes), tag
            assert not any(name.startswith("on") for name in attributes), tag
            assert attributes.get("href", "#").startswith("#")
            assert attributes.get("xlink:href", "#").startswith("#")
        figures = [attributes for tag, attributes in page.elements if tag == "svg"]
        assert figures
        assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in figures)
        ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements
        assert "url(" not in text.replace("url(#", "")
        assert "<date>" not in text
        assert "@import" not in text
        assert "prefers-color-scheme: dark" in text


def test_hostile_names_and_recipes_stay_text(run, drawn):
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
    assert not {"script", "img", "b", "i", "iframe"} & {tag for tag, _ in page.elements if tag != "b"}
    assert hostile in page.text
    assert "<pre><img src=https://example.org/x.png>" in page.text
    assert "'<i>&amp;'" in page.text
    assert "</table><iframe>" in page.text


def test_a_plan_with_as_many_experts_everywhere_has_no_table(made):
    assert ["layer", "experts"] not in page_of(made / "lifelong").rows
    assert ["layer", "experts", "classifier", "similarity"] in page_of(made / "layer-moe").rows


def test_the_time_of_a_step_is_in_seconds_or_minutes(run):
    write_json(
        run / "steps.json", {"plan": {"seconds": 59.94, "summary": "x"}, "review": {"seconds": 90, "summary": "y"}}
    )
    rows = page_of(run).rows
    assert ["plan", "59.9 s", "x"] in rows
    assert ["review", "1.5 min", "y"] in rows


def test_a_record_of_steps_whose_count_is_none_is_refused(run):
    steps = read_json(run / "steps.json", "")
    steps["review"]["facts"]["frozen"] = "x"
    write_json(run / "steps.json", steps)
    with pytest.raises(InputError, match=r"steps\.json: review: facts: frozen is 'x': must be a number of tensors"):
        make_page(run)


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(run, tmp_path, drawn):
    shutil.copyfile(run / "routing.json", run / "review" / "routing.json")
    first = make_page(run)
    assert "<h3>review</h3>" in first  # where the second routing analysis lies
    other = shutil.copytree(run, tmp_path / "elsewhere" / run.name)
    assert make_page(other) == first
    assert str(tmp_path) not in first


def test_of_paths_the_last_part_is_shown(run):
    (run / "recipe.yaml").write_text(
        "# from /home/me/notes.txt, see https://example.org/a/b\n"
        "base: /data/models/tiny\n"
        'old: {en: "/home/some body/en.jsonl", es: ~/es.jsonl, zh: file:///srv/zh.jsonl}\n'
        "new: {el: $DATA/el.jsonl, hu: C:\\me\\hu.jsonl, tr: '\\\\server\\share\\tr.jsonl'}\n"
        "test: {en: hub:org/name:en:test, el: texts/el.jsonl}\n"
    )
    shown = without_paths((run / "recipe.yaml").read_text())
    assert shown == (
        "# from notes.txt, see https://example.org/a/b\n"
        "base: tiny\n"
        'old: {en: "en.jsonl", es: es.jsonl, zh: zh.jsonl}\n'
        "new: {el: $DATA/el.jsonl, hu: hu.jsonl, tr: 'tr.jsonl'}\n"
        "test: {en: hub:org/name:en:test, el: texts/el.jsonl}\n"
    )
    text = make_page(run)
    assert shown in Page(text).text
    assert "/home/" not in text


def test_an_access_token_in_the_recipe_is_refused(run):
    (run / "recipe.yaml").write_text(f"base: org/tiny  # hf_{'a' * 30}\n")
    with pytest.raises(InputError, match="holds an access token"):
        make_page(run)


def test_the_plan_names_the_layers_with_classifiers(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    write_json(run / "steps.json", {})
    Plan("moe-lpr", [2, 2, 2], [0, 1], old=OLD, new=NEW).save(run / "plan.json")
    text = make_page(run)
    section = text.split('<section id="plan">')[1].split("</section>")[0]
    assert section.count("lassifier") == 1
    assert section.count("yes") == 2


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such folder; give the `output` of a recipe"):
        make_page(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match="not the folder of a run"):
        make_page(tmp_path)


def test_the_command_writes_it_and_overwrites_only_when_told(run, tmp_path):
    assert f"wrote {run / 'report.html'}" in invoke("report", run)
    text = (run / "report.html").read_text("utf-8")
    assert text == make_page(run)
    with pytest.raises(InputError, match="exists already"):
        invoke("report", run)
    (run / "report.html").write_text("old")
    invoke("report", run, "--overwrite")
    assert (run / "report.html").read_text("utf-8") == text
    invoke("report", run, "--out", tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text("utf-8") == text
