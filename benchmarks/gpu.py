"""Measures one GPU, and prints benchmarks/speed_gpu.md.

    python benchmarks/gpu.py --out benchmarks/speed_gpu.md
    python benchmarks/gpu.py --part ffn

Parts: `correctness` runs the tests marked `gpu`; `ffn` measures one expanded FFN (expert_speed.py), `train` a training
step of each stage (train_step.py), `decode` generation (generate.py). `--out` is written after each measurement, so
that it is whole if the run is cut off. A part ends when its share of `--minutes` is used up, and says so.
"""

import argparse
import gc
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import expert_speed
import generate
import torch
import train_step
import transformers
from tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
# Options of the scripts.
FFN = "--repeats 3 --hidden 2048 4096 --experts 2 4 8 --tokens 512 4096 16384 --dtypes bf16"
_TRAIN = "--hidden 2048 --layers 8 --batch 8 --block 1024 --repeats 1 --steps 6"
TRAIN = [f"{_TRAIN} --experts {experts}" for experts in (2, 3)]
_DECODE = "--hidden 2048 --layers 6 --tokens 32 --repeats 2"
_CACHES = ("--batch 8 1 --cache dynamic", "--batch 8 --cache static --rows expanded")
DECODE = [f"{_DECODE} --experts {experts} {cache}" for experts in (2, 3) for cache in _CACHES]
PYTEST = ["tests/test_gpu.py", "-m", "gpu"]


@dataclass(eq=False)
class Section:
    """A part of the page.

    Attributes:
        about: lines above the table.
        note: the line below it: what is missing.
    """

    title: str
    about: str
    head: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    def __str__(self) -> str:
        table = markdown_table(self.head, self.rows) if self.rows else ""
        return "\n\n".join(text for text in (f"## {self.title}", self.about, table, self.note) if text)


# A part gets the device and the time at which it ends. It yields each section when it begins and when it grows.
Part = Callable[[str, float], Iterator[Section]]


def correctness(device: str, deadline: float) -> Iterator[Section]:
    """Runs the tests marked `gpu`."""
    about = f"`pytest {' '.join(PYTEST)}`, in float32 and bfloat16."
    section = Section("Correctness", about, ["test", "passed", "failed", "skipped"])
    yield section
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PYTEST, f"--junitxml={report}"]
        seconds = max(1.0, deadline - time.monotonic())
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=seconds, check=False, capture_output=True, text=True)
            print(done.stdout, done.stderr, file=sys.stderr)
        except subprocess.TimeoutExpired:
            section.note = "the tests took too long"
        counts: dict[str, list[int]] = {}
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            kinds = {child.tag for child in case}
            outcome = 2 if "skipped" in kinds else int(bool(kinds & {"failure", "error"}))
            name = case.get("name", "").partition("[")[0].removeprefix("test_").replace("_", " ")
            counts.setdefault(name, [0, 0, 0])[outcome] += 1
    section.rows += [[name, *map(str, of)] for name, of in counts.items()]
    yield section
    if not counts or any(failed for _, failed, _ in counts.values()):
        raise RuntimeError(section.note or "a test failed, or none ran; pytest says more on standard error")


def ffn(device: str, deadline: float) -> Iterator[Section]:
    """One FFN: the cases of expert_speed.py."""
    options = expert_speed.options_parser().parse_args([*FFN.split(), "--device", device])
    about = (
        "Multiples of the time of a dense FFN of equal active FLOPs (`dense ms`); columns and passes as in "
        f"`benchmarks/expert_speed.py`: `python benchmarks/expert_speed.py --device {device} {FFN}`."
    )
    section = Section("One expanded FFN", about, expert_speed.HEAD)
    yield from _filled(section, expert_speed.rows(options), deadline)


def train(device: str, deadline: float) -> Iterator[Section]:
    """A training step of each stage."""
    for words in TRAIN:
        options = train_step.options_parser().parse_args([*words.split(), "--device", device])
        section = Section(train_step.title(options), _command("train_step.py", device, words), train_step.HEAD)
        yield from _filled(section, train_step.rows(options), deadline)


def decode(device: str, deadline: float) -> Iterator[Section]:
    """Generation with a dynamic and with a static cache."""
    for words in DECODE:
        options = generate.options_parser().parse_args([*words.split(), "--device", device])
        title = f"{generate.title(options)}, {options.cache[0]} cache"
        section = Section(title, _command("generate.py", device, words), generate.HEAD)
        yield from _filled(section, generate.rows(options), deadline)


def _command(script: str, device: str, words: str) -> str:
    return f"`python benchmarks/{script} --device {device} {words}`"


def _filled(section: Section, measured: Iterator[list[list[str]]], deadline: float) -> Iterator[Section]:
    """Adds the rows until the deadline."""
    yield section
    while time.monotonic() < deadline:
        rows = next(measured, None)
        if rows is None:
            return
        section.rows += rows
        yield section
    section.note = "The time of this part was used up here."
    yield section


PARTS: dict[str, Part] = {"correctness": correctness, "ffn": ffn, "train": train, "decode": decode}
# Shares of the time; the rest is for the last measurement, which may begin late.
SHARES = {"correctness": 0.25, "ffn": 0.21, "train": 0.13, "decode": 0.31}


def page(sections: Sequence[Section], device: str) -> str:
    """The whole page."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}"
    intro = f"Printed by `make gpu` on {datetime.now(UTC):%Y-%m-%d}: {name}, {versions}. The fastest round of each."
    return "\n\n".join(["# Speed on a GPU, measured", intro, *map(str, sections)]) + "\n"


def run(parts: Sequence[str], device: str, minutes: float, out: Path | None) -> bool:
    """Runs the parts, and writes the page after each of their measurements; returns whether all went well."""
    sections: list[Section] = []
    is_well, deadline = True, time.monotonic()
    whole = sum(SHARES[name] for name in parts) if len(parts) < len(PARTS) else 1.0
    for name in parts:
        deadline += 60 * minutes * SHARES[name] / whole
        try:
            for section in PARTS[name](device, deadline):
                if section not in sections:
                    sections.append(section)
                if out:
                    out.write_text(page(sections, device), "utf-8")
        except Exception as error:  # the other parts go on
            is_well = False
            sections.append(Section(f"{name}: failed", f"{type(error).__name__}: {error}", []))
            if out:
                out.write_text(page(sections, device), "utf-8")
        gc.collect()
        torch.cuda.empty_cache()
    print(page(sections, device), end="")
    return is_well


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), nargs="+", default=list(PARTS), help="(all)")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together (%(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: to try the script")
    parser.add_argument("--out", type=Path, help="write the page here too")
    options = parser.parse_args(arguments)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # on several GPUs the Trainer would use all
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("No GPU: torch.cuda.is_available() is False. Nothing was measured and nothing written.")
    if not run(options.part, options.device, options.minutes, options.out):
        sys.exit("A part failed: the page says which.")


if __name__ == "__main__":
    main()
