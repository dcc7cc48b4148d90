"""A study is taken up from its published JSON only where its rows would be the same here."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_moe_expand.core.errors import InputError

SETTINGS = {
    "old": {"reviewed": ["en"]},
    "new": ["el"],
    "rows": {"base": {}, "LoRA": {"dense": {}}, "other": {"plan": {}}},
}


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))


def base_scores(en):
    return {"scores": {domain: {"en": en, "el": 2.0} for domain in ("help", "flores")}}


def study(out, en=1.5):
    return SimpleNamespace(
        settings=SETTINGS, tokens=None, out=out, result=lambda name, seed: base_scores(en),
        result_file=lambda name, seed: out / "results" / f"{name}.{seed}.json",
        sweep_file=lambda name: out / "sweep" / f"{name}.json",
    )  # fmt: skip


def report(folder, **changes):
    digest = importlib.import_module("study_settings").row_digest(SETTINGS, "LoRA")
    seeds = [{"settings": digest, "seed": 2, "rate": 0.1}, {"settings": digest, "seed": 5, "rate": 0.1}]
    rows = {
        "base": {"sweep": {}, "seeds": [base_scores(1.5)]},
        "LoRA": {"sweep": {"settings": digest, "tried": []}, "seeds": seeds},
        "other": {"sweep": {"settings": "0", "tried": []}, "seeds": [{"settings": "0"}]},
        "unknown": {"sweep": {}, "seeds": [{"settings": digest}]},
    }
    path = folder / "report.json"
    path.write_text(json.dumps({"rows": rows | changes}))
    return path


def test_rows_of_the_same_settings_are_written_and_what_is_there_stays(tmp_path):
    restore, said = importlib.import_module("study_restore").restore, []
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "LoRA.5.json").write_text('{"mine": 1}')
    restore([study(tmp_path)], report(tmp_path), write=said.append)
    assert json.loads((tmp_path / "results" / "LoRA.2.json").read_text())["rate"] == 0.1
    assert json.loads((tmp_path / "results" / "LoRA.5.json").read_text()) == {"mine": 1}
    assert sorted(path.name for path in tmp_path.glob("*/*.json")) == ["LoRA.2.json", "LoRA.5.json", "LoRA.json"]
    assert said == ["LoRA, None tokens: 2 seeds", "other, None tokens: was made with other settings; left out"]


def test_rows_of_another_training_of_the_base_keep_its_scores(tmp_path):
    restore = importlib.import_module("study_restore").restore
    change = importlib.import_module("study_changes").change
    with pytest.raises(InputError, match="--retrained takes rows of another training"):
        restore([study(tmp_path, 1.51)], report(tmp_path))
    restore([study(tmp_path, 1.51)], report(tmp_path), retrained=True)
    one = json.loads((tmp_path / "results" / "LoRA.2.json").read_text())
    assert one["base"]["scores"] == base_scores(1.5)["scores"]
    scored = {**one, "scores": {"help": {"en": 1.47}}}
    assert change(scored, base_scores(1.51), "help", ["en"]) == pytest.approx(-2)
    again = report(tmp_path, LoRA={"sweep": {}, "seeds": [{**one, "base": base_scores(1.4)}]})
    restore([study(tmp_path / "further", 1.51)], again, retrained=True)
    assert json.loads((tmp_path / "further" / "results" / "LoRA.2.json").read_text())["base"] == base_scores(1.4)
    with pytest.raises(InputError, match=r"rows of different bases are not mixed\.$"):
        restore([study(tmp_path / "other", 1.6)], report(tmp_path), retrained=True)


def test_the_same_base_leaves_rows_as_they_are(tmp_path):
    importlib.import_module("study_restore").restore([study(tmp_path)], report(tmp_path), retrained=True)
    assert "base" not in json.loads((tmp_path / "results" / "LoRA.2.json").read_text())


def test_another_base_and_another_file_are_refused(tmp_path):
    restore = importlib.import_module("study_restore").restore
    with pytest.raises(InputError, match=r"its base has 1.5000 bits per byte of help in en, but this one has 1.5100"):
        restore([study(tmp_path, 1.51)], report(tmp_path))
    (tmp_path / "no.json").write_text('{"models": {}}')
    with pytest.raises(InputError, match=r"no.json: is no JSON of `study.py report`"):
        restore([study(tmp_path)], tmp_path / "no.json")
    path = report(tmp_path)
    rows = json.loads(path.read_text())["rows"]
    del rows["base"]
    for base in ({}, {"base": {"seeds": []}}, {"base": {"seeds": [{"scores": {"help": {}, "flores": {}}}]}}):
        path.write_text(json.dumps({"rows": rows | base}))
        with pytest.raises(InputError, match="has no scores of a row `base`"):
            restore([study(tmp_path)], path)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("restored", "said"),
    [
        ("", ""),
        ("LoRA", "LoRA: with seeds of another training of the base, whose own scores their changes are against."),
        ("LoRA other", "All rows but the base: with seeds of another training of the base, whose own scores their"),
    ],
)
def test_the_report_names_the_rows_of_another_training_or_those_that_are_not(restored, said):
    of_other_bases = importlib.import_module("study_report")._of_other_bases
    rows = {name: [{"base": {}} if name in restored.split() else {}, {}] for name in ("base", "LoRA", "other")}
    assert of_other_bases(rows).startswith(said)
    assert bool(of_other_bases(rows)) == bool(said)
