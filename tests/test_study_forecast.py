"""The study's forecast, progress, choice of a device and disk space, on made-up rows."""

import importlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock

from hf_moe_expand.core.errors import InputError

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def job_of(forecast, rows, name, **changes):
    settings = {
        "rows": rows, "steps": 40, "review_steps": 10, "block_size": 10, "batch_size": 5, "pairs": "all",
        "rates": [1, 2, 3, 4], "review_rates": [1, 2, 3], "evaluation": {"max_tokens": 100}, **changes,
    }  # fmt: skip
    study = SimpleNamespace(
        settings=settings, old=["en"], models=SimpleNamespace(new=["hu"]), data=Path("nowhere"),
        tuning_texts=lambda: [{"en": []}, {"hu": []}],
    )  # fmt: skip
    return forecast.Job(study, name, 0, True, True)


def test_the_forecast_counts_trainings_and_scorings():
    forecast = importlib.import_module("study_forecast")
    plan = {"plan": {"method": "moe-lpr"}, "post_pretrain": {}, "review": {}}
    rows = {"base": {}, "full": {"dense": {}}, "mean": {"dense": {}, "average": [0.1, 0.5]}, "moe": plan}
    tokens, judged, scored = 2000, 2 * forecast.TUNING_TOKENS, 2 * 2 * 100

    def work(name, tunes=True, seed=0, **changes):
        job = job_of(forecast, rows, name, **changes)
        return forecast.work_of(forecast.Job(job.study, name, seed, True, True), tunes)

    assert work("base") == forecast.Work(1, 0, scored)
    assert work("full") == forecast.Work(7, 3 * tokens, scored + 3 * judged)
    assert work("full", seed=1).trained == 4 * tokens
    assert work("full", tunes=False) == forecast.Work(2, tokens, scored)
    assert work("full", rates=[1]) == forecast.Work(2, tokens, scored)
    assert work("mean") == forecast.Work(13, 0, scored + 6 * judged)  # its models are the row's before it
    assert work("moe").trained == pytest.approx(1.4 * tokens * (3 + 2 * 0.25))
    jobs = [job_of(forecast, rows, "full")]
    jobs += [forecast.Job(jobs[0].study, "full", seed, True, True) for seed in (1, 2)]
    assert [one.trained for one in forecast.work_by_job(jobs).values()] == [3 * tokens, tokens, tokens]


def test_progress_tells_the_time_left_from_the_rows_that_are_done(capsys):
    forecast = importlib.import_module("study_forecast")
    rows = {"a": {"dense": {}}, "b": {"dense": {}, "replay": 1}, "c": {"dense": {}, "replay": 2}}
    jobs = [job_of(forecast, rows, name, rates=[1]) for name in rows]
    jobs[0] = forecast.Job(jobs[0].study, "a", 0, False, False)
    times = iter([0.0, 60.0, 7200.0])
    progress = forecast.Progress(jobs, lambda: next(times))
    for job in jobs:
        progress.begin(job)
        progress.done(job)
    assert capsys.readouterr().out.splitlines() == [
        "== 1 of 3: a, seed 0, 2,000 tokens: made already", "== 2 of 3: b, seed 0, 2,000 tokens",
        "   60 s so far, about 60 s left", "== 3 of 3: c, seed 0, 2,000 tokens",
        "   2.0 h so far, all rows are made",
    ]  # fmt: skip


def test_the_forecasts_ffns_are_those_of_the_plans():
    """Against the totals that docs/study.md prints for SmolLM2: 30 layers of FFNs with 3 * 576 * 1536 weights."""
    forecast = importlib.import_module("study_forecast")
    settings = importlib.import_module("study_settings").read_settings(BENCHMARKS / "studies" / "study_smollm2.yaml")
    printed = {"base": 134.52, "MoE-LPR, 2 experts": 214.18, "LayerMoE": 254.01, "packs, joined with gates": 293.87}
    for name, total in printed.items():
        grown = forecast.new_ffns(settings["rows"][name], 30, 2) * 3 * 576 * 1536 / 1e6
        assert 134.52 + grown == pytest.approx(total, rel=1e-3)


def test_one_device_is_seen(monkeypatch):
    use = importlib.import_module("study").use_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for before, name, after in ((None, "cuda", "0"), (None, "cuda:3", "3"), ("4,7", "cuda:1", "7"), ("4", "cpu", "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before or "")
        use(name)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == after
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    for name, said in (("gpu", "must be cpu, cuda or cuda:N"), ("cpu:1", "must be cpu"), ("cuda:2", "shows 2 devices")):
        with pytest.raises(InputError, match=f"--device {name}: .*{said}"):
            use(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="finds no such device"):
        use("cuda")


def test_a_part_removes_old_models_but_none_that_another_part_holds(tmp_path):
    models = object.__new__(importlib.import_module("study_models").Models)
    models.out, models.settings = tmp_path, {"keep_gigabytes": 25e-9}
    steps = tmp_path / "steps"
    for age, name in enumerate(("new", "held", "old", "kept")):
        (steps / name).mkdir(parents=True)
        (steps / name / "weights").write_bytes(b"0123456789")
        (steps / f"{name}.json").write_text("{}")
        os.utime(steps / f"{name}.json", (1000 - age, 1000 - age))

    def there():
        return {path.name for path in steps.iterdir() if path.is_dir()}

    with FileLock(f"{steps / 'held'}.lock"):
        models.prune([steps / "kept"])
        assert there() == {"new", "held", "old", "kept"}  # the held one does not count
    (steps / "old.removed").mkdir()  # of a killed process
    (steps / "old.removed" / "weights").touch()
    models.settings["keep_gigabytes"] = 5e-9
    with FileLock(f"{steps / 'held'}.lock"):
        models.prune([steps / "kept"])
    assert there() == {"held", "kept"}
    models.prune([])
    assert there() == set()
