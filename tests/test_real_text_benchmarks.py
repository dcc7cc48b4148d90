"""The scripts behind the documentation's tables on real text, end to end: with a tiny base, little text, few steps."""

import importlib
import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import save_dense, write_texts

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.recipe import Recipe

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
STAGES = ("post_pretrain", "review", "group", "joint")
LANGUAGES = ("en", "es", "zh", "el", "hu", "tr", "hi")


@pytest.fixture
def place(tmp_path, monkeypatch, help_text):
    """`place("dmoe", "--steps 3")` runs a script in a folder with a base and text; returns what it wrote as a table."""
    save_dense(tmp_path / "base", max_position_embeddings=512)
    (tmp_path / "data").mkdir()
    for code in LANGUAGES:
        write_texts(tmp_path / "data" / f"{code}.train.jsonl", [text[:1000] for text in help_text(code, "train", 40)])
        write_texts(tmp_path / "data" / f"{code}.test.jsonl", [text[:200] for text in help_text(code, "test", 3)])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    load = Recipe.load

    def small(path, *rest):
        settings = yaml.safe_load(Path(path).read_text("utf-8"))
        for part in (settings, *settings.get("expansions", ())):
            for name in STAGES:
                if name in part:
                    training = part[name]["training"] | {"max_steps": 2, "per_device_train_batch_size": 2}
                    part[name] |= {"block_size": 32, "training": training}
        settings |= {"analysis": {"tokens": 300, "block_size": 32}, "evaluation": {"block_size": 32}}
        if "deviation" in settings:
            settings["deviation"] = {"steps": 2, "batch_size": 2, "block_size": 32, "micro_batch_size": 2}
        (tmp_path / "small.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")
        return load(tmp_path / "small.yaml", *rest)

    monkeypatch.setattr(Recipe, "load", small)

    def run(name, *options):
        table = tmp_path / "table.md"
        given = {"--data": tmp_path / "data", "--base": tmp_path / "base", "--out": tmp_path / "out", "--table": table}
        words = [*(str(word) for pair in given.items() for word in pair), *options]
        monkeypatch.setattr("sys.argv", [f"{name}.py", *words])
        importlib.import_module(name).main()
        return table.read_text("utf-8")

    return run


def rows(table):
    """Name of each row of the first table in a text, and its numbers."""
    lines = [line for line in table.split("\n\n")[0].splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: values for name, *values in cells}


def test_low_resource(place, tmp_path):
    pytest.importorskip("matplotlib")
    names = ["plain", "EOM 0.1", "FOM 0.3", "CMR 0.2", "curriculum"]
    options = ["--steps", "4", "--every", "2", "--low-bytes", "4000", "--figure", str(tmp_path / "curves.svg")]
    found = rows(place("low_resource", *options, "--runs", *names))
    assert list(found) == names
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    for name, values in found.items():
        best, step, last, lost = values[:4]
        assert float(best) <= float(last)
        assert float(lost) == pytest.approx(float(last) - float(best), abs=2e-3)
        curves = json.loads((tmp_path / "out" / name.replace(" ", "-") / "validation.json").read_text())
        assert min(curves["bits_per_byte"]["hi"]) == pytest.approx(float(best), abs=5e-4)
        assert int(step) in curves["steps"]
    assert len({tuple(values) for values in found.values()}) >= 3  # the methods are not one and the same


def test_dmoe(place):
    table = place("dmoe", "--adapt-steps", "2")
    found = rows(table)
    assert list(found) == [
        "base", "continued pre-training, 4 steps", "DMoE, group stage", "DMoE, joint training",
        "continued pre-training, then hi", "DMoE, adapted to hi",
    ]  # fmt: skip
    # Adaptation leaves what the model says of its other languages alone, but for what is routed to the new expert.
    assert found["base"] != found["DMoE, group stage"] != found["DMoE, joint training"]
    assert "Groups: " in table


def test_delta_moe(place, monkeypatch, tmp_path):
    pytest.importorskip("trl")
    script = importlib.import_module("delta_moe")
    monkeypatch.setattr(script, "FOR_EACH_FORMAT", dict.fromkeys(script.FOR_EACH_FORMAT, 1))
    steps = ["--steps", "2", "--sft-steps", "1", "--review-steps", "1", "--test-tokens", "600"]
    found = rows(place("delta_moe", *steps))
    assert list(found) == [
        "base", "instruct", "MoE, stage 1", "DeltaMoE", "DeltaMoE, router tuning", "MoE-CPT-Avg", "Dense-FT",
        "Dense-FT-Delta", "Dense-FT-Avg", "LLaMA-Pro",
    ]  # fmt: skip
    kept = {name: json.loads((tmp_path / "out" / "results" / f"{name}.json").read_text()) for name in found}
    sizes = {name: result["parameters"] for name, result in kept.items()}
    assert sizes["base"] == sizes["Dense-FT-Avg"] < sizes["LLaMA-Pro"]
    assert sizes["base"] < sizes["MoE, stage 1"] == sizes["DeltaMoE"] == sizes["MoE-CPT-Avg"]


def test_perfect_classifiers(place, tmp_path, monkeypatch, capsys):
    plan = Plan("moe-lpr", [2, 2, 2], classifier_layers=[1], old=["en"], new=["hu"])
    expand_checkpoint(tmp_path / "base", tmp_path / "model", plan, expert_init="random")
    options = ["--data", str(tmp_path / "data"), "--model", str(tmp_path / "model"), "--tokens", "1000"]
    monkeypatch.setattr("sys.argv", ["perfect_classifiers.py", *options])
    importlib.import_module("perfect_classifiers").main()
    told = rows(capsys.readouterr().out)
    assert len(told) == 4 + 3
    assert len({tuple(values) for values in told.values()}) > 1


@pytest.fixture
def tiny_study(tmp_path, help_text, monkeypatch):
    """`tiny_study("packs")` runs a script with a settings file cut down to a few steps; returns its table."""
    save_dense(tmp_path / "base", max_position_embeddings=512)
    for folder, split in (("help", "test"), ("flores", "dev")):
        (tmp_path / folder).mkdir()
        for code in LANGUAGES[:6]:
            write_texts(
                tmp_path / folder / f"{code}.{split}.jsonl", [text[:400] for text in help_text(code, "test", 6)]
            )
            if folder == "help":
                texts = [text[:1000] for text in help_text(code, "train", 40)]
                write_texts(tmp_path / folder / f"{code}.train.jsonl", texts)
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name, *options, **changes):
        settings = yaml.safe_load((BENCHMARKS / "studies" / f"{name}.yaml").read_text("utf-8"))
        for stage in ("post_pretrain", "review"):
            settings[stage] |= {"block_size": 32, "max_steps": 2, "per_device_train_batch_size": 2, "warmup_steps": 0}
        settings |= {"evaluation": {"block_size": 32, "batch_size": 4, "max_tokens": 400}, **changes}
        (tmp_path / "small.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")
        given = {
            "--base": "base",
            "--help-pages": "help",
            "--settings": "small.yaml",
            "--out": "out",
            "--table": "t.md",
        }
        words = [str(word) for option, path in given.items() for word in (option, tmp_path / path)]
        importlib.import_module(name).main([*words, *options])
        return (tmp_path / "t.md").read_text("utf-8")

    return run


def test_nothing_lost(tiny_study, tmp_path):
    pytest.importorskip("matplotlib")
    written = {"documents": 12, "tokens": 60, "batch_size": 12}
    options = ["--flores", str(tmp_path / "flores"), "--figure", str(tmp_path / "gates.svg")]
    table = tiny_study("nothing_lost", *options, self_written=written, tuning_documents=4)
    found = rows(table)
    reviews = list(yaml.safe_load((BENCHMARKS / "studies" / "nothing_lost.yaml").read_text())["reviews"])
    assert list(found) == ["base", "stage 1", *reviews, f"{reviews[-1]}, and the user's word"]
    word = found[f"{reviews[-1]}, and the user's word"]
    assert [word[0], word[1], word[3], word[4]] == ["+0.00 %"] * 4  # the base's own output
    assert word[2] != found["base"][2]
    assert len({tuple(values) for values in found.values()}) >= 5
    curve = table.split("\n\n")[1]
    assert "the language changed" in curve
    kept = json.loads((tmp_path / "out" / "scores" / "seed-0-LPR-help.json").read_text())
    assert set(kept) == {"en", "es", "zh", "el", "hu", "tr"}


def test_packs(tiny_study):
    found = rows(tiny_study("packs", calibration_tokens=100))
    assert list(found) == [
        "base", "pack el", "pack hu", "pack tr", "joined", "joined, factors", "joined, gates",
        "joined, reviewed",
        "one joint expansion", "lifelong",
    ]  # fmt: skip
    assert found["one joint expansion"][-1] == "100.0 %"
    assert found["joined"] != found["joined, reviewed"]


@pytest.fixture
def quick_study(tmp_path, help_text, monkeypatch):
    """`quick_study("run")` runs a command of the study with its settings cut down; returns the settings."""
    save_dense(tmp_path / "base", max_position_embeddings=512)
    for folder, split in (("help", "train"), ("help", "test"), ("flores", "dev")):
        (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
        for code in LANGUAGES[:6]:
            texts = [text[:600] for text in help_text(code, "train" if split == "train" else "test", 30)]
            write_texts(tmp_path / "data" / folder / f"{code}.{split}.jsonl", texts)
    (tmp_path / "data" / "minimal_pairs").mkdir()
    pair = json.dumps({"good": "The cats sleep.", "bad": "The cats sleeps."})
    (tmp_path / "data" / "minimal_pairs" / "en.jsonl").write_text(f"{pair}\n" * 4, "utf-8")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    settings = {
        "inherits": str(BENCHMARKS / "studies" / "study.yaml"), "tuning_documents": 3, "block_size": 32,
        "batch_size": 2, "steps": 6, "review_steps": 3, "rates": [1e-3],
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


def test_the_small_mixture_and_a_row_on_it(quick_study, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
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


def test_study(quick_study, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    names = [
        "base", "25 % replay", "LoRA", "MoE-LPR, 3 experts", "MoE-LPR, without LPR",
    ]  # fmt: skip
    made = {"rows": names, "curves": ["LoRA"]}
    quick_study("row", "LoRA", rates=[1e-3, 1e-2])  # the others take the only rate, without a sweep
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
    sweep = found["LoRA"]["sweep"]
    assert set(sweep) == {"0.001", "0.01"}
    assert found["LoRA"]["seeds"][0]["rate"] == float(min(sweep, key=sweep.get))  # the lower loss wins
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


def test_no_point_of_the_pareto_front_is_beaten(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pareto = importlib.import_module("study_report").pareto
    points = {"base": (0, 0), "a": (10, -1), "b": (9, -2), "c": (20, -9), "d": (20, -10)}
    assert pareto(points) == ["base", "a", "c"]


def test_a_sweep_goes_on_where_the_best_rate_is_at_an_end(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sweep = importlib.import_module("study").sweep
    rates = [0.1, 0.3, 1.0, 3.0, 10.0]
    for best, tried in ((1.0, rates[1:4]), (0.3, rates[:4]), (0.1, rates[:4]), (10.0, rates[1:])):
        calls = []

        def score(rate, best=best, calls=calls):
            calls.append(rate)
            return abs(rate - best)

        found = sweep(rates, score)
        assert list(found) == [str(rate) for rate in tried]
        assert min(found, key=found.get) == str(best)
        assert sorted(calls) == tried  # each once
    assert list(sweep([1e-3], score)) == ["0.001"]
    assert list(sweep([1e-3, 1e-2], abs)) == ["0.001", "0.01"]


def test_a_claim_is_judged_by_the_seeds_of_both_domains(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    claims = importlib.import_module("study_claims")
    below, above, open_ = [-1.0, -1.1, -0.9], [1.0, 1.1, 0.9], [-1.0, 1.0, 0.2]
    assert claims.verdict([below, below]) == "holds"
    assert claims.verdict([above, above]) == "does not hold"
    assert claims.verdict([open_, open_]) == claims.verdict([[-5.0], [-5.0]]) == "cannot tell"
    assert claims.verdict([below, open_]) == "help: holds; flores: cannot tell"
    # A paired t test of three seeds: 4.303 is the quantile of 2 degrees of freedom at 97.5 %.
    deviation = 4.303 / 3**0.5
    for factor, said in ((1.02, "holds"), (0.98, "cannot tell")):
        values = [-factor * deviation - 1, -factor * deviation, -factor * deviation + 1]
        assert claims.verdict([values, values]) == said
    settings = {"old": {"reviewed": ["en"], "not reviewed": ["es"]}, "new": ["hu"]}

    def row(**bits):
        return {"scores": {"help": bits, "flores": bits}}

    results = {
        "base": [row(en=1.0, es=3.0, hu=4.0)],
        "a": [row(en=1.2, es=3.0, hu=3.0), row(en=1.0, es=3.2, hu=2.0)],
        "b": [row(en=1.0, es=3.0, hu=3.0), row(en=1.0, es=3.0, hu=3.0), row(en=9.0, es=9.0, hu=9.0)],
    }
    found = {group: claims.differences(settings, results, "help", group, "a", "b") for group in ("old", "new")}
    assert found["old"] == pytest.approx([5.0, 5.0])
    assert found["new"] == pytest.approx([0.0, -25.0])


def test_every_claim_names_rows_of_the_study(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    settings = importlib.import_module("study_settings").read_settings(BENCHMARKS / "studies" / "study.yaml")
    for claims in settings["claims"].values():
        for _, group, better, other in claims:
            assert {better, other} <= set(settings["rows"])
            assert group in ("reviewed", "not reviewed", "new", "old")


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
    errors, models = importlib.import_module("hf_moe_expand.errors"), importlib.import_module("study_models").Models
    kept = tmp_path / "out" / "sweep" / "LoRA.json"
    for error, goes_on in ((errors.InputError("the disk is full"), False), (errors.DivergedError("nan"), True)):

        def make(*arguments, error=error):
            raise error

        monkeypatch.setattr(models, "make", make)
        with pytest.raises(SystemExit):
            quick_study("row", "LoRA", rates=[1e-3, 1e-2])
        assert kept.exists() == goes_on


def test_translation(tmp_path, monkeypatch, help_text):
    """The study goes on from what it has, and repeats its table."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pages = tmp_path / "pages"
    pages.mkdir()
    for code in ("en", "es", "el", "hi"):
        for split, count in (("train", 60), ("test", 40)):
            lines = [
                json.dumps({"id": f"{split}/{number}", "text": text})
                for number, text in enumerate([f"A line {n}.\nLibreOffice {n}" for n in range(count)])
            ]
            (pages / f"{code}.{split}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
            if code != "en":
                changed = "\n".join(lines).replace("A line", {"es": "La raya", "el": "Γραμμή", "hi": "रेखा"}[code])
                (pages / f"{code}.{split}.jsonl").write_text(changed + "\n", "utf-8")
    settings = yaml.safe_load((BENCHMARKS / "studies" / "translation.yaml").read_text("utf-8"))
    settings |= {"new": ["el", "hi"], "low_pairs": 20, "every": 1, "validation_tokens": 60, "translated": 2}
    settings |= {"longest": 16, "new_tokens": 4, "curriculum_bins": 2}
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    settings["base"]["sizes"] |= sizes | {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    settings["base"] |= {"vocabulary": 300, "shares": {"es": 0.8, "el": 0.1, "hi": 0.1}}
    settings["plan"] = {"experts": 3, "only_layers": "encoder.1,decoder.1"}
    for part in (settings["base"], settings["post_pretrain"]):
        part["training"] |= {"max_steps": 2, "per_device_train_batch_size": 4}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    options = [
        "--help-pages",
        str(pages),
        "--out",
        str(tmp_path / "out"),
        "--settings",
        str(tmp_path / "settings.yaml"),
    ]
    options += ["--seeds", "0", "1", "--runs", "plain", "CMR 0.2", "curriculum", "--table", str(tmp_path / "table.md")]
    module = importlib.import_module("translation")
    module.main(options)
    table = (tmp_path / "table.md").read_text("utf-8")
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| plain", "| CMR 0.2", "| curriculum"]
    assert "±" in table
    monkeypatch.setattr(module, "train_stage", lambda *arguments: pytest.fail("nothing is left to train"))
    module.main(options)
    assert (tmp_path / "table.md").read_text("utf-8") == table


def test_paragraphs_are_aligned_in_order(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("aligned_pages")
    pages = {
        "en": ["Open Writer\nChoose File 7 now\nClose it", "One\nTwo words here\nPress Ctrl F5 twice\nDone"],
        "el": ["Άνοιξε Writer\nΔιάλεξε File 7 τώρα\nΚλείσε", "Ένα\nΠάτα Ctrl F5 δύο φορές"],
    }
    for code, texts in pages.items():
        lines = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(texts)]
        (tmp_path / f"{code}.train.jsonl").write_text("\n".join(lines), "utf-8")
    assert module.aligned(tmp_path, "train", "en", "el") == [
        ("Open Writer", "Άνοιξε Writer"),
        ("Choose File 7 now", "Διάλεξε File 7 τώρα"),
        ("Close it", "Κλείσε"),
        ("Press Ctrl F5 twice", "Πάτα Ctrl F5 δύο φορές"),
    ]
