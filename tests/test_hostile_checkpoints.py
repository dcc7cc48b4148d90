"""A sample of `benchmarks/hostile.py`: damaged checkpoints end in success or in one sentence, and never hang."""

import importlib
import json
import time
from pathlib import Path

import pytest
from conftest import save_dense

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.errors import InputError

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
# `python benchmarks/hostile.py` runs ten thousand.
CASES = 60


@pytest.fixture
def hostile(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("hostile")


def test_damaged_checkpoints_end_in_success_or_one_sentence(hostile):
    found = hostile.run_cases(CASES, seed=1, limit=60)
    assert not found.bad
    # The damage is neither harmless nor always the same.
    assert found.counts["refused"] > CASES / 4
    assert found.counts["ok"] > CASES / 10


def test_a_case_depends_on_its_number_and_the_seed_alone(hostile, tmp_path):
    hostile.make(tmp_path)
    for number in (4, 11):
        assert hostile.run_case(number, 5, tmp_path, 60) == hostile.run_case(number, 5, tmp_path, 60)
    words = {hostile.run_case(number, seed, tmp_path, 20)[1] for number in (0, 6) for seed in (1, 2)}
    assert len(words) == 4


def test_every_damage_changes_a_file(hostile, tmp_path):
    hostile.make(tmp_path)
    before = {file.name: file.read_bytes() for file in (tmp_path / "expanded").iterdir()}
    for number, damage in enumerate(dict.fromkeys(hostile.DAMAGES)):
        folder = tmp_path / str(number)
        for attempt in range(8):
            hostile.shutil.copytree(tmp_path / "expanded", folder / str(attempt))
            assert damage(hostile.random.Random(attempt), folder / str(attempt))
        copies = [
            {file.name: file.read_bytes() for file in copy.iterdir() if file.is_file()} for copy in folder.iterdir()
        ]
        assert sum(copy != before for copy in copies) > 5


@pytest.mark.parametrize(
    ("error", "ending"),
    [(ZeroDivisionError("x"), "traceback"), (InputError("two\nlines"), "refused"), (InputError("x"), "refused")],
)
def test_it_notices_what_it_looks_for(hostile, tmp_path, monkeypatch, error, ending):
    class Runner:
        def invoke(self, *_):
            return type("Result", (), {"exception": error})

    hostile.make(tmp_path)
    monkeypatch.setattr(hostile, "CliRunner", Runner)
    assert hostile.run_case(0, 0, tmp_path, 20)[0] == ending


def test_it_notices_a_hang(hostile, tmp_path, monkeypatch):
    class Runner:
        def invoke(self, *_):
            time.sleep(60)

    hostile.make(tmp_path)
    monkeypatch.setattr(hostile, "CliRunner", Runner)
    assert hostile.run_case(0, 0, tmp_path, 0.2)[0] == "hang"


def test_a_dense_checkpoint_with_fields_of_expanded_ones_is_refused(tmp_path):
    base = save_dense(tmp_path / "base")
    fields = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**fields, "classifier_layers": [1]}))
    with pytest.raises(InputError, match="its configuration has classifier_layers, a field of expanded models"):
        expand_checkpoint(base, tmp_path / "out", Plan("layer-moe", [2, 1, 2], [], old=["en"], new=["el"]))
