"""The study's own scripts, end to end with a tiny base, little text and few steps; its rules on made-up figures."""

import functools
import importlib
import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import save_dense, write_texts

from hf_moe_expand import expand_checkpoint
from hf_moe_expand.checkpoint.reader import CheckpointReader
from hf_moe_expand.core.errors import InputError

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LANGUAGES = ("en", "es", "zh", "el", "hu", "tr")


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """The scripts can be imported, and the harness does not list its own tasks, which takes half a minute."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tasks = pytest.importorskip("lm_eval.tasks", reason="the extra `eval` is not installed")
    manager = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", manager)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # it calls many programs


def rows(table):
    """Name of each row of the first table in a text, and its numbers."""
    lines = [line for line in table.split("\n\n")[0].splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: values for name, *values in cells}


@pytest.fixture
def quick_study(tmp_path, help_text, monkeypatch):
    """`quick_study("run")` runs a command of the study with its settings cut down; returns the settings."""
    save_dense(tmp_path / "base", max_position_embeddings=512)
    for folder, split in (("help", "train"), ("help", "test"), ("flores", "dev")):
        (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
        for code in LANGUAGES:
            texts = [text[:600] for text in help_text(code, "train" if split == "train" else "test", 30)]
            write_texts(tmp_path / "data" / folder / f"{code}.{split}.jsonl", texts)
    (tmp_path / "data" / "minimal_pairs").mkdir()
    pair = json.dumps({"good": "The cats sleep.", "bad": "The cats sleeps."})
    (tmp_path / "data" / "minimal_pairs" / "en.jsonl").write_text(f"{pair}\n" * 4, "utf-8")
    monkeypatch.setattr(importlib.import_module("study"), "TUNING_TOKENS", 100)
    settings = {
        "inherits": str(BENCHMARKS / "studies" / "study.yaml"), "tuning_documents": 3, "block_size": 32,
        "batch_size": 2, "steps": 6, "review_steps": 3, "rates": [1e-3], "review_rates": [1e-3],
        "training": {"lr_scheduler_type": "cosine", "logging_steps": 1, "save_strategy": "no"},
        "analysis": {"tokens": 200, "block_size": 32, "batch_size": 4},
        "deviation": {"steps": 1, "batch_size": 2, "micro_batch_size": 2, "block_size": 32},
        "evaluation": {"block_size": 32, "batch_size": 4, "max_tokens": 200}, "pairs": 4,
        "generation": {"batch": 2, "prompt": 4, "tokens": 2, "repeats": 1},
    }  # fmt: skip

    def run(*words, **changes):
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(settings | changes, sort_keys=False), "utf-8")
        given = ["--out", str(tmp_path / "out"), "--settings", str(tmp_path / "study.yaml")]
        if words[0] != "report":
            given += ["--data", str(tmp_path / "data"), "--base", str(tmp_path / "base")]
        importlib.import_module("study").main([*words, *given])
        return importlib.import_module("study_settings").read_settings(tmp_path / "study.yaml")

    return run


def test_study(quick_study, tmp_path, capsys):
    names = [
        "base", "25 % replay", "LoRA", "MoE-LPR, 3 experts", "MoE-LPR, without LPR",
    ]  # fmt: skip
    made = {"rows": names, "curves": ["LoRA"], "review_rates": [1e-3, 1e-2]}
    quick_study("row", "LoRA", **made)
    quick_study("run", "--seeds", "0", "--part", "1/2", **made)
    quick_study("run", "--seeds", "0", **made)
    quick_study("run", "--seeds", "1", "--rows", "base", **made)
    assert [path.name for path in tmp_path.glob("out/results/base.*")] == ["base.0.json"]  # as with any seed
    quick_study("speed", **made)
    capsys.readouterr()
    quick_study("report", "--json", str(tmp_path / "study.json"), "--figures", str(tmp_path), **made)
    quality, costs, claims = (rows(table) for table in capsys.readouterr().out.split("\n\n"))
    assert [values[0] for values in quality.values()] == [values[0] for values in costs.values()] == names
    assert claims["MoE-LPR"][1].startswith("MoE-LPR, 3 experts against ")
    assert claims["MoE-LPR"][-1] == "cannot tell"  # from one seed
    found = json.loads((tmp_path / "study.json").read_text("utf-8"))["rows"]
    tried = {one["review_rate"]: one["score"] for one in found["MoE-LPR, 3 experts"]["sweep"]["tried"]}
    assert set(tried) == {1e-3, 1e-2}
    assert found["MoE-LPR, 3 experts"]["seeds"][0]["review_rate"] == min(tried, key=tried.get)  # the lower loss wins
    assert found["LoRA"]["sweep"] == {}  # it has one rate and no review
    trained, total, active = (
        {name: row["seeds"][0][key] for name, row in found.items()} for key in ("trained", "total", "active")
    )
    assert trained["LoRA"] < trained["25 % replay"] == total["25 % replay"] == total["base"]
    assert active["MoE-LPR, 3 experts"] < total["MoE-LPR, 3 experts"]
    # Rows that begin alike share their beginning.
    begun = [
        json.loads(path.read_text())["about"] for path in (tmp_path / "out" / "steps").glob("post_pretrain-*.json")
    ]
    alike = [one for one in begun if set(one["text"]) == {"el", "hu", "tr"} and one["seed"] == 0]
    assert len({json.dumps(one, sort_keys=True) for one in alike}) == len(alike)
    assert all("<svg" in (tmp_path / f"study_small_{name}.svg").read_text() for name in ("pareto", "loss"))
    assert all(row["tokens_per_second"] > 0 for row in found.values())
    assert "path" not in found["LoRA"]["seeds"][0]


def test_a_study_says_what_is_wrong(quick_study, tmp_path, capsys):
    (tmp_path / "empty.yaml").write_text("steps: 3\n", "utf-8")
    for words, changes, said in (
        (["run"], {"rows": ["base", "LoRa"]}, "'LoRa' is not a row of the inherited file"),
        (["row", "LoRa"], {}, "'LoRa' is not a row; known: base, "),
        (["run", "--rows", "LoRa"], {}, "'LoRa' is not a row; known: base, "),
        (["report"], {}, "no result of the row `base`; `study.py run` makes it"),
        (["run"], {"inherits": str(tmp_path / "empty.yaml")}, "empty.yaml: no key `old`: give it, or inherit it"),
        (["run"], {"new": ["xx"]}, "xx.train.jsonl: no such file; --data names a folder"),
    ):
        with pytest.raises(SystemExit):
            quick_study(*words, **changes)
        assert said in capsys.readouterr().err


def test_a_sweep_goes_on_after_a_rate_that_diverges_and_stops_for_all_else(quick_study, tmp_path, monkeypatch):
    errors, models = (
        importlib.import_module("hf_moe_expand.core.errors"),
        importlib.import_module("study_models").Models,
    )
    kept = tmp_path / "out" / "sweep" / "LoRA.json"
    for error, goes_on in ((errors.InputError("the disk is full"), False), (errors.DivergedError("nan"), True)):

        def make(*arguments, error=error):
            raise error

        monkeypatch.setattr(models, "make", make)
        with pytest.raises(SystemExit):
            quick_study("row", "LoRA", rates=[1e-3, 1e-2])
        assert kept.exists() == goes_on


# --- lengths --------------------------------------------------------------------------------------------------------

LENGTHS = {
    "lengths": [256, 512],
    "curves": ["LoRA"],
    "rows": {
        "base": {},
        "LoRA": {"dense": {"method": "lora"}},
        "LoRA, averaged": {"dense": {"method": "lora"}, "average": [0.3, 0.7]},
        "full fine-tuning": {"dense": {"method": "full"}},
    },
    "claims": {"here": [["keeps more", "old", "LoRA, averaged", "LoRA"], ["learns", "new", "LoRA", "MoLA"]]},
}


def test_lengths(quick_study, tmp_path, capsys, monkeypatch):
    """Each length is a run of its own; a stopped study goes on; rows of different settings are not mixed."""
    pytest.importorskip("matplotlib")
    models = importlib.import_module("study_models")
    train, trained = models.train_stage, []

    def stops(*arguments, **options):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(arguments[1].name)
        return train(*arguments, **options)

    monkeypatch.setattr(models, "train_stage", stops)
    with pytest.raises(SystemExit) as stopped:
        quick_study("run", "--seeds", "0", **LENGTHS)
    assert stopped.value.code == 130
    said = capsys.readouterr()
    assert "7 of 7 rows are to be made: about " in said.out
    assert "== 1 of 7: base, seed 0, 256 tokens" in said.out
    assert "Stopped. Finished parts are kept: the same command goes on." in said.err
    assert (tmp_path / "out" / "256" / "results" / "LoRA.0.json").is_file()

    monkeypatch.setattr(models, "train_stage", lambda *a, **o: trained.append(a[1].name) or train(*a, **o))
    quick_study("run", "--seeds", "0", **LENGTHS)
    said = capsys.readouterr().out
    assert "3 of 7 rows are to be made" in said
    assert "== 2 of 7: LoRA, seed 0, 256 tokens: made already" in said
    assert said.rstrip().endswith("so far, all rows are made")
    # Two rows at two lengths; the average trains nothing of its own, and nothing is trained twice.
    assert len(trained) == len(set(trained)) == 4
    facts = [json.loads(path.read_text()) for path in (tmp_path / "out" / "steps").glob("dense-*.json")]
    assert {one["about"]["arguments"]["max_steps"] for one in facts} == {4, 8}

    quick_study("report", "--json", str(tmp_path / "all.json"), "--figures", str(tmp_path / "new"), **LENGTHS)
    parts = capsys.readouterr().out.strip().split("\n\n")
    assert [part for part in parts if part.startswith("#")] == ["### 256 tokens", "### 512 tokens"]
    names = list(LENGTHS["rows"])
    assert (
        [values[0] for values in rows(parts[1]).values()] == [values[0] for values in rows(parts[4]).values()] == names
    )
    assert "pairs: en (s.e.)" in parts[1]
    (claim,) = rows(parts[6]).values()
    assert claim[:4] == ["keeps more", "LoRA, averaged against LoRA, old", "512", "1"]  # the longest, its seeds
    assert len(parts) == 7  # from one seed nothing turns
    found = json.loads((tmp_path / "all.json").read_text())["lengths"]
    assert set(found) == {"256", "512"}
    for of in found.values():
        (one,) = of["rows"]["LoRA, averaged"]["seeds"]
        tried = {one["weight"]: one["score"] for one in of["rows"]["LoRA, averaged"]["sweep"]["tried"]}
        assert set(tried) == {0.3, 0.7}
        assert one["weight"] == min(tried, key=tried.get)
        assert of["rows"]["full fine-tuning"]["seeds"][0]["trained"] == one["total"]
    assert (tmp_path / "new" / "study_small_lengths.svg").read_text().count("LoRA, averaged") >= 1

    # Elsewhere, the JSON is all there is; the rows are not made again.
    (tmp_path / "out").rename(tmp_path / "first")
    quick_study("restore", "--json", str(tmp_path / "all.json"), **LENGTHS)
    assert "LoRA, 512 tokens: 1 seeds" in capsys.readouterr().out
    quick_study("run", "--seeds", "0", **LENGTHS)
    assert "are to be made" not in capsys.readouterr().out
    assert len(trained) == 4
    quick_study("report", "--json", str(tmp_path / "again.json"), **LENGTHS)
    again = json.loads((tmp_path / "again.json").read_text())["lengths"]
    for tokens, of in found.items():
        trained_rows = {name: row for name, row in of["rows"].items() if name != "base"}
        assert trained_rows == {name: again[tokens]["rows"][name] for name in trained_rows}
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "first").rename(tmp_path / "out")
    capsys.readouterr()

    # The average, tensor by tensor.
    kept = json.loads((tmp_path / "out" / "512" / "results" / "LoRA--averaged.0.json").read_text())
    about = json.loads((tmp_path / "out" / "steps" / f"{Path(kept['path']).name}.json").read_text())["about"]
    average, trained_model, base = (
        CheckpointReader(folder)
        for folder in (Path(kept["path"]), tmp_path / "out" / "steps" / about["trained"], tmp_path / "base")
    )
    for name in base.tensors:
        expected = kept["weight"] * trained_model.tensor(name) + (1 - kept["weight"]) * base.tensor(name)
        torch.testing.assert_close(average.tensor(name), expected, rtol=1e-5, atol=1e-6)

    for changes, file in (
        ({"pairs": 2}, "out/results/base.0.json"),
        ({"block_size": 16}, "out/256/results/LoRA.0.json"),
    ):
        for words in (["report"], ["run"]):
            with pytest.raises(SystemExit):
                quick_study(*words, **LENGTHS | changes)
            assert (
                f"{file}: was made with other settings; rows of different settings are not" in capsys.readouterr().err
            )
    claims = {**LENGTHS, "claims": {}, "keep_gigabytes": 1, "curves": []}
    quick_study("report", **claims)  # these decide no figure
    path = tmp_path / "out" / "512" / "results" / "LoRA.0.json"
    result = json.loads(path.read_text())
    del result["settings"]
    path.write_text(json.dumps(result))
    with pytest.raises(SystemExit):
        quick_study("report", **LENGTHS)
    assert "512/results/LoRA.0.json: names no settings, as others do" in capsys.readouterr().err


def test_without_bfloat16_rows_train_in_float32_and_the_report_says_so(quick_study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.import_module("study_models"), "has_bfloat16", lambda: False)
    asked = {"training": {"bf16": True, "save_strategy": "no"}, "rows": ["base", "full fine-tuning"], "curves": []}
    autocast, enabled = torch.autocast, []

    def watched(*arguments, **options):
        enabled.append(options.get("enabled", True))
        return autocast(*arguments, **options)

    forecast = importlib.import_module("study_forecast")
    monkeypatch.setattr(forecast, "torch", SimpleNamespace(**{**vars(torch), "autocast": watched}))
    quick_study("run", "--seeds", "0", **asked)
    assert enabled
    assert not any(enabled)  # the forecast measures what trains
    assert "rows train in float32, and the report says so" in capsys.readouterr().out
    (facts,) = (tmp_path / "out" / "steps").glob("*.json")
    assert json.loads(facts.read_text("utf-8"))["about"]["arguments"]["bf16"] is False
    quick_study("report", **asked)
    assert "\n\nfull fine-tuning: trained in float32, on a processor without bfloat16.\n\n" in capsys.readouterr().out
    told = importlib.import_module("study_report")._in_float32
    rows = {"a": [{"seed": 0, "float32": False}, {"seed": 1, "float32": True}], "b": [{"seed": 0}]}
    assert told(rows) == "a (seed 1): trained in float32, on a processor without bfloat16."
    assert told({"b": rows["b"]}) == ""
    in_float32 = importlib.import_module("study_models").in_float32
    monkeypatch.setattr(importlib.import_module("study_models"), "has_bfloat16", lambda: True)
    assert not in_float32(asked)
    monkeypatch.setattr(importlib.import_module("study_models"), "has_bfloat16", lambda: False)
    assert not in_float32({"training": {}})


def test_results_of_earlier_versions_are_read_and_not_added_to(quick_study, tmp_path, capsys):
    base = {"scores": {"help": {}, "flores": {}, "pairs": {"en": 0.5}}, "rate": 0.0, "seconds": 0.0, "path": ""}
    sizes = {"trained": 0, "total": 10, "active": 10, "losses": []}
    bits = {"help": dict.fromkeys(LANGUAGES, 2.0), "flores": dict.fromkeys(LANGUAGES, 3.0)}
    (tmp_path / "out" / "results").mkdir(parents=True)
    for name, rate in (("base", 0.0), ("LoRA", 1e-3)):
        result = {**base, **sizes, "rate": rate, "scores": {**base["scores"], **bits}}
        (tmp_path / "out" / "results" / f"{name}.0.json").write_text(json.dumps(result))
    quick_study("report")
    assert "| LoRA |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        quick_study("row", "25 % replay")
    assert "has results that do not name their settings" in capsys.readouterr().err
    assert not (tmp_path / "out" / "results" / "25---replay.0.json").exists()


def test_the_parts_of_a_run_share_the_rows_and_each_row_has_all_its_seeds_in_one(quick_study, tmp_path, monkeypatch):
    study = importlib.import_module("study")
    quick_study("forecast", "--seeds", "0", **LENGTHS)
    given = {"settings": tmp_path / "study.yaml", "out": tmp_path / "out", "data": tmp_path / "data"}
    options = {**given, "base": tmp_path / "base", "seeds": [0, 1, 2], "rows": []}
    parts = [
        {(job.study.tokens, job.name, job.seed) for job in study.jobs_of(SimpleNamespace(**options, part=part))}
        for part in ("1/3", "2/3", "3/3", "1/1")
    ]
    assert set.union(*parts[:3]) == parts[3]
    assert sum(map(len, parts[:3])) == len(parts[3]) == 1 + 3 * 3 * 2
    names = [{name for _, name, _ in part} for part in parts[:3]]
    assert sum(map(len, names)) == len(LENGTHS["rows"])


def test_no_gate_is_fitted_on_a_language_that_stays_unnamed(quick_study, tmp_path, monkeypatch):
    settings = quick_study("forecast", "--seeds", "0", rows=["base"])
    module, seen = importlib.import_module("study_models"), []
    monkeypatch.setattr(module, "fit_gates", lambda start, out, texts, anchors, given: seen.append(anchors))
    monkeypatch.setattr(module, "join_calibrated", lambda packs, out, texts, tokens, anchors: seen.append(anchors))
    models = module.Models(settings, tmp_path / "base", tmp_path / "data" / "help", tmp_path / "out")
    row = module._Row(models, {"gates": {}, "packs": {"tokens": 9}, "plan": {}}, 0, module.Choice(1e-3))
    monkeypatch.setattr(row, "expansion", lambda codes, *rest: Path(codes[0]))
    row.gates(Path("start"), ["en", "hu"])
    row.packs()
    assert models.unnamed() == ["es", "ca", "pt"]
    for anchors in seen:
        assert not {"en", "hu", "es", "ca", "pt"} & set(anchors)
        assert {"it", "fr"} <= set(anchors)
    assert len(seen) == 2


def test_a_length_has_whole_steps_and_the_same_share_of_reviews():
    settings = importlib.import_module("study_settings")
    given = {
        "block_size": 256, "batch_size": 8, "steps": 100, "review_steps": 25, "lengths": [800_000, 50_000],
        "rows": {"a": {"review": {}}, "b": {}}, "rates": [1.0, 2.0], "ladders": {800_000: {"a": {"rates": [3.0]}}},
    }  # fmt: skip
    assert settings.lengths_of(given) == [50_000, 800_000]
    found = {tokens: settings.at_length(given, tokens) for tokens in (50_000, 800_000, 1)}
    assert [(of["steps"], of["review_steps"]) for of in found.values()] == [(24, 6), (391, 98), (1, 1)]
    assert settings.trained_tokens(found[800_000]) == 391 * 2048
    # A length may have rates of its own for a row; the results of other lengths and rows stay what they are.
    assert found[800_000]["rows"] == {"a": {"review": {}, "rates": [3.0]}, "b": {}}
    plain = {key: value for key, value in given.items() if key != "ladders"}
    for tokens in found:
        same = {name: settings.row_digest(settings.at_length(plain, tokens), name) for name in "ab"}
        now = {name: settings.row_digest(settings.at_length(given, tokens), name) for name in "ab"}
        assert [now[name] == same[name] for name in "ab"] == [tokens != 800_000, True]
    assert settings.lengths_of({"steps": 3}) == [None]
    assert settings.at_length(given, None) == given


def test_a_row_has_the_hash_of_what_decides_it():
    digest = importlib.import_module("study_settings").row_digest
    given = {"rows": {"base": {}, "a": {"x": 1}, "b": {"x": 2}}, "old": {}, "new": [], "pairs": 3, "rates": [1.0]}
    assert len({digest(given, name) for name in given["rows"]}) == 3
    for changes, same_row, same_base in (
        ({"rates": [2.0]}, False, True), ({"pairs": 4}, False, False), ({"curves": ["a"]}, True, True),
        ({"claims": {}}, True, True), ({"rows": {**given["rows"], "b": {"x": 3}}}, True, True),
        ({"unheard_of": 1}, False, True), ({"lengths": [1, 2], "seeds": [5]}, True, True),
    ):  # fmt: skip
        assert (digest(given | changes, "a") == digest(given, "a")) == same_row, changes
        assert (digest(given | changes, "base") == digest(given, "base")) == same_base, changes


def test_the_sweep_takes_no_language_of_the_test(tmp_path):
    read = importlib.import_module("study_settings").read_settings
    for code, said in (
        ("es", "es is a language of the test"),
        ("hu", "hu is a language"),
        ("is", "is is not among"),
    ):
        (tmp_path / "s.yaml").write_text(
            f"inherits: {BENCHMARKS / 'studies' / 'study.yaml'}\ntuning_unnamed: [{code}]\n"
        )
        with pytest.raises(InputError, match=f"tuning_unnamed: .*{said}"):
            read(tmp_path / "s.yaml")


def test_claims_are_judged_at_the_longest_length_and_those_that_turn_are_listed():
    claims = importlib.import_module("study_claims")

    def result(*new):
        return [{"scores": {domain: {"en": 1.0, "hu": value} for domain in ("help", "flores")}} for value in new]

    base = {"base": result(1.0)}
    settings = {
        "old": {"reviewed": ["en"]}, "new": ["hu"],
        "claims": {"P": [["turns", "new", "a", "b"], ["stays", "new", "c", "b"], ["early", "new", "d", "b"]]},
    }  # fmt: skip
    short = {**base, "a": result(0.8, 0.81, 0.79), "b": result(0.9, 0.9, 0.9), "c": result(0.7, 0.71, 0.7)}
    long = {**base, "a": result(0.8, 0.81), "b": result(0.6, 0.6), "c": result(0.5, 0.501)}
    results = {1000: {**short, "d": result(0.8)}, 2000: long}
    table = [line.strip("| ").split(" | ") for line in claims.claims_table(settings, results).splitlines()[2:]]
    assert table == [
        ["P", "turns", "a against b, new", "2,000", "2", "+20.5 ± 0.7", "+20.5 ± 0.7", "does not hold"],
        ["P", "stays", "c against b, new", "2,000", "2", "-9.9 ± 0.1", "-9.9 ± 0.1", "holds"],
        ["P", "early", "d against b, new", "1,000", "1", "-10.0", "-10.0", "cannot tell"],
    ]
    (turned,) = claims.turned_table(settings, results).splitlines()[2:]
    both = "-10.0 ± 1.0, then +20.5 ± 0.7"
    told = ["turns", "a against b, new", "1,000 (3)", "2,000 (2)", both, both, "holds, then does not hold"]
    assert turned.strip("| ").split(" | ") == told
    assert claims.turned_table(settings, {2000: long}) == ""


def test_a_group_without_text_in_a_domain_has_no_panel_and_no_figure(tmp_path):
    pytest.importorskip("matplotlib")
    figures, claims = importlib.import_module("study_figures"), importlib.import_module("study_claims")
    settings = {
        "old": {"reviewed": ["en"], "anchored": ["ru"], "not reviewed": []}, "new": ["hu"],
        "rows": {"base": {}, "a": {"dense": {}}, "b": {"plan": {}}},
        "claims": {"P": [["keeps", "anchored", "a", "b"]]},
    }  # fmt: skip

    def one(factor):
        return [{"scores": {"help": {"en": 1.0, "hu": factor}, "flores": {"en": 1.0, "hu": factor, "ru": factor}}}]

    results = {tokens: {"base": one(1.0), "a": one(0.9), "b": one(0.8)} for tokens in (1000, 2000)}
    figures.draw_lengths(settings, results, tmp_path / "lengths.svg")
    figures.draw_pareto(settings, results[2000], tmp_path / "pareto.svg")
    for name in ("lengths", "pareto"):
        drawn = (tmp_path / f"{name}.svg").read_text()
        assert "flores: ru (anchored)" in drawn
        assert "help: en (reviewed)" in drawn
        assert "help:  (anchored)" not in drawn
    (line,) = claims.claims_table(settings, results).splitlines()[2:]
    assert line == "| P | keeps | a against b, anchored | 2,000 | 1 | no text | +10.0 | cannot tell |"


def test_a_rate_at_the_ladders_end_is_marked():
    report = importlib.import_module("study_report")
    settings = {"rates": [0.1, 0.2, 0.3], "review_rates": [1.0]}

    def one(**chosen):
        return [{"trained": 1e6, "total": 1e6, "active": 1e6, "seconds": 1.0, "review_rate": None, **chosen}]

    results = {"base": one(rate=0.0), "a": one(rate=0.3, review_rate=1.0), "b": one(rate=0.2)}
    table = report.cost_table(settings, results, {}).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0][5:7] == ["learning rate", "review's"]
    assert [row[5:7] for row in cells[2:]] == [["", ""], ["0.3 (end)", "1"], ["0.2", ""]]


def test_the_small_mixture_and_a_row_on_it(quick_study, tmp_path, monkeypatch):
    small = importlib.import_module("small_base")
    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 16, "num_layers": 2, "num_heads": 2}
    settings = replace(small.MIXTURE, **sizes, blocks_per_step=2)
    shutil.rmtree(tmp_path / "base")
    small.make_small_base(tmp_path / "data" / "help", tmp_path / "base", 2, settings)
    config = json.loads((tmp_path / "base" / "config.json").read_text("utf-8"))
    assert (config["model_type"], config["num_experts"], config["output_router_logits"]) == ("olmoe", 8, False)
    lora = {"method": "lora", "lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}}
    added = {
        "plan": {"method": "moe-lpr", "experts": 2}, "expand": {"expert_kind": "added", "expert_width": 8},
        "post_pretrain": {}, "review": {"distillation_coef": 1.0},
    }  # fmt: skip
    quick_study("run", "--seeds", "0", rows={"LoRA": {"dense": lora}, "added": added}, curves=[], claims={})
    results = [json.loads((tmp_path / "out" / "results" / f"{name}.0.json").read_text()) for name in ("LoRA", "added")]
    assert [found["trained"] for found in results] == [2 * 2 * 2 * (32 + 32), 2 * (3 * 32 * 8 + 2 * 32)]


@pytest.mark.parametrize("name", ["added", "mixture"])
def test_the_rows_of_added_experts_are_expansions(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    settings = importlib.import_module("study_settings").read_settings(BENCHMARKS / "studies" / f"{name}.yaml")
    known = set(inspect.signature(expand_checkpoint).parameters)
    assert all(known.issuperset(row.get("expand", {})) for row in settings["rows"].values())
    claimed = {row for claims in settings["claims"].values() for _, _, *rows in claims for row in rows}
    assert claimed <= set(settings["rows"])
