"""Commands that are killed lose nothing, what interrupted ones leave is cleaned up, and an output has one writer."""

import errno
import logging
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from unittest.mock import patch

import pytest
from conftest import HERE, interrupted, refused, run_python, save_dense, start_python, write_texts

from hf_moe_expand import LanguageText, Plan, PostPretrainConfig, expand_checkpoint, train_stage
from hf_moe_expand.checkpoint.writer import new_folder
from hf_moe_expand.cli import tell_full_disk
from hf_moe_expand.core import scratch
from hf_moe_expand.core.errors import is_full_disk
from hf_moe_expand.core.jsonfile import read_json, write_json, write_text
from hf_moe_expand.runs.pipeline import run_recipe
from hf_moe_expand.runs.recipe import Recipe

PLAN = Plan("layer-moe", [2, 1, 2], old=["en"], new=["el"])
# No process has it: Linux counts to 2 ** 22.
DEAD = 2**22 + 1


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("kills")
    save_dense(root / "base", tie_word_embeddings=True)
    expand_checkpoint(root / "base", root / "expanded", PLAN)
    write_texts(root / "el.jsonl", ["a text that is long enough for a block " * 4] * 4)
    return root


def train(root, out, **changes):
    training = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 1, "disable_tqdm": True, **changes}
    data = {"el": LanguageText("el", str(root / "el.jsonl"))}
    return train_stage(root / "expanded", out, data, PostPretrainConfig(block_size=16, **training))


def test_killed_commands_lose_nothing(root, tmp_path):
    """In a process of its own, which forks: this one has threads."""
    inputs = Path(shutil.copytree(root, tmp_path / "inputs"))
    PLAN.save(inputs / "plan.json")
    (inputs / "stage.yaml").write_text("{block_size: 16, max_steps: 3, save_steps: 1, per_device_train_batch_size: 1}")
    code = "sys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\nimport kills\n"
    said = run_python(f"{code}print(*kills.run(Path(sys.argv[2])), sep='\\n')", str(HERE), str(inputs))
    assert said.strip() == ""


def test_a_training_says_where_it_goes_on_and_warns_of_nothing(root, tmp_path, capsys, caplog):
    with interrupted(5), pytest.raises(KeyboardInterrupt):
        train(root, tmp_path / "out")
    assert "resumes" not in capsys.readouterr().out
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        train(root, tmp_path / "out")
    finally:
        library.removeHandler(caplog.handler)
    said = capsys.readouterr()
    assert "resumes at step 4 of 6\n" in said.out
    assert "missing keys" not in said.err + caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_work_folder_that_was_removed_in_part_is_gone(tmp_path):
    folder = scratch.work_folder(tmp_path / "out.training")
    with patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        scratch.remove_work_folder(folder)
    assert not folder.exists()
    (left,) = tmp_path.iterdir()
    left.rename(tmp_path / f".out.training.partial-{DEAD}")  # as of a killed process
    scratch.remove_leftovers(tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["gated", "grown"])
def test_the_next_command_removes_a_folder_of_a_process_that_died_while_it_removed_it(tmp_path, kind):
    folder = scratch.work_folder(tmp_path / f".out.{kind}-{DEAD}-{gethostname()}")
    assert folder.is_dir()
    scratch.remove_leftovers(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_files_are_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "x.json"
    kept = [".x.json.partial", f".y.json.partial-{DEAD}", f".x.json.partial-{os.getppid()}", ".x.json.partial-user"]
    for name in kept:
        (tmp_path / name).write_text("of another")
    (tmp_path / f".x.json.partial-{DEAD}").write_text("of a dead process")
    write_json(file, {"a": 1})
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", *kept}
    assert {(tmp_path / name).read_text() for name in kept} == {"of another"}
    for write, value in ((write_json, {"a": 2}), (write_text, "2")):
        with patch.object(os, "replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            write(file, value)
    assert read_json(file, "x") == {"a": 1}
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", *kept}


def test_a_full_disk_is_told_in_one_line(capsys):
    full = [*(OSError(number, "x") for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
            RuntimeError("No space left on device (os error 28)")]  # fmt: skip
    for error in full:
        assert is_full_disk(error)
        assert tell_full_disk(error) == 2
        assert capsys.readouterr().err.startswith("error: the disk is full (")
    assert not any(map(is_full_disk, (OSError(errno.EACCES, "x"), OSError("x"), ValueError("x"))))


# Holds a folder's lock until its input ends.
HOLD = """
from pathlib import Path
from hf_moe_expand.core.scratch import FolderLock
lock = FolderLock(Path(sys.argv[1]), "works there")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(folder):
    """Inside, another process holds the lock of a folder; then it dies."""
    other = start_python(HOLD, str(folder))
    try:
        assert other.stdout.readline() == "held\n"
        yield other.pid
    finally:
        other.kill()
        other.communicate()


def test_a_folder_has_one_worker(tmp_path):
    lock = scratch.FolderLock(tmp_path, "works here")
    with held(tmp_path) as other:
        for take in (lock.acquire, lock.refuse_if_held):
            refused(take, says=rf"process {other} on \S+ works here already")
    lock.refuse_if_held()
    with lock.held():
        assert (tmp_path / scratch.LOCK).read_text().startswith(f"process {os.getpid()} ")
    assert not list(tmp_path.iterdir())
    lock.refuse_if_held()


def test_a_stage_is_trained_by_one_process(root, tmp_path):
    work = scratch.work_folder(tmp_path / "out.training")
    (work / "checkpoint-1").mkdir()
    with held(work) as other:
        refused(train, root, tmp_path / "out", says=rf"out\.training: process {other} on \S+ trains out already")
    assert (work / "checkpoint-1").is_dir()  # the other's
    train(root, tmp_path / "out", max_steps=2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_recipe_is_run_by_one_process(root, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: {root}/base\noutput: {tmp_path}/run\nnew: {{el: {root}/el.jsonl}}\nreview: null\n"
        "plan: {method: moe-lpr, experts: 2}\npost_pretrain: {block_size: 16, max_steps: 1, disable_tqdm: true}\n"
    )
    (tmp_path / "run").mkdir()
    with held(tmp_path / "run") as other:
        said = rf"run: process {other} on \S+ runs this recipe or another one there"
        refused(run_recipe, Recipe.load(recipe), says=said)
    run_recipe(Recipe.load(recipe))
    assert not (tmp_path / "run" / scratch.LOCK).exists()


def test_an_output_that_another_process_made_meanwhile_is_not_replaced(root, tmp_path):
    making = new_folder(tmp_path / "out")
    (making.__enter__() / "config.json").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("theirs")
    refused(making.__exit__, None, None, None, says="exists already")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "theirs"
