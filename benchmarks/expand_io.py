"""Compares expanding a checkpoint with copying the output's bytes, and with expanding in memory by transformers.

    python benchmarks/expand_io.py --gib 4 --scratch /tmp --out expand_io.md

Makes a dense bfloat16 checkpoint in shards whose expansion has `--gib` GiB (with `--layers` derived from it), then runs
in turn, each in a process of its own:

- `expand_checkpoint`;
- `cp -r` of its output;
- transformers: load the dense model, copy its FFNs, `save_pretrained`.

Each reads from a cold page cache (its input was dropped from it), and ends when its output is flushed to the disk
(fsync of every file, counted for all three). Imports are not counted. Peak memory is resident memory above that of the
parent process, which has only imported the modules. The run stops if transformers' tensors differ from ours (except
for the routers, which are random). Needs about four times `--gib` of disk. Linux only.
"""

import argparse
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from models import add_model_options, dense_config, dense_model, expanded_config, uniform_plan
from timing import in_own_process, parser, ratio, report, reset_peak, resident_bytes
from transformers import AutoModelForCausalLM

from hf_moe_expand import expand_checkpoint, expand_model
from hf_moe_expand.checkpoint.compare import compare_checkpoints

OURS, COPY, TRANSFORMERS = "expand_checkpoint", "cp", "transformers"


def layers_for(options: argparse.Namespace) -> int:
    """The number of layers whose expansion has about `--gib` GiB in bfloat16."""
    one, two = (_expanded_parameters(options, layers) for layers in (1, 2))
    return max(1, round((options.gib * 2**30 / 2 - (2 * one - two)) / (two - one)))


def _expanded_parameters(options: argparse.Namespace, layers: int) -> int:
    config = expanded_config(dense_config(options, layers), uniform_plan(layers, options.experts))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def write_base(folder: Path, options: argparse.Namespace, layers: int) -> None:
    model = dense_model(dense_config(options, layers), options.seed, torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=options.shard)


def expand(base: Path, out: Path, options: argparse.Namespace, layers: int) -> None:
    expand_checkpoint(base, out, uniform_plan(layers, options.experts), seed=options.seed, max_shard_size=options.shard)


def copy(source: Path, out: Path, options: argparse.Namespace, layers: int) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(out)], check=True)


def load_and_save(base: Path, out: Path, options: argparse.Namespace, layers: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    grown = expand_model(model, uniform_plan(layers, options.experts), seed=options.seed)
    grown.save_pretrained(out, max_shard_size=options.shard)


WAYS: dict[str, Callable[[Path, Path, argparse.Namespace, int], None]] = {
    OURS: expand,
    COPY: copy,
    TRANSFORMERS: load_and_save,
}


def measured(name: str, source: Path, out: Path, options: argparse.Namespace, layers: int) -> tuple[float, int]:
    """Seconds until the output is on the disk, and peak bytes; run it in a process of its own."""
    imports = resident_bytes()
    reset_peak()
    start = perf_counter()
    WAYS[name](source, out, options, layers)
    flush(out)
    return perf_counter() - start, resident_bytes(peak=True) - imports


def flush(folder: Path, drop: bool = False) -> None:
    """Waits until a folder's files are on the disk; `drop` also takes them out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            if drop:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def check_same(ours: Path, other: Path) -> None:
    """Raises RuntimeError if two checkpoints differ."""
    found = compare_checkpoints(ours, other)
    wrong = found.changed + found.added + found.removed
    if wrong:
        raise RuntimeError(f"transformers' expansion differs from ours in {', '.join(wrong[:5])}.")


def main(arguments: list[str] | None = None) -> None:
    options_parser = parser(__doc__, repeats=3, on_device=False)
    add_model_options(options_parser, hidden=2048, vocabulary=32000)
    options_parser.add_argument("--gib", type=float, default=4.0, help="size of the expansion (%(default)s)")
    options_parser.add_argument("--shard", default="1GB", help="size of the largest weight file (%(default)s)")
    options_parser.add_argument("--scratch", type=Path, help="folder on the disk to measure; its files stay unchanged")
    options = options_parser.parse_args(arguments)
    layers = layers_for(options)
    with TemporaryDirectory(dir=options.scratch, prefix="expand_io-") as name:
        folder = Path(name)
        base, kept, out = folder / "base", folder / "expanded", folder / "out"
        in_own_process(write_base, base, options, layers)
        in_own_process(measured, OURS, base, kept, options, layers)
        size = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
        files = len(list(base.glob("*.safetensors")))
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        peaks: dict[str, list[int]] = {way: [] for way in WAYS}
        for _ in range(options.repeats):
            for way in WAYS:
                source = kept if way == COPY else base
                flush(source, drop=True)
                seconds, peak = in_own_process(measured, way, source, out, options, layers)
                times[way].append(seconds)
                peaks[way].append(peak)
                if way == TRANSFORMERS:
                    check_same(kept, out)
                shutil.rmtree(out)
                os.sync()
    rows = []
    for way in WAYS:
        # The memory of cp itself is outside the measured process.
        peak = "–" if way == COPY else f"{max(peaks[way]) / 2**20:,.0f}"
        rows.append([way, f"{min(times[way]):.2f}", f"{ratio(times, way, COPY):.2f}", peak])
    title = f"Expansion of {layers} layers of {options.hidden} in {files} files to {options.experts} experts, "
    report(f"{title}{size / 2**30:.2f} GiB", ["way", "seconds", "time / cp", "peak MiB"], rows, options)


if __name__ == "__main__":
    main()
