"""Commands that are stopped at some of their writes, and run again: `run(inputs)` returns what went wrong."""

import errno
import gc
import os
import shutil
import signal
import sys
from pathlib import Path

import accelerate.utils.other
import datasets

import hf_moe_expand.checkpoint.expand
import hf_moe_expand.stages.run  # noqa: F401  # then the forks have it
from hf_moe_expand import cli
from hf_moe_expand.stages import all_stages

accelerate.utils.other.is_deepspeed_available = lambda: False  # which each fork would import anew, for seconds
TRAIN = "train post-pretrain {inputs}/expanded {work}/out --data el={inputs}/el.jsonl --config {inputs}/stage.yaml"
FULL = -1  # the disk is full
# Of each command: at which part of its writes something happens, and what.
VERBS = {
    "expand {inputs}/base {work}/out --plan {inputs}/plan.json": [
        (0.3, signal.SIGKILL), (1.0, signal.SIGKILL), (0.5, FULL), (0.6, signal.SIGTERM)
    ],
    TRAIN: [(0.3, signal.SIGKILL), (0.7, signal.SIGKILL), (0.5, FULL), (0.6, signal.SIGTERM)],
    f"{TRAIN} --overwrite": [(0.9, signal.SIGKILL), (1.0, signal.SIGKILL)],
}  # fmt: skip
# What is told of a write: a file opened for writing, and these.
WRITES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
OTHERS = ("note.txt", "out.bak/x", ".out.partial-user/x", ".out.json.partial", "outer/config.json")


def tree(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name; `trainer_state.json` holds times."""
    return {
        str(file.relative_to(folder)): file.read_bytes() if file.name != "trainer_state.json" else b""
        for file in folder.rglob("*")
        if file.is_file()
    }


def forked(line: str, work: Path, stop: int = 0, ending: int = 0) -> tuple[int, int]:
    """Runs a command line in a fork, to which something happens at the write `stop`: exit code, number of writes."""
    read, write = os.pipe()
    if not (process := os.fork()):
        _child(line, work, stop, ending, write)
    os.close(write)
    _, status = os.waitpid(process, 0)
    with open(read) as said:
        return os.waitstatus_to_exitcode(status), int(said.read() or 0)


def _child(line: str, work: Path, stop: int, ending: int, write: int) -> None:
    count, code = 0, 70

    def hear(event: str, arguments: tuple) -> None:
        nonlocal count
        written = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not (written or event in WRITES):
            return
        if str(arguments[0]).startswith(str(work)) or event in ("os.remove", "os.rmdir"):
            count += 1
        if ending == FULL and count >= stop and event in ("open", "os.mkdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if ending > 0 and count == stop:
            os.kill(os.getpid(), ending)

    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
        datasets.config.HF_DATASETS_CACHE = work.with_name("cache")
        sys.argv = ["hf-moe-expand", *line.split()]
        sys.addaudithook(hear)
        cli.main()
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    finally:
        os.write(write, str(count).encode())
        os._exit(code)


def begin(work: Path, replaced: Path | None) -> None:
    """A folder with files of others, and with a checkpoint to replace."""
    shutil.rmtree(work, ignore_errors=True)
    for name in OTHERS:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("of another")
    if replaced:
        shutil.copytree(replaced, work / "out")


def run(inputs: Path) -> list[str]:
    work, wrong, made = inputs.with_name("work"), [], tree(inputs)
    all_stages()  # imports them before the forks
    gc.freeze()  # accelerate collects garbage after each training
    for verb, cases in VERBS.items():
        line, replaced = verb.format(inputs=inputs, work=work), inputs / "base" if "--overwrite" in verb else None
        begin(work, replaced)
        before = tree(work / "out")
        _, writes = forked(line, work)
        whole = tree(work / "out")
        for part, ending in cases:
            begin(work, replaced)
            first, _ = forked(line, work, int(writes * part), ending)
            left = tree(work / "out")
            second, _ = forked(line, work)
            found = {
                f"exit code {first}": first in ((2,) if ending == FULL else (-ending, 128 + ending)),
                "an output in part": left in ({}, before, whole),
                "inputs": tree(inputs) == made,
                "files of others": all((work / name).read_text() == "of another" for name in OTHERS),
                f"exit code {second} of the second": second == 0 or (second == 2 and left == whole),
                "other bytes": tree(work / "out") == whole,
                "leftovers": {path.name for path in work.iterdir()}
                == {*(name.split("/")[0] for name in OTHERS), "out"},
            }
            wrong += [
                f"{verb}, {ending} at {part:.2f} of {writes}: {what}" for what, right in found.items() if not right
            ]
        if writes < 10 or not whole:
            wrong.append(f"{verb}: {writes} writes")
    return wrong
