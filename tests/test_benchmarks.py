"""The benchmark scripts at a tiny size: their tables have the promised rows, and what they compare is equal."""

import importlib
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import save_dense

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


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


def test_expert_speed_has_a_row_a_pass(script, capsys, tmp_path):
    module = script("expert_speed")
    rows = run(module, capsys, tmp_path, "--hidden 32 --experts 4 --tokens 1 16")
    keys = [(row["hidden"], row["experts"], row["dtype"], row["tokens"], row["pass"]) for row in rows]
    assert keys == [("32", "4", *rest) for rest in product(module.DTYPES, ("1", "16"), module.PASSES)]
    for row in rows:
        assert float(row["dense ms"]) > 0
        assert float(row["default"]) > 0
        for name in ("Mixtral eager", "Mixtral grouped_mm"):
            assert (row[name] == "–") == (row["pass"] in ("expert 0 frozen", "old tokens"))
        assert (row["loop"] == "–") == (row["pass"] == "old tokens")
        assert row["eager"] != "–"
        assert (row["Mixtral batched_mm"] == "–") == (row["tokens"] == "16" or row["Mixtral eager"] == "–")


FFN = {"ffn": None, "key_value_heads": None}  # as wide, and of as many heads, as the defaults
TINY = "--hidden 32 --vocabulary 64 --layers 3"


def test_train_step_has_a_row_a_stage(script, capsys, tmp_path, monkeypatch):
    module = script("train_step")
    monkeypatch.setattr(module, "in_own_process", lambda *_: 1 << 20)
    rows = run(module, capsys, tmp_path, f"{TINY} --batch 2 --block 16")
    stages = ["post-pretrain", "review", "exclusive experts", "adapters of rank 16"]
    assert [row["step"] for row in rows] == ["full fine-tuning of the base", *stages]
    base, post_pretrain, review, exclusive, adapters = rows
    assert base["trained"] == base["parameters"]
    expert, routers, classifiers = 3 * 32 * 64, 3 * 3 * 32, 2 * 32
    assert post_pretrain["trained"] == f"{3 * 2 * expert + routers:,}"
    assert review["trained"] == f"{routers + classifiers:,}"
    assert exclusive["trained"] == f"{3 * expert:,}"
    assert adapters["trained"] == f"{3 * 16 * (4 * (32 + 32) + 3 * (32 + 64)):,}"
    for row in rows:
        assert min(float(row[name].replace(",", "")) for name in ("ms", "time", "peak MiB", "memory")) > 0
    assert base["FLOPs"] == "1.00"
    assert float(review["FLOPs"]) < float(post_pretrain["FLOPs"])  # no gradients of weights


def test_generate_has_a_row_a_model_cache_and_batch(script, capsys, tmp_path):
    module = script("generate")
    size = f"{TINY} --prompt 4 --tokens 3 --dtype fp32 --batch 1 3 --cache dynamic static"
    rows = run(module, capsys, tmp_path, size)
    names = list(module.ROWS)
    cases = product(("dynamic", "static"), ("1", "3"), names)
    assert [(row["cache"], row["batch"], row["model"]) for row in rows] == list(cases)
    assert all(float(row["tokens/s"].replace(",", "")) > 0 and float(row["speed"]) > 0 for row in rows)
    assert {row["of limit"] for row in rows if row["model"] == module.WIDE} == {"1.00"}


def test_expand_io_has_a_row_a_way_and_cleans_up(script, capsys, tmp_path):
    base = save_dense(tmp_path / "base")
    rows = run(script("expand_io"), capsys, tmp_path, str(base))
    assert [row["way"] for row in rows] == ["expand_checkpoint", "cp"]
    assert all(float(row["seconds"]) >= 0 for row in rows)
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
    (tmp_path / "test_small.py").write_text("import time\ndef test_it(): time.sleep(60)")
    with pytest.raises(SystemExit, match="A part failed"):
        gpu.main(["--device", "cpu", "--part", "correctness", "--minutes", "0"])
    assert "RuntimeError: the tests took too long" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_without_a_gpu_says_so_in_one_line(gpu, capsys, tmp_path):
    with pytest.raises(SystemExit, match=r"^No GPU: .* nothing written\.$"):
        gpu.main(["--out", str(tmp_path / "page.md")])
    assert not capsys.readouterr().out
    assert not (tmp_path / "page.md").exists()
