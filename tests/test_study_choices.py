"""What the study makes of its numbers: the front, the rates that it tries and chooses, the claims that it judges."""

import importlib
import json
from pathlib import Path

import pytest

from hf_moe_expand.core.errors import InputError

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pytest.importorskip("lm_eval.tasks", reason="the extra `eval` is not installed")


def test_no_point_of_the_pareto_front_is_beaten():
    pareto = importlib.import_module("study_figures").pareto
    points = {"base": (0, 0), "a": (10, -1), "b": (9, -2), "c": (20, -9), "d": (20, -10)}
    assert pareto(points) == ["base", "a", "c"]


def test_a_sweep_goes_on_where_the_best_rate_is_at_an_end():
    sweep = importlib.import_module("study_tuning").sweep
    rates = [0.1, 0.3, 1.0, 3.0, 10.0]
    for best, tried in ((1.0, rates[1:4]), (0.3, rates[:4]), (0.1, rates[:4]), (10.0, rates[1:])):
        calls = []

        def score(rate, best=best, calls=calls):
            calls.append(rate)
            return abs(rate - best)

        assert sweep(rates, score) == best
        assert sorted(calls) == tried  # each once
    assert sweep([1e-3], lambda rate: pytest.fail("nothing is to be chosen")) == 1e-3
    assert sweep([1e-3, 1e-2], lambda rate: -rate) == 1e-2


def test_the_ladders_of_the_settings_begin_in_their_middle():
    settings = importlib.import_module("study_settings")
    for name, rates, review in (("study", (1e-3, 1e-2), 1e-2), ("study_smollm2", (1e-4, 1e-3), 1e-2)):
        found = settings.read_settings(BENCHMARKS / "studies" / f"{name}.yaml")
        first = (len(found["rates"]) - 3) // 2
        assert (found["rates"][first], found["rates"][first + 2]) == rates
        assert found["review_rates"][len(found["review_rates"]) // 2] == review
        for key in ("rates", "review_rates"):
            assert found[key] == sorted(found[key])


def test_the_rate_is_chosen_first_then_the_reviews_and_each_rate_has_its_best_weight(tmp_path):
    tuning = importlib.import_module("study_tuning")
    settings = {"rates": [1.0, 2.0, 3.0], "review_rates": [10.0, 20.0, 30.0]}
    calls = []

    def score(choice):
        calls.append(choice)
        return abs(choice.rate - 3) + abs((choice.review_rate or 0) - 10) / 100 + abs((choice.weight or 0) - 0.6)

    def tune(row, name="a"):
        calls.clear()
        return tuning.tune(row, settings, tuning.Tried(tmp_path / f"{name}.json", "hash", score))

    assert tune({"review": {}}) == tuning.Choice(3.0, 10.0)
    assert [(one.rate, one.review_rate) for one in calls] == [(1, 20), (2, 20), (3, 20), (3, 10), (3, 30)]
    assert tune({"review": {}}) == tuning.Choice(3.0, 10.0)
    assert not calls  # all of it was kept
    found = json.loads((tmp_path / "a.json").read_text())
    found["tried"] = found["tried"][:2]
    (tmp_path / "a.json").write_text(json.dumps(found))
    assert tune({"review": {}}) == tuning.Choice(3.0, 10.0)
    assert len(calls) == 3  # a stopped sweep goes on
    assert tune({"review": None, "average": [0.2, 0.6, 0.9]}, "b") == tuning.Choice(3.0, None, 0.6)
    assert len(calls) == 9
    settings["rates"] = [2.0]
    assert tune({}, "c") == tuning.Choice(2.0)
    assert not calls
    assert tune({"rates": [1.0, 3.0], "review": {}, "review_rates": [20.0]}, "e") == tuning.Choice(3.0, 20.0)
    assert [(one.rate, one.review_rate) for one in calls] == [(1, 20), (3, 20)]
    assert tune({"average": [0.2, 0.6]}, "d") == tuning.Choice(2.0, None, 0.6)
    with pytest.raises(InputError, match=r"a.json: was made with other settings; remove it, or give another --out"):
        tuning.Tried(tmp_path / "a.json", "other", score)


def test_a_claim_is_judged_by_the_seeds_of_both_domains():
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


@pytest.mark.parametrize("name", ["study", "lengths", "lengths_smollm2", "lengths_smollm2_gpu"])
def test_every_claim_names_rows_of_the_study(name):
    settings = importlib.import_module("study_settings").read_settings(BENCHMARKS / "studies" / f"{name}.yaml")
    for claims in settings["claims"].values():
        for _, group, better, other in claims:
            assert {better, other} <= set(settings["rows"])
            assert group in {*settings["old"], "new", "old"}
    assert set(settings["curves"]) <= set(settings["rows"])
