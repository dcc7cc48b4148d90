"""Two processes on one output: the second one names the first."""

import os

import pytest
from conftest import refused, save_dense, start_python, write_texts

from hf_moe_expand import LanguageText, Plan, PostPretrainConfig, expand_checkpoint, train_stage
from hf_moe_expand.checkpoint.writer import new_folder
from hf_moe_expand.core.errors import InputError
from hf_moe_expand.core.scratch import LOCK, FolderLock, work_folder
from hf_moe_expand.runs.pipeline import run_recipe
from hf_moe_expand.runs.recipe import Recipe

# Holds a folder's lock until its input ends.
HOLD = """
import sys
from pathlib import Path
from hf_moe_expand.core.scratch import FolderLock
lock = FolderLock(Path(sys.argv[1]), "works there")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held():
    """`held(folder)` lets another process hold the lock of a folder; returns the process."""
    processes = []

    def hold(folder):
        started = start_python(HOLD, str(folder))
        processes.append(started)
        assert started.stdout.readline() == "held\n"
        return started

    yield hold
    for process in processes:
        process.communicate()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("lock")
    save_dense(root / "base")
    expand_checkpoint(root / "base", root / "expanded", Plan("layer-moe", [2, 1, 2], old=["en"], new=["el"]))
    write_texts(root / "el.jsonl", ["a text that is long enough for a block " * 4] * 4)
    return root


def train(root, out):
    config = PostPretrainConfig(block_size=16, max_steps=2, per_device_train_batch_size=1, disable_tqdm=True)
    return train_stage(root / "expanded", out, {"el": LanguageText("el", str(root / "el.jsonl"))}, config)


def test_a_folder_has_one_worker(tmp_path, held):
    other = held(tmp_path)
    lock = FolderLock(tmp_path, "works here")
    for take in (lock.acquire, lock.refuse_if_held):
        refused(take, says=rf"process {other.pid} on \S+ works here already.*`kill {other.pid}`")
    other.kill()  # as if it died
    other.wait()
    lock.refuse_if_held()
    with lock.held():
        assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()} ")
    assert not list(tmp_path.iterdir())
    lock.refuse_if_held()


def test_a_stage_is_trained_by_one_process(root, tmp_path, held):
    work = work_folder(tmp_path / "out.training")
    (work / "checkpoint-1").mkdir()
    other = held(work)
    refused(train, root, tmp_path / "out", says=rf"out\.training: process {other.pid} on \S+ trains out already")
    assert (work / "checkpoint-1").is_dir()  # the other's
    other.kill()
    other.wait()
    train(root, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_recipe_is_run_by_one_process(root, tmp_path, held):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: {root}/base\noutput: {tmp_path}/run\nold: {{en: {root}/el.jsonl}}\nnew: {{el: {root}/el.jsonl}}\n"
        "plan: {method: moe-lpr, experts: 2}\n"
        "post_pretrain: {block_size: 16, max_steps: 1, disable_tqdm: true}\n"
        "review: {block_size: 16, old_documents: 1, new_per_old: 1, max_steps: 1, disable_tqdm: true}\n"
    )
    (tmp_path / "run").mkdir()
    other = held(tmp_path / "run")
    with pytest.raises(InputError, match=rf"run: process {other.pid} on \S+ runs this recipe or another one there"):
        run_recipe(Recipe.load(recipe))
    other.kill()
    other.wait()
    run_recipe(Recipe.load(recipe))
    assert not (tmp_path / "run" / LOCK).exists()


def test_an_output_that_another_process_made_meanwhile_is_not_replaced(root, tmp_path):
    making = new_folder(tmp_path / "out")
    (making.__enter__() / "config.json").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("theirs")
    refused(making.__exit__, None, None, None, says="exists already")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "theirs"
