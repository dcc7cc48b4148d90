"""Commands that are killed at a random point: nothing is lost, and the same command afterwards ends as if nothing were.

    python benchmarks/kills.py --cases 300 --seed 0
    python benchmarks/kills.py --each-write
    python benchmarks/kills.py --moments --cases 20 --verb run --verb train --verb review

A case runs a verb in a forked process, which at a random write (a file opened for writing, a rename, a folder made or
removed) or moment gets SIGKILL, SIGTERM, SIGHUP or SIGINT, or finds the disk full from there on. Then the inputs and
files of others must be the same bytes, the output absent or whole, and the same command must end with the bytes of an
undisturbed one and without leftovers. With `--each-write` SIGKILL comes at each write in turn. With `--moments` the
endings are SIGTERM and SIGINT alone, at random moments of trainings of many steps. A training that got one of these
does at most one step again, and goes on where it said. A case depends on its
number and the seed alone, but for the moments.
"""

import argparse
import errno
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import torch
from fuzz import make
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from transformers.utils import logging

import hf_moe_expand
from hf_moe_expand import Plan, cli, expand_checkpoint, grow_checkpoint, join_expansions, modeling, trainers
from hf_moe_expand.core.jsonfile import read_json, write_json
from hf_moe_expand.demo import run as demo_run
from hf_moe_expand.evaluation.perplexity import LanguageScore
from hf_moe_expand.evaluation.validation import ValidationCurves
from hf_moe_expand.stages.resume import remove_training
from hf_moe_expand.stages.trainer import StageTrainer

FULL = "full disk"
ENDINGS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, FULL)
_LIMIT = 300  # seconds
_FEW, _MANY = 3, 60  # steps of a training; few are saved each
# They hold times.
_TIMED = ("trainer_state.json", "steps.json", "report.html")
_DATA = "--data el={made}/el.jsonl"
_DELTA = "--base {made}/base --instruct {made}/tuned"
_JOIN = "join {out} {made}/expanded {made}/pack --calibrate hu={made}/hu.jsonl --tokens 100"
_ANCHORS = " ".join(f"--anchors a{letter}={{made}}/en.jsonl" for letter in "abcdefghijklmnopqrst")
VERBS = {
    "expand": "expand {made}/base {out} --plan {made}/plan.json",
    "expand, sharded": "expand {made}/base {out} --plan {made}/plan.json --max-shard-size 20KB",
    "grow": "grow {made}/expanded {out} --plan {made}/grow.json --keep-routers",
    "shrink": "shrink {made}/grown {out} --to 1",
    "graft": f"graft {{made}}/expanded {{out}} {_DELTA}",
    "merge average": "merge average {made}/base {made}/tuned --out {out}",
    "merge delta": f"merge delta {{made}}/base {{out}} {_DELTA}",
    "expand-depth": "expand-depth {made}/base {out} --blocks 1",
    "export": "export {made}/expanded {out} --expert 0",
    "train": f"train post-pretrain {{made}}/expanded {{out}} {_DATA} --config {{made}}/stage.yaml",
    "train dense": f"train dense {{made}}/base {{out}} {_DATA} --config {{made}}/stage.yaml",
    "adapt": "train adapt {made}/dmoe {out} --data hu={made}/el.jsonl --config {made}/adapt.yaml",
    "run": "run {made}/recipe.yaml",
    "push": "push {made}/expanded a/b --dry-run --base a/c",
    "evaluate": f"evaluate {{made}}/base {_DATA} --new el --out {{out}} --block-size 8",
    "deviation": f"analyze deviation {{made}}/base {_DATA} --out {{out}} --steps 1 --batch-size 1 --block-size 4 "
    "--last-layers 1",
    "plan": "plan moe-lpr --layers 2 --experts 3 --old en --new el --out {out}",
    "join": "join {out} {made}/expanded {made}/pack",
    "shrink, a pack": "shrink {made}/joined {out} --without pack",
    "expand-branches": "expand-branches {made}/base {made}/tuned --plan {made}/branches.json --out {out}",
    "similarity": "analyze similarity {made}/base --old en={made}/en.jsonl --new el={made}/el.jsonl --out {out} "
    "--tokens 8 --block-size 8",
    "routing": "analyze routing {made}/expanded --data el={made}/el.jsonl --out {out} --block-size 8 --tokens 16",
    "sample": "sample {made}/base --out {out} --documents 2 --tokens 4",
    "card": "card {made}/expanded --out {out} --base a/b",
    "diff": "diff {made}/base {made}/tuned",
    "review": "train review {made}/expanded {out} --data en={made}/en.jsonl --data el={made}/el.jsonl "
    "--config {made}/stage.yaml",
    "gates": "gates {made}/expanded {out} --data en={made}/en.jsonl --data el={made}/el.jsonl --tokens 100 "
    "--anchor-tokens 100",
    "separability": "analyze separability {made}/base --old en={made}/en.jsonl --new el={made}/el.jsonl --out {out} "
    "--tokens 96 --block-size 8",
    "report": "report {made}/expanded {made}/grown --out {out}",
    "generate": "generate {made}/expanded word --max-new-tokens 2 --out {out}",
    "join, gates": f"{_JOIN} --calibrate en={{made}}/en.jsonl --calibrate el={{made}}/greek.jsonl {_ANCHORS}",
    "curriculum derive": "curriculum derive {made}/validation.json --out {out}",
    "curriculum counts": f"curriculum counts {_DATA} --steps 10 --thresholds 2 --shares 1,0.5 --out {{out}}",
    "fertility": f"analyze fertility {{made}}/base {_DATA} --out {{out}}",
    "evaluate-translation": f"evaluate-translation {{made}}/long {_DATA} --data en={{made}}/en.jsonl --limit 1 "
    "--max-new-tokens 2 --out {out}",
    "recipes schema": "recipes schema --out {out}",
    "recipes settings": "recipes settings --out {out}",
    "demo": "demo --out {out}",
    "recipes new": "recipes new --base {made}/long --new el={made}/el.jsonl --old en={made}/en.jsonl --out {out}",
}
# These replace a checkpoint that is there.
REPLACING = ("expand", "merge average", "train")
_TRAINS = ("train", "review", "train dense", "adapt", "run")
# These write parts that stay.
_IN_PARTS = ("run", "demo")


def make_all(folder: Path, steps: int) -> None:
    """The checkpoints, plans, texts and settings that the verbs start from; trainings have so many steps."""
    make(folder)
    tuned = shutil.copytree(folder / "base", folder / "tuned")
    weights = load_file(tuned / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in weights.items()}, tuned / "model.safetensors", {"format": "pt"})
    grow_checkpoint(folder / "expanded", folder / "grown", Plan.load(folder / "grow.json"), keep_routers=True)
    pack = Plan("layer-moe", [1, 2], old=["en"], new=["hu"])
    expand_checkpoint(folder / "base", folder / "pack", pack)
    join_expansions([folder / "expanded", folder / "pack"], folder / "joined")
    long = shutil.copytree(folder / "base", folder / "long")  # a recipe's blocks have 512 tokens
    write_json(long / "config.json", read_json(long / "config.json", "") | {"max_position_embeddings": 512})
    groups = Plan("dmoe", [2, 1], groups=[["en"], ["el"]])
    Plan("dmoe", [2, 2], groups=[["en"], ["el"]]).save(folder / "branches.json")
    expand_checkpoint(folder / "base", folder / "dmoe", groups)
    (folder / "el.jsonl").write_text('{"text": "a tiny text, long enough for some blocks of a few tokens each"}\n' * 3)
    shutil.copy(folder / "el.jsonl", folder / "en.jsonl")
    for code, text in (("greek", "το ποτάμι κυλάει κάτω από τη γέφυρα"), ("hu", "a folyó az öreg híd alatt folyik")):
        (folder / f"{code}.jsonl").write_text((json.dumps({"text": f"{text} " * 3}) + "\n") * 8)
    saves = {"save_steps": 1} if steps <= _FEW else {}
    keys = {"max_steps": steps, **saves, "per_device_train_batch_size": 1, "disable_tqdm": "true"}
    training = "".join(f"{key}: {value}\n" for key, value in keys.items())
    (folder / "stage.yaml").write_text(f"block_size: 8\n{training}")
    (folder / "adapt.yaml").write_text(f"block_size: 8\nsample_tokens: 400\n{training}")
    curves = ValidationCurves(["el"], 2)
    for at in range(3):
        curves.add(at, {"el": LanguageScore(8.0 - at, 3.0, 10, 10)})
    curves.save(folder / "validation.json")
    indented = "".join(f"  {line}\n" for line in (folder / "stage.yaml").read_text().splitlines())
    (folder / "recipe.yaml").write_text(
        f"base: {folder}/base\noutput: {folder.parent}/results/out\nold: {{en: {folder}/en.jsonl}}\n"
        f"new: {{el: {folder}/el.jsonl}}\ntest: {{el: {folder}/held.jsonl}}\n"
        "plan: {method: layer-moe, total_experts: 4, classifier_layers: 1}\n"
        "analysis: {tokens: 8, block_size: 8}\nevaluation: {block_size: 8}\n"
        f"post_pretrain:\n{indented}review:\n  old_documents: 1\n  new_per_old: 1\n{indented}"
    )


def tree(path: Path) -> dict[str, str]:
    """Each file below `path`, or `path` itself, to a hash of its bytes; folders to nothing."""
    if path.is_file():
        return {"": _hash(path)}
    return {str(file.relative_to(path)): _hash(file) for file in sorted(path.rglob("*")) if not file.is_symlink()}


def _hash(file: Path) -> str:
    if file.is_dir():
        return ""
    if file.name in _TIMED:
        return "timed"
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Events:
    """Counts what this process writes below a folder; at event `stop` it calls `happens`."""

    def __init__(self, folder: Path, stop: int, happens: Callable[[str], None]) -> None:
        self.folder, self.stop, self.happens, self.count = str(folder), stop, happens, 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "shutil.copyfile"):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if str(arguments[0]).startswith(self.folder) or event in ("os.remove", "os.rmdir"):
            self.count += 1
            if self.count >= self.stop > 0:
                self.happens(event)


class Steps(TrainerCallback):
    """Notes in a file the step at which a training begins, as `OUTPUT -STEP`, and each step that it does."""

    file: Path

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._note(f"{args.output_dir} -{state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._note(f"{args.output_dir} {state.global_step}")

    def _note(self, line: str) -> None:
        with open(self.file, "a") as file:
            file.write(f"{line}\n")

    @classmethod
    def read(cls) -> tuple[int, list[int]]:
        """The most steps of a training that were done again, and the steps at which trainings began."""
        again, begun, last = 0, [], dict[str, int]()
        for output, step in (line.rsplit(" ", 1) for line in cls.file.read_text().splitlines()):
            if step.startswith("-"):
                begun.append(int(step[1:]))
                again = max(again, last.get(output, 0) - begun[-1])
            else:
                last[output] = int(step)
        return again, begun


def noted(make: Callable[..., None]) -> Callable[..., None]:
    """A Trainer's `__init__` that adds `Steps`."""

    def made(self: Any, *args: Any, **keywords: Any) -> None:
        make(self, *args, **keywords)
        self.add_callback(Steps())

    return made


def forked(
    command: list[str], work: Path, stop: int = 0, ending: Any = None, moment: float = 0
) -> tuple[int, int, str]:
    """Runs the command line in a fork, in the folder `work / "cwd"`: its exit code (negative: a signal), its writes,
    and what it said."""
    said = work.parent / "said"
    process = os.fork()
    if not process:
        _child(command, work, said, stop, ending)
    if moment:
        time.sleep(moment)
        os.kill(process, ending)
    _, status = os.waitpid(process, 0)
    text = said.read_text(errors="replace")
    writes = [line for line in text.splitlines() if line.startswith("writes: ")]
    return os.waitstatus_to_exitcode(status), int(writes[-1].split()[1]) if writes else 0, text


def _child(command: list[str], work: Path, said: Path, stop: int, ending: Any) -> None:
    code = 70
    try:
        with open(said, "w") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        os.chdir(work / "cwd")
        signal.alarm(_LIMIT)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's job in the background ignores
        sys.argv = ["hf-moe-expand", *command]
        datasets.config.HF_DATASETS_CACHE = work.parent / "cache"
        passed: list[bool] = []

        def happens(event: str) -> None:
            if ending == FULL:
                if event in ("open", "os.mkdir"):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return
            if not passed:
                passed.append(True)
                os.kill(os.getpid(), ending)

        events = Events(work, stop, happens)
        try:
            cli.main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
        sys.stdout.flush()
        os.write(1, f"\nwrites: {events.count}\n".encode())
    finally:
        os._exit(code)


@dataclass
class Found:
    """Cases, and what went wrong in them."""

    cases: int = 0
    failures: list[str] = field(default_factory=list)
    hangs: int = 0
    lost: int = 0
    differing: int = 0
    again: int = 0  # the most steps of a training that were done again after a signal


class Kills:
    """Runs cases on the inputs in `folder / "made"`."""

    def __init__(self, folder: Path, steps: int = _FEW) -> None:
        self.made, self.work, Steps.file = folder / "made", folder / "results", folder / "steps"
        self.made.mkdir()
        make_all(self.made, steps)
        StageTrainer.__init__ = noted(StageTrainer.__init__)  # type: ignore[method-assign]
        for package in (hf_moe_expand, modeling, trainers):  # then forks have them
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
        demo_run.BASE = replace(demo_run.BASE, steps=2, num_layers=2, hidden_size=32)
        for long, short in (("max_steps: 300", "max_steps: 2"), ("max_steps: 200", "max_steps: 2"),
                            ("save_steps: 100", "save_steps: 1"), ("{tokens: 20000,", "{tokens: 200,"),
                            ("total_experts: 12", "similarity_floor: 0.01\n  total_experts: 6")):  # fmt: skip
            demo_run.RECIPE = demo_run.RECIPE.replace(long, short)
        demo_run.TRAIN_DOCUMENTS, demo_run.TEST_DOCUMENTS = 60, 4
        gc.freeze()
        self.inputs = tree(self.made)
        self.whole: dict[str, tuple[dict[str, str], int, float]] = {}

    def command(self, verb: str, replacing: bool) -> list[str]:
        line = VERBS[verb].format(made=self.made, out=self.work / "out") + (" --overwrite" if replacing else "")
        return line.split()

    def begin(self, verb: str, replacing: bool) -> dict[str, str]:
        """An empty folder with files of others, and the checkpoint to replace; returns the others' hashes."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.rmtree(self.work.parent / "cache", ignore_errors=True)
        names = ["note.txt", "out.bak/x", ".out.partial-user/x", ".out.partial", ".out.replaced/x", "outer/config.json",
                 ".out.json.partial", f".other.partial-{2**22 + 1}/x"]  # fmt: skip
        if verb not in _TRAINS:
            names += ["out.training/x", "out.grown/x"]
        for name in names:
            file = self.work / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{name} of another")
        (self.work / "cwd").mkdir()
        others = tree(self.work)
        if replacing:
            shutil.copytree(self.made / "tuned", self.work / "out")
        return others

    def undisturbed(self, verb: str) -> tuple[dict[str, str], int, float]:
        """What the command makes, how often it writes, and how long it takes."""
        if verb not in self.whole:
            self.begin(verb, False)
            started = time.monotonic()
            code, writes, said = forked(self.command(verb, False), self.work)
            if code != (1 if verb == "diff" else 0):
                raise RuntimeError(f"{verb}: {code}: {said[-2000:]}")
            self.whole[verb] = tree(self.work / "out"), writes, time.monotonic() - started
        return self.whole[verb]

    def case(self, number: int, seed: int, found: Found) -> None:
        """One case: a verb by its number, the rest at random."""
        rng = random.Random(f"{seed}-{number}")
        verb = list(VERBS)[number % len(VERBS)]
        _, writes, seconds = self.undisturbed(verb)
        replacing = verb in REPLACING and rng.random() < 0.4
        ending = rng.choice(ENDINGS)
        timed = ending != FULL and rng.random() < 0.25
        stop = 0 if timed else rng.randint(1, max(1, writes + 2 * replacing))
        moment = rng.uniform(0.02, seconds) if timed else 0
        self.stopped(f"{number}", verb, replacing, ending, stop, moment, found)

    def moment(self, number: int, seed: int, verb: str, found: Found) -> None:
        """One case of a signal at a moment of the later half, in which a verb trains."""
        rng, seconds = random.Random(f"{seed}-{number}"), self.undisturbed(verb)[2]
        ending = rng.choice((signal.SIGTERM, signal.SIGINT))
        self.stopped(f"{number}", verb, False, ending, 0, rng.uniform(seconds / 3, seconds), found)

    def each_write(self, verb: str, found: Found) -> None:
        """Kills a verb at each of its writes in turn, and where it replaces a checkpoint too."""
        _, writes, _ = self.undisturbed(verb)
        for replacing in (False, True) if verb in REPLACING else (False,):
            for stop in range(1, writes + 1 + 2 * replacing):
                self.stopped("each write", verb, replacing, signal.SIGKILL, stop, 0, found)

    def stopped(
        self, case: str, verb: str, replacing: bool, ending: Any, stop: int, moment: float, found: Found
    ) -> None:
        """Stops a verb at a write or a moment, checks what is left, and runs it again."""
        whole, writes, _ = self.undisturbed(verb)
        others = self.begin(verb, replacing)
        before = tree(self.work / "out")
        command = self.command(verb, replacing)
        Steps.file.write_text("")
        code, _, said = forked(command, self.work, stop, ending, moment)
        trained = len(Steps.read()[1])
        place = f"{moment:.2f} s" if moment else f"write {stop} of {writes}"
        words = f"{case}: {verb}{' --overwrite' if replacing else ''}: {ending!s} at {place}"
        found.cases += 1

        def bad(what: str) -> None:
            found.failures.append(f"{words}: {what}")

        final = 1 if verb == "diff" else 0
        # A signal that comes before there are handlers ends the process.
        ways = (2,) if ending == FULL else (-ending,) if ending == signal.SIGKILL else (128 + ending, -ending)
        if code == -signal.SIGALRM:
            found.hangs += 1
        if code not in (*ways, final):
            bad(f"exit code {code}: {said.strip().splitlines()[-2:]}")
        self._check_others(others, found, bad)
        now = tree(self.work / "out")
        complete = now == whole or not whole
        if verb not in _IN_PARTS and now not in ({}, whole, before):
            found.differing += 1
            bad(f"half an output: {sorted(set(now) ^ set(whole)) or [n for n in now if now[n] != whole[n]]}")
        code, _, again = forked(command, self.work)
        if code != final and not (code == 2 and complete and "exists already" in again):
            bad(f"the same command again: exit code {code}: {again.strip().splitlines()[-2:]}")
        done_again, begun = Steps.read()
        if verb in _TRAINS and ending in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            found.again = max(found.again, done_again)
            if done_again > 1:
                bad(f"{done_again} steps were done again")
            told = re.search(r"The same command goes on .*from step (\d+)", said)
            if told and begun[trained:][:1] != [int(told[1])]:
                bad(f"{told[0]}, but it went on from step {begun[trained:]}")
        now = tree(self.work / "out")
        if now != whole:
            found.differing += 1
            bad(f"other bytes: {sorted(set(now) ^ set(whole)) or [n for n in now if now[n] != whole[n]]}")
        self._check_others(others, found, bad)
        if complete and code == 2:
            remove_training(self.work / "out")  # the output was whole already; `inspect` names what lies beside it
            shutil.rmtree(self.work / "out.work", ignore_errors=True)
        known = {name.split("/")[0] for name in others} | {"out"}
        if left := sorted({path.name for path in self.work.iterdir()} - known):
            bad(f"leftovers: {left}")

    def _check_others(self, others: dict[str, str], found: Found, bad: Callable[[str], None]) -> None:
        now = tree(self.work)
        if lost := [name for name, content in others.items() if now.get(name) != content]:
            found.lost += len(lost)
            bad(f"files of others: {lost}")
        if extra := [name for name in now if name.startswith("cwd/")]:
            bad(f"left in the working folder: {extra}")
        if tree(self.made) != self.inputs:
            found.differing += 1
            bad("an input changed")


def run_cases(
    cases: int, seed: int, first: int = 0, verbs: tuple[str, ...] = (), say: Callable[[str], None] = lambda line: None
) -> Found:
    """Runs cases `first` to `first + cases`, those of `verbs` alone where some are named."""
    found = Found()
    with tempfile.TemporaryDirectory() as scratch:
        kills = Kills(Path(scratch))
        for number in range(first, first + cases):
            if verbs and list(VERBS)[number % len(VERBS)] not in verbs:
                continue
            known = len(found.failures)
            kills.case(number, seed, found)
            for line in found.failures[known:]:
                say(line)
    return found


def run_moments(
    cases: int, seed: int, verbs: tuple[str, ...] = (), say: Callable[[str], None] = lambda line: None
) -> Found:
    """Signals at random moments of trainings of many steps."""
    found = Found()
    with tempfile.TemporaryDirectory() as scratch:
        kills = Kills(Path(scratch), _MANY)
        for number in range(cases):
            known = len(found.failures)
            kills.moment(number, seed, (verbs or _TRAINS)[number % len(verbs or _TRAINS)], found)
            for line in found.failures[known:]:
                say(line)
    return found


def run_each_write(verbs: tuple[str, ...] = (), say: Callable[[str], None] = lambda line: None) -> Found:
    """Kills `verbs` (all where none is named) at each of their writes."""
    found = Found()
    with tempfile.TemporaryDirectory() as scratch:
        kills = Kills(Path(scratch))
        for verb in verbs or VERBS:
            known, cases = len(found.failures), found.cases
            kills.each_write(verb, found)
            for line in [*found.failures[known:], f"{verb}: {found.cases - cases} writes"]:
                say(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--verb", action="append", choices=sorted(VERBS), default=[], help="of these verbs alone; repeat"
    )
    parser.add_argument("--each-write", action="store_true", help="SIGKILL at each write of each verb in turn instead")
    parser.add_argument("--moments", action="store_true", help="signals at random moments of trainings instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore")
    started = time.monotonic()
    verbs = tuple(options.verb)

    def say(line: str) -> None:
        print(line, flush=True)

    if options.moments:
        found = run_moments(options.cases, options.seed, verbs, say)
    elif options.each_write:
        found = run_each_write(verbs, say)
    else:
        found = run_cases(options.cases, options.seed, options.first, verbs, say)
    print(f"{found.cases} cases: {len(found.failures)} failures, {found.hangs} hangs, {found.lost} foreign files lost, "
          f"{found.differing} differing bytes, {found.again} steps done again; "
          f"{time.monotonic() - started:.0f} s")  # fmt: skip
    raise SystemExit(bool(found.failures))


if __name__ == "__main__":
    main()
