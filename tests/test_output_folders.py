"""Outputs appear whole or not at all, and nothing of anybody else's is deleted for them."""

import errno
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace

import pytest
from conftest import invoke, refused, write_texts

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint.source import resolve_checkpoint
from hf_moe_expand.checkpoint.writer import check_output, foreign_file, new_folder
from hf_moe_expand.core.disk import readable_size
from hf_moe_expand.core.scratch import remove_work_folder, work_folder

MASK = os.umask(0)  # of new files
os.umask(MASK)
PLAN = Plan("layer-moe", [2, 1, 2], [], old=["en"], new=["el"])


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    (folder / "base").symlink_to(base)
    expand_checkpoint(base, folder / "expanded", PLAN)
    expand_checkpoint(base, folder / "dmoe", Plan("dmoe", [2, 1, 2], groups=[["en"], ["el"]]))
    return folder


def fill(folder: Path, *names: str) -> Path:
    for name in ("config.json", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


# The verbs that write a checkpoint; IN is the input that the output would touch, a copy of this model.
WRITERS = (
    "expand IN:base OUT --plan {plan}",
    "grow IN:expanded OUT --plan {further} --copy-from nearest --data hu={text}",
    "graft IN:expanded OUT --base {base} --instruct {base}",
    "graft {expanded} OUT --base IN:base --instruct {base}",
    "graft {expanded} OUT --base {base} --instruct IN:base",
    "merge average {base} IN:base --out OUT",
    "merge delta {base} OUT --base {base} --instruct IN:base",
    "export IN:expanded OUT --expert 1",
    "expand IN:base OUT --blocks 1",
    "expand {base} OUT --branches IN:base --plan {groups}",
    "train post-pretrain IN:expanded OUT --data el={text}",
    "train joint IN:dmoe OUT --data el={text}",
    "train adapt IN:dmoe OUT --data hu={text}",
    "train dense IN:base OUT --data el={text}",
)


@pytest.mark.parametrize("line", WRITERS)
def test_no_verb_writes_into_an_input_or_around_one(made, tmp_path, line):
    home = tmp_path / "home"
    line, kind = re.sub(r"IN:\w+", "IN", line), re.search(r"IN:(\w+)", line)[1]
    model = shutil.copytree(made / kind, home / "model")
    (home / "config.json").write_text("{}")  # without the model inside, --overwrite would replace it
    further = Plan("layer-moe", [3, 1, 3], [], old=["en", "el"], new=["hu"], grows_from=[2, 1, 2])
    plans = {"plan": PLAN, "further": further, "groups": Plan("dmoe", [2, 2, 2], groups=[["en"], ["el"]])}
    files = {name: tmp_path / f"{name}.json" for name in plans}
    for name, plan in plans.items():
        plan.save(files[name])
    text = write_texts(tmp_path / "text.jsonl", ["one two three"])
    words = line.format(base=made / "base", expanded=made / "expanded", text=text, **files).split()
    before = sorted(home.rglob("*"))
    (tmp_path / "link").symlink_to(model)
    for out in (model / "deep" / "out", tmp_path / "link" / "out", model, home):
        given = [str(model) if word == "IN" else str(out) if word == "OUT" else word for word in words]
        refused(invoke, *given, "--overwrite", says="is, holds or lies in the input folder")
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize("name", ["thesis.tex", "mine.py", "tokenizer_key.pem", "checkpoint-5/x", "sub/config.json"])
def test_overwriting_deletes_no_foreign_file(tmp_path, name):
    folder = fill(tmp_path / "out", "model.safetensors", name)
    first = re.escape(name.split("/")[0])
    for write in (lambda out: check_output(out, True), make):
        refused(write, folder, says=rf"out: holds {first}.*, which is not part of a checkpoint")
    assert (folder / name).is_file()


def test_checkpoints_are_overwritten(made, tmp_path):
    assert foreign_file(made / "base") is None
    assert foreign_file(made / "expanded") is None
    usual = (
        "trainer_state.json", "training_args.bin", "README.md", "evaluation.json", "validation.json", "optimizer.pt",
        "rng_state_0.pth", "__pycache__/x.pyc", "model-00001-of-00002.safetensors", "merges.txt", "tokenizer.model",
        "model.safetensors.index.json", "additional_chat_templates/tools.jinja",
    )  # fmt: skip
    folder = fill(tmp_path / "out", *usual)
    with new_folder(folder, overwrite=True) as partial:
        fill(partial)
        (partial / "config.json").chmod(0o600)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o666 & ~MASK
    assert list(tmp_path.iterdir()) == [folder]  # the folder that was replaced is gone


def make(out, needed=0, error=None):
    """A folder of ten bytes, as a verb makes it that may fail."""
    with new_folder(out, overwrite=True, needed_bytes=needed) as partial:
        (partial / "config.json").write_bytes(bytes(10))
        if error:
            raise error


def test_places_where_nothing_can_be_written_are_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    places = {"file/out": "file is no folder, or not", "file": "file: is a file", "x" * 300: "cannot be .*too long"}
    for place, said in places.items():
        for write in (lambda out: check_output(out, True), make):
            refused(write, tmp_path / place, says=said)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(check_output, tmp_path / "deep" / "out", False, says=rf"out: cannot be .*{tmp_path} is .*not writable")


def test_a_full_disk_says_how_much_was_needed_and_one_without_room_is_not_written(tmp_path, monkeypatch):
    for needed in (0, 12345):
        said, full = readable_size(max(needed, 10)), OSError(errno.ENOSPC, "No space left on device")
        refused(make, tmp_path / "out", needed, full, says=f"at least {said} are needed")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    refused(make, tmp_path / "out", 1001, says="out: needs 1.0 kB, 1 byte more than the disk has free")
    assert not list(tmp_path.iterdir())
    make(tmp_path / "fits", 1000)


def kill_at_rename(out: Path, number: int) -> None:
    """Writes an output in a process that is killed at this rename."""
    if not (process := os.fork()):
        rename, renames = os.rename, iter(range(1, 9))
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        os.rename = lambda *paths: kill() if next(renames) == number else rename(*paths)
        try:
            make(out)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    out = fill(tmp_path / "out", "model.safetensors")
    kill_at_rename(out, 2)
    assert not out.exists()
    assert resolve_checkpoint(out) == out  # any reader
    assert (out / "config.json").read_text() == "{}"
    kill_at_rename(out, 2)
    refused(check_output, out, False, says="exists already")
    make(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "config.json").read_bytes() == bytes(10)


def test_the_next_run_removes_what_dead_processes_left_and_nothing_else(tmp_path):
    out = fill(tmp_path / "out")
    kill_at_rename(out, 1)
    dead, running = (subprocess.Popen(["sleep", seconds]) for seconds in ("0", "600"))
    dead.wait()
    gone = [f".out.partial-{dead.pid}", f".out.replaced-{dead.pid}-{gethostname()}"]
    kept = [f".out.partial-{running.pid}", f".out.partial-{dead.pid}-another-machine", ".out.partial-x", ".out.partial",
            f".other.partial-{dead.pid}", f"out.partial-{dead.pid}", f".out.training-{dead.pid}"]  # fmt: skip
    for name in (*gone, *kept):
        fill(tmp_path / name)
    (tmp_path / "precious").mkdir()
    (tmp_path / f".out.partial-{dead.pid}-{gethostname()}").symlink_to(tmp_path / "precious")
    try:
        make(out)
    finally:
        running.kill()
        running.wait()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"out", "precious", f".out.partial-{dead.pid}-{gethostname()}", *kept}


def test_an_error_between_the_renames_puts_the_old_folder_back(tmp_path, monkeypatch):
    out, rename = fill(tmp_path / "out"), os.rename

    def second_fails(source, target):
        if ".partial-" in str(source):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(KeyboardInterrupt):
        make(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "config.json").read_text() == "{}"


def test_folders_without_the_marker_are_neither_used_nor_removed(tmp_path):
    (tmp_path / "photos" / "holiday").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(work_folder(tmp_path / "work"))
    for name in ("photos", "file", "link"):
        refused(work_folder, tmp_path / name, says="not a work folder")
        refused(remove_work_folder, tmp_path / name, says="not removed")
        assert (tmp_path / name).exists()
    refused(work_folder, tmp_path / "file" / "work", says="work: Not a directory")


def test_what_another_machine_left_is_removed_after_a_day(tmp_path, monkeypatch):
    fill(tmp_path / ".out.partial-1-another-machine")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 24 * 60 * 60)
    make(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
