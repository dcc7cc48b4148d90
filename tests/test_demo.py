"""The demo, cut short: the same steps, a few steps; and its text."""

import re
from dataclasses import replace

import pytest

from hf_moe_expand.demo import run
from hf_moe_expand.demo.run import NEW, OLD, documents


@pytest.mark.usefixtures("quick_gates")
def test_the_demo_goes_the_whole_way_and_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "BASE", replace(run.BASE, steps=2, hidden_size=32, num_layers=2))
    monkeypatch.setattr(run, "TRAIN_DOCUMENTS", 60)
    # A base that has hardly trained tells no languages apart.
    recipe = re.sub(r"max_steps: \d+", "max_steps: 2", run.RECIPE)
    monkeypatch.setattr(run, "RECIPE", recipe.replace("unseen_share: 0.01", "unseen_share: 0.99"))
    run.run_demo(tmp_path)
    said = capsys.readouterr().out
    assert said.startswith("This demo trains a small base model, mostly on en, es, de, and teaches it el, hu, tr. It ")
    assert f"writes to {tmp_path}" in said.partition("\n")[0]
    assert "| mean of new |" in said
    assert "loaded as LayerMoEForCausalLM" in said
    assert "Post-pretraining" in (tmp_path / "run" / "report.html").read_text()
    assert all(f"| {code} (old) | " in said for code in OLD)
    run.run_demo(tmp_path)
    assert capsys.readouterr().out.count("done already") == 5


def test_every_language_has_its_own_documents_and_the_splits_differ():
    for code in (*OLD, *NEW):
        train, test = documents(code, 200, 0), documents(code, 60, 1)
        assert train == documents(code, 200, 0)
        assert "{" not in "".join(train)
        assert len(set(train) & set(test)) == 0
        assert len(set(train)) == 200
