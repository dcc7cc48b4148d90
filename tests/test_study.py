"""benchmarks/study.py on a tiny base, stopped and continued; the pages' figures; the other scripts at a tiny size."""

import functools
import importlib
import math
import re
from itertools import product
from pathlib import Path

import pandas
import pytest
import torch
import yaml
from conftest import TABLES, byte_tokenizer, save_dense, write_texts
from gated_models import gated_model

from hf_moe_expand.analysis import gating

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
DOCS = BENCHMARKS.parent / "docs"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("study")


@pytest.fixture
def small_study(study, tmp_path, help_text, quick_gates, monkeypatch):
    """`small_study("run", ...)` runs a command of the study on a tiny base, with three rows and little text."""
    few = gating.shipped_anchors  # of `quick_gates`
    monkeypatch.setattr(study, "shipped_anchors", lambda codes: few(leave_out=codes))
    monkeypatch.setattr(study, "chat", functools.partial(study.chat, tokens=3))
    save_dense(tmp_path / "base", max_position_embeddings=512)
    for folder, split in (("help", "train"), ("help", "test"), ("flores", "dev")):
        (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
        for code in ("en", "es", "zh", "hu"):
            texts = [text[:80] for text in help_text(code, "train" if split == "train" else "test", 12)]
            write_texts(tmp_path / "data" / folder / f"{code}.{split}.jsonl", texts)
    settings = yaml.safe_load((BENCHMARKS / "study.yaml").read_text("utf-8"))
    rates = {"dense": 0.01, "post_pretrain": 0.1}
    settings |= {
        "rows": {name: settings["rows"][name] for name in ("base", "exclusive", "25 % replay", "tuned")},
        "sentences": 6, "held_out": 6, "weights": [0.6],
        "languages": {"kept": ["en"], "anchored": ["zh"], "unnamed": ["es"], "new": ["hu"]},
        "questions": {"en": ["Why?"], "hu": ["Miért?"]}, "claims": [["hu", "exclusive", None, "new: documents", 0]],
        "bases": {"tiny": {"tokens": {256: [0]}, "block": 32, "batch": 2, "bf16": False, "rates": rates}},
    }  # fmt: skip
    for name in ("exclusive", "tuned"):
        settings["rows"][name]["gates"] = {"unseen_share": 0.99}
    settings["rows"]["tuned"]["tuned"] = {"rank": 4}
    settings["rows"]["25 % replay"]["averages"] = "thirds"
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")

    def run(command, *words):
        given = ["--settings", str(tmp_path / "study.yaml")]
        if command != "report":
            given = ["tiny", *given, "--out", str(tmp_path / "out")]
        if command == "run":
            given += ["--base", str(tmp_path / "base"), "--data", str(tmp_path / "data")]
        study.main([command, *given, *words])

    return run


def test_a_study_goes_on_where_it_was_stopped(small_study, study, tmp_path, capsys, monkeypatch):
    train, trained = study.moe.train_stage, []

    def stops(*arguments):
        trained.append(arguments)
        if len(trained) == 1:
            raise KeyboardInterrupt
        return train(*arguments)

    monkeypatch.setattr(study.moe, "train_stage", stops)
    with pytest.raises(SystemExit, match="the same command goes on"):
        small_study("run")
    kept = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out" / "results").glob("*.json")}
    assert len(kept) == 2  # the base and the first row
    capsys.readouterr()
    small_study("left")
    assert capsys.readouterr().out == "2 rows are left\n" + "".join(
        f"  {row}, 256 tokens, seed 0\n" for row in ("25 % replay", "tuned")
    )
    small_study("run")
    assert capsys.readouterr().out.endswith("0 rows are left\n")
    assert (
        kept.items()
        <= {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out" / "results").iterdir()}.items()
    )
    assert list((tmp_path / "out" / "models").iterdir()) == []

    frame = pandas.read_csv(tmp_path / "out" / "study.csv").set_index(["row", "weight"])
    rows = ("exclusive", "25 % replay", "tuned")
    thirds = frame[frame["thirds"].notna()]
    assert list(frame[frame["thirds"].isna()].index) == [
        *((row, weight) for row in rows for weight in (1, 0.6)), ("base", 1)
    ]  # fmt: skip
    # A weight for each third, of one that there is, is that average.
    assert list(thirds["thirds"].items()) == [(("25 % replay", 0.6), "0.6 0.6 0.6")]
    dense_bits = frame.filter(regex=r"^read\.").loc[("25 % replay", 0.6)]
    assert len(dense_bits) == 2
    assert dense_bits.diff().abs().max(axis=None) < 2e-5
    frame = frame[frame["thirds"].isna()]
    base, expert, dense, tuned = (frame.loc[key] for key in (("base", 1), *((row, 1) for row in rows)))
    assert min(expert["parameters"], tuned["parameters"]) > dense["parameters"] == base["parameters"]
    chosen = frame[frame["is_best"] == 1]  # by text that no line scores
    assert list(chosen.index) == [(row, 0.6) for row in rows]
    assert not set(chosen["held.0.6"]) & {base["held.0"], *frame.filter(regex=r"\.hu$").stack()}
    assert tuned["told.documents.hu"] != pytest.approx(base["read.documents.hu"], abs=1e-4)
    # A whole text judged as home is the base's; the told language is not.
    assert expert["told.documents.hu"] != pytest.approx(base["read.documents.hu"], abs=1e-4)
    homes = [code for code in ("en", "es", "zh") if expert[f"new.documents.{code}"] == 0]
    assert all(expert[f"read.documents.{code}"] == base[f"read.documents.{code}"] for code in homes)
    assert (frame.filter(regex=r"^new\.").loc["exclusive"] >= 0).all(axis=None)
    assert frame.filter(regex=r"^(new|end|told)\.").loc["25 % replay"].isna().all(axis=None)

    small_study("report", "--csv", str(tmp_path / "out" / "study.csv"), "--figure", str(tmp_path / "study.svg"))
    said = capsys.readouterr().out
    assert "**tiny, 256 tokens**" in said
    titles = ("Joined fine-tunes", "Weights on held-out text, told")
    assert all(f"**{title}**" in said for title in titles)
    assert "<svg" in (tmp_path / "study.svg").read_text("utf-8")


def test_a_gated_model_is_scored_as_it_judges(study):
    model, tokenizer = gated_model(max_position_embeddings=512), byte_tokenizer()
    texts = ["".join(chr(33 + (7 * i * j + i) % 90) for j in range(12 + i)) for i in range(1, 13)]
    found = study.scores(model, tokenizer, {"en": {"pages": texts}, "el": {"pages": texts}}, ["el"])
    rows = [torch.tensor([[tokenizer.eos_token_id, *tokenizer(text).input_ids]]) for text in texts]
    classes = [int(model.judge(ids, torch.ones_like(ids))) for ids in rows]
    assert 0 < sum(classes) < len(classes)
    assert found["new.pages.en"] == round(sum(classes) / len(classes), 5)
    nats = 0.0
    for ids, number in zip(rows, classes, strict=True):
        with torch.no_grad():
            logs = model(ids, languages="el" if number else "en").logits[0].log_softmax(-1)
        nats -= logs[:-1].gather(1, ids[0, 1:, None]).sum().item()
    bits = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    assert found["read.pages.en"] == found["end.pages.en"] == pytest.approx(bits, abs=2e-5)
    assert found["told.pages.el"] != found["read.pages.el"]


@pytest.fixture
def reported(study, capsys):
    """What the study prints for the CSV of the pages."""
    study.main(["report", "--csv", str(DOCS / "study.csv")])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("content", "says"), [(b"", "No columns"), (b"\x88", "decode"), (b"a,b", "no column base")])
def test_what_is_no_csv_of_the_study_is_refused(content, says, study, tmp_path):
    (tmp_path / "study.csv").write_bytes(content)
    with pytest.raises(SystemExit, match=f"no CSV of `study.py run`: .*{says}"):
        study.main(["report", "--csv", str(tmp_path / "study.csv")])


def plain(text):
    """Prose in one line, without code, links and bold."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text).replace("**", "")
    return " ".join(text.split())


def test_the_pages_have_the_figures_of_the_csv(reported):
    """Each table of docs/study.md, and that of README.md, is one that `report` prints."""
    page = (DOCS / "study.md").read_text("utf-8").splitlines()
    tables = [line for line in page if line.startswith("| ")]
    assert len(tables) > 40
    assert {*tables} <= {*reported}
    for title, file in (("**Claims**", "docs/study.md"), ("**README.md**", "README.md")):
        start = reported.index(title) + 2
        table = reported[start : reported.index("", start)]
        assert "\n".join(table) in (DOCS.parent / file).read_text("utf-8")


# Figures of the pages' prose that no row of the CSV has: aims and limits, what other commands print, other studies.
OTHERS = TABLES["figures of other studies"]


@pytest.mark.parametrize("name", OTHERS)
def test_each_figure_of_a_page_is_in_a_sentence_that_the_study_prints(name, reported):
    start = len(reported) - reported[::-1].index(f"**{name}**") + 1
    said = " \n".join(reported[start:]).split(" \n \n")[0].split(" \n")
    settings = yaml.safe_load((BENCHMARKS / "study.yaml").read_text("utf-8"))
    assert len(said) == len(settings["pages"][name])
    text = (DOCS.parent / name).read_text("utf-8")
    for sentence in said:
        assert sentence in plain(text)
    if name == "docs/choose.md":  # other sections are about other things
        sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
        text = "".join(one for one in sections if one.startswith(("## What to take", "## Tokens of its own")))
    text = plain(re.sub(r"^\|.*", "", text, flags=re.MULTILINE))
    for known in [*said, *OTHERS[name]]:
        text = text.replace(known, "")
    figure = r"(?<![\d.])(?:\d+(?:\.\d+)? %|\d+\.\d+(?![\d.]| million))"
    assert [text[found.start() - 40 : found.end() + 20] for found in re.finditer(figure, text)] == []


@pytest.fixture
def script(monkeypatch):
    """Imports a script. Its calls are timed once, however short."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    timing = importlib.import_module("timing")
    monkeypatch.setattr(timing, "MIN_SECONDS", 0.0)
    return importlib.import_module


def run(module, capsys, tmp_path, arguments):
    """The table that a script prints and writes: a dictionary a row."""
    out = tmp_path / "table.md"
    module.main([*arguments.split(), "--repeats", "1", "--out", str(out)])
    said = capsys.readouterr().out
    assert out.read_text("utf-8") == said
    header, empty, *table = said.splitlines()
    assert empty == ""
    for name in (f"torch {torch.__version__}", f"threads {torch.get_num_threads()}", "device cpu", "seed 0"):
        assert name in header
    head, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    assert len(rule) == len(head)
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_cases_run_in_turn_and_ratios_are_of_the_fastest_rounds(script):
    timing = script("timing")
    ran = []
    times = timing.time_in_turn({name: lambda n=name: ran.append(n) for name in "ab"}, repeats=4)
    assert "".join(ran) == "aabb" + "abbaabba"
    assert [len(values) for values in times.values()] == [4, 4]
    assert timing.ratio({"a": [2.0, 40.0, 6.0], "b": [4.0, 10.0, 1.0]}, "a", "b") == 2.0


TINY = "--hidden 32 --vocabulary 64 --layers 3"


def test_expert_speed_has_a_row_a_pass(script, capsys, tmp_path):
    module = script("expert_speed")
    rows = run(module, capsys, tmp_path, "--hidden 32 --experts 4 --tokens 1 16")
    keys = [(row["dtype"], row["tokens"], row["pass"]) for row in rows]
    assert keys == [*product(module.DTYPES, ("1", "16"), module.PASSES)]
    for row in rows:
        assert min(float(row["dense ms"]), float(row["default"])) > 0
        assert (row["loop"] == "–") == (row["pass"] == "old tokens")


def test_train_step_has_a_row_a_stage(script, capsys, tmp_path, monkeypatch):
    module = script("train_step")
    monkeypatch.setattr(module, "in_own_process", lambda *_: 1 << 20)
    rows = run(module, capsys, tmp_path, f"{TINY} --batch 2 --block 16")
    expert, routers, classifiers = 3 * 32 * 64, 3 * 3 * 32, 2 * 32
    assert {row["step"]: row["trained"] for row in rows} == {
        "full fine-tuning of the base": rows[0]["parameters"], "post-pretrain": f"{3 * 2 * expert + routers:,}",
        "review": f"{routers + classifiers:,}", "exclusive experts": f"{3 * expert:,}",
        "adapters of rank 16": f"{3 * 16 * (4 * (32 + 32) + 3 * (32 + 64)):,}",
    }  # fmt: skip
    for row in rows:
        assert min(float(row[name].replace(",", "")) for name in ("ms", "time", "peak MiB", "memory")) > 0
    assert rows[0]["FLOPs"] == "1.00"
    assert float(rows[2]["FLOPs"]) < float(rows[1]["FLOPs"])  # a review has no gradients of weights


def test_generation_and_expansion_have_a_row_a_way(script, capsys, tmp_path):
    module = script("generate")
    size = f"{TINY} --prompt 4 --tokens 3 --dtype fp32 --batch 1 3 --cache dynamic static"
    rows = run(module, capsys, tmp_path, size)
    cases = product(("dynamic", "static"), ("1", "3"), module.ROWS)
    assert [(row["cache"], row["batch"], row["model"]) for row in rows] == list(cases)
    assert all(float(row["tokens/s"].replace(",", "")) > 0 for row in rows)
    rows = run(script("expand_io"), capsys, tmp_path, str(save_dense(tmp_path / "base")))
    assert [row["way"] for row in rows] == ["expand_checkpoint", "cp"]
    assert {path.name for path in tmp_path.iterdir()} == {"base", "table.md"}


@pytest.fixture
def gpu(script, monkeypatch):
    """benchmarks/gpu.py with tiny models."""
    module = script("gpu")
    monkeypatch.setattr(module, "FFN", "--repeats 1 --hidden 32 --experts 2 --tokens 3 --dtypes bf16")
    monkeypatch.setattr(module.train_step, "in_own_process", lambda *_: 1 << 20)
    tiny = f"{TINY} --repeats 1"
    monkeypatch.setattr(module, "TRAIN", [f"{tiny} --batch 2 --block 16 --ways default eager"])
    monkeypatch.setattr(module, "DECODE", [f"{tiny} --prompt 4 --tokens 3 --batch 1 3 --cache static --rows expanded"])
    return module


TESTS = """
import pytest
@pytest.mark.parametrize("n", [1, 2])
def test_it_is_fast(n): pass
def test_it_is_right(): assert RIGHT
@pytest.mark.skip
def test_it_is_there(): pass
"""


def test_gpu_prints_every_part_on_one_page(gpu, capsys, tmp_path, monkeypatch):
    (tmp_path / "test_small.py").write_text(TESTS.replace("RIGHT", "True"))
    monkeypatch.setattr(gpu, "PYTEST", [str(tmp_path / "test_small.py")])
    page = tmp_path / "page.md"
    gpu.main(["--device", "cpu", "--out", str(page)])
    assert page.read_text("utf-8") == capsys.readouterr().out
    heads = [line for line in page.read_text("utf-8").splitlines() if line.startswith("## ")]
    assert [head.split(",")[0] for head in heads] == [
        "## Correctness", "## One expanded FFN", "## Training step", "## Generation"
    ]  # fmt: skip
    tables = page.read_text("utf-8").split("## ")[1:]
    for row in ("it is fast | 2 | 0 | 0", "it is right | 1 | 0 | 0", "it is there | 0 | 0 | 1"):
        assert f"| {row} |" in tables[0]
    assert [table.count("\n| ") - 2 for table in tables[1:]] == [4, 7, 2 * 3]
    names = ["full fine-tuning of the base", *map("".join, product(("post-pretrain", "review"), ("", ", eager")))]
    names += ["exclusive experts", "adapters of rank 16"]
    assert re.findall(r"^\| ([^|]+) \|", tables[2], re.MULTILINE)[2:] == names
    assert "used up" not in page.read_text("utf-8")
    (tmp_path / "test_small.py").write_text(TESTS.replace("RIGHT", "False"))
    with pytest.raises(SystemExit, match="A part failed"):
        gpu.main(["--device", "cpu", "--part", "correctness"])
    assert "| it is right | 0 | 1 | 0 |" in capsys.readouterr().out
