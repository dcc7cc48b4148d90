"""Outputs appear whole or not at all, and nothing of anybody else's is deleted for them."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace

import pytest
from conftest import invoke, refused, start_python, write_texts

from hf_moe_expand import Plan, expand_checkpoint
from hf_moe_expand.checkpoint.source import resolve_checkpoint
from hf_moe_expand.checkpoint.writer import check_output, foreign_file, new_folder
from hf_moe_expand.core.disk import readable_size
from hf_moe_expand.core.errors import InputError
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


# The arguments of each verb that writes a checkpoint; IN is the input that the output would touch.
WRITERS = {
    "expand": "expand IN OUT --plan {plan}",
    "grow": "grow IN OUT --plan {further}",
    "grow with text": "grow IN OUT --plan {further} --copy-from nearest --data hu={text}",
    "graft": "graft IN OUT --base {base} --instruct {base}",
    "graft base": "graft {expanded} OUT --base IN --instruct {base}",
    "graft instruct": "graft {expanded} OUT --base {base} --instruct IN",
    "merge average": "merge average {base} IN --out OUT",
    "merge delta": "merge delta {base} OUT --base {base} --instruct IN",
    "export": "export IN OUT --expert 1",
    "expand blocks": "expand IN OUT --blocks 1",
    "expand branches": "expand {base} OUT --branches IN --plan {groups}",
    "train post-pretrain": "train post-pretrain IN OUT --data el={text}",
    "train review": "train review IN OUT --data el={text}",
    "train group": "train group IN OUT --data el={text}",
    "train joint": "train joint IN OUT --data el={text}",
    "train adapt": "train adapt IN OUT --data hu={text}",
    "train dense": "train dense IN OUT --data el={text}",
}
DENSE_INPUT = ("expand", "graft base", "graft instruct", "merge average", "merge delta", "expand blocks",
               "expand branches", "train dense")  # fmt: skip


@pytest.mark.parametrize("verb", WRITERS)
def test_no_verb_writes_into_an_input_or_around_one(made, tmp_path, verb):
    kind = "base" if verb in DENSE_INPUT else "dmoe" if verb in ("train group", "train joint", "train adapt") else ""
    home = tmp_path / "home"
    model = shutil.copytree(made / (kind or "expanded"), home / "model")
    (home / "config.json").write_text("{}")  # without the model inside, --overwrite would replace it
    further = Plan("layer-moe", [3, 1, 3], [], old=["en", "el"], new=["hu"], grows_from=[2, 1, 2])
    plans = {"plan": PLAN, "further": further, "groups": Plan("dmoe", [2, 2, 2], groups=[["en"], ["el"]])}
    files = {name: tmp_path / f"{name}.json" for name in plans}
    for name, plan in plans.items():
        plan.save(files[name])
    text = write_texts(tmp_path / "text.jsonl", ["one two three"])
    words = WRITERS[verb].format(base=made / "base", expanded=made / "expanded", text=text, **files).split()
    before = sorted(home.rglob("*"))
    (tmp_path / "link").symlink_to(model)
    for out, message in (
        (model / "deep" / "out", "lies in the input folder"),
        (tmp_path / "link" / "out", "lies in the input folder"),
        (model, "the output folder is the input folder"),
        (home, "the input folder .* lies in it"),
    ):
        given = [str(model) if word == "IN" else str(out) if word == "OUT" else word for word in words]
        refused(invoke, *given, "--overwrite", says=message)
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize("name", ["thesis.tex", "mine.py", "tokenizer_key.pem", "checkpoint-5/x", "sub/config.json"])
def test_overwriting_deletes_no_foreign_file(tmp_path, name):
    folder = fill(tmp_path / "out", "model.safetensors", name)
    first = re.escape(name.split("/")[0])
    refused(check_output, folder, True, says=rf"out: holds {first}.*, which is not part of a checkpoint")
    with pytest.raises(InputError), new_folder(folder, overwrite=True):
        pass
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


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file/out", r"file is a file, not a folder"),
        ("x" * 300, "cannot be written .*too long"),
        ("file", "file: is a file, not a folder"),
    ],
)
def test_places_where_nothing_can_be_written_are_one_sentence(tmp_path, place, message):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=message), new_folder(tmp_path / place, overwrite=True):
        pass
    refused(check_output, tmp_path / place, True, says=message)


def test_a_folder_without_permission_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(check_output, tmp_path / "deep" / "out", False, says=rf"out: cannot be made, as {tmp_path} is not writable")


@pytest.mark.parametrize("needed", [0, 12345])
def test_a_full_disk_says_how_much_was_needed(tmp_path, needed):
    def write():
        with new_folder(tmp_path / "out", needed_bytes=needed) as partial:
            (partial / "x").write_bytes(bytes(10))
            raise OSError(errno.ENOSPC, "No space left on device")

    refused(write, says=f"at least {readable_size(max(needed, 10))} are needed")
    assert not list(tmp_path.iterdir())


def test_an_output_that_the_disk_has_no_room_for_is_refused_before_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with new_folder(tmp_path / "fits", needed_bytes=1000):
        pass
    said = "out: needs 1.0 kB, 1 byte more than the disk has free"
    with pytest.raises(InputError, match=said), new_folder(tmp_path / "out", needed_bytes=1001):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]


KILLED = """
import os, signal, sys
from pathlib import Path
from hf_moe_expand.checkpoint.writer import new_folder
calls, rename = [], os.rename
def renamed(*paths):
    calls.append(paths)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*paths)
os.rename = renamed
with new_folder(sys.argv[1], overwrite=True) as partial:
    (partial / "config.json").write_text("new")
"""


def kill_at_rename(out: Path, number: int) -> None:
    assert start_python(KILLED, str(out), str(number)).wait() == -signal.SIGKILL


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    out = fill(tmp_path / "out", "model.safetensors")
    kill_at_rename(out, 2)
    assert not out.exists()
    assert resolve_checkpoint(out) == out  # any reader
    assert (out / "config.json").read_text() == "{}"
    kill_at_rename(out, 2)
    refused(check_output, out, False, says="exists already")
    with new_folder(out, overwrite=True) as partial:
        (partial / "config.json").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "config.json").read_text() == "whole"


def test_the_next_run_removes_what_dead_processes_left_and_nothing_else(tmp_path):
    out = fill(tmp_path / "out")
    kill_at_rename(out, 1)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    gone = [f".out.partial-{dead.pid}", f".out.replaced-{dead.pid}-{gethostname()}"]
    kept = [f".out.partial-{running.pid}", f".out.partial-{dead.pid}-another-machine", ".out.partial-x", ".out.partial",
            f".other.partial-{dead.pid}", f"out.partial-{dead.pid}", f".out.training-{dead.pid}"]  # fmt: skip
    for name in (*gone, *kept):
        fill(tmp_path / name)
    (tmp_path / "precious").mkdir()
    (tmp_path / f".out.partial-{dead.pid}-{gethostname()}").symlink_to(tmp_path / "precious")
    try:
        with new_folder(out, overwrite=True) as partial:
            fill(partial)
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
    with pytest.raises(KeyboardInterrupt), new_folder(out, overwrite=True) as partial:
        fill(partial, "model.safetensors")
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


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
    with new_folder(tmp_path / "out") as partial:
        fill(partial)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
