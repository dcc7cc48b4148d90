"""Shared by the benchmark scripts: interleaved timing, and peak memory in a separate process."""

import argparse
import multiprocessing
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeVar

import torch
import transformers
from tables import markdown_table

T = TypeVar("T")
Times = Mapping[str, Sequence[float]]

MIN_SECONDS = 0.02
CLOCKS = {"wall": perf_counter, "processor": process_time}

# Imported once, by the server from which the measured processes are forked.
_PRELOAD = ["hf_moe_expand.checkpoint.expand", "hf_moe_expand.trainers", "transformers.models.qwen2.modeling_qwen2"]


def time_in_turn(
    cases: Mapping[str, Callable[[], object]], repeats: int, device: str = "cpu", clock: str = "wall"
) -> dict[str, list[float]]:
    """Seconds for one call: `repeats` figures for each case. Each round runs all cases once, and starts with another
    case.

    Short calls are repeated until a figure covers `MIN_SECONDS`, after two calls to warm up and, in each round, after
    half as many calls: the case before may have filled the caches with its own weights, or with this case's.
    """
    calls = {}
    for name, call in cases.items():
        _seconds(call, 1, device, clock)
        calls[name] = max(1, round(MIN_SECONDS / _seconds(call, 1, device, clock)))
    found: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            _seconds(cases[name], calls[name] // 2, device, clock)
            found[name].append(_seconds(cases[name], calls[name], device, clock) / calls[name])
    return found


def _seconds(call: Callable[[], object], calls: int, device: str, clock: str) -> float:
    synchronize(device)
    start = CLOCKS[clock]()
    for _ in range(calls):
        call()
    synchronize(device)
    return CLOCKS[clock]() - start


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def ratio(times: Times, case: str, base: str) -> float:
    """`case / base`, each in its fastest round: what else runs on a machine can only add to a time."""
    return min(times[case]) / min(times[base])


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """Runs a module-level function in a fresh process, forked from a process that has only imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def resident_bytes(peak: bool = False) -> int:
    """Resident memory of this process in bytes, now or at its peak (Linux)."""
    # Not getrusage, whose maximum is inherited from the parent process.
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


def reset_peak() -> None:
    """Resets the peak of `resident_bytes(peak=True)`."""
    Path("/proc/self/clear_refs").write_text("5")


def parser(description: str | None, repeats: int, on_device: bool = True) -> argparse.ArgumentParser:
    """A parser with the common options of all benchmarks; with `--device` if `on_device`."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--repeats", type=int, default=repeats, help="rounds; the fastest is reported (%(default)s)")
    found.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    if on_device:
        found.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
        about = "processor: this process's seconds, for one thread on a machine that others use too (%(default)s)"
        found.add_argument("--clock", choices=list(CLOCKS), default="wall", help=about)
    else:
        found.set_defaults(device="cpu", clock="wall")
    found.add_argument("--out", type=Path, help="also write the table here")
    return found


def report(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], options: argparse.Namespace, mode: str = "w"
) -> None:
    """Prints the header line and the table, and writes them to `--out`; with mode `a` behind what is there."""
    text = "\n".join([header(title, options), "", markdown_table(head, rows)])
    print(text)
    if options.out:
        with options.out.open(mode, encoding="utf-8") as file:
            file.write(text + "\n")


def header(title: str, options: argparse.Namespace) -> str:
    """The line above a table: what ran, with which versions and settings."""
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"cpu ({platform.machine()})"
    parts = [
        f"torch {torch.__version__}",
        f"transformers {transformers.__version__}",
        f"threads {torch.get_num_threads()}",
        f"device {device}",
        f"repeats {options.repeats}",
        f"seed {options.seed}",
        f"{options.clock} clock",
    ]
    parts += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")]
    return f"{title}: {', '.join(parts)}"
