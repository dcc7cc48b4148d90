"""The scripts behind the documentation's tables on real text, end to end: with a tiny base, little text, few steps."""

import importlib
import json
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
    assert list(found) == ["base", "stage 1", *reviews, f"{reviews[-1]}, and a language hint"]
    word = found[f"{reviews[-1]}, and a language hint"]
    assert [word[0], word[1], word[3], word[4]] == ["+0.00 %"] * 4  # the base's own output
    assert word[2] != found["base"][2]
    assert len({tuple(values) for values in found.values()}) >= 5
    curve = table.split("\n\n")[1]
    assert "the language changed" in curve
    kept = json.loads((tmp_path / "out" / "scores" / "seed-0-LPR-help.json").read_text())
    assert set(kept) == {"en", "es", "zh", "el", "hu", "tr"}


def test_packs(tiny_study, quick_gates):
    found = rows(tiny_study("packs", calibration_tokens=100))
    assert list(found) == [
        "base", "pack el", "pack hu", "pack tr", "joined", "joined, gates",
        "joined, reviewed",
        "one joint expansion", "lifelong",
    ]  # fmt: skip
    assert found["one joint expansion"][-1] == "100.0 %"
    assert found["joined"] != found["joined, reviewed"]


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
